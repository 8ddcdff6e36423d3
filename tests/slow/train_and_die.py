"""Train as sft.train does, and be killed at a moment of the clock: `ON=1 AFTER=0.7 ... train_and_die.py RECIPE ...`.

ON is the rank, AFTER the seconds since its first step began.
"""

import os
import signal
import threading
import time
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.launch import rank as train
from sft.parallel import process_group as distributed
from sft.program import run_main
from sft.train import main as training


def die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


class Death(TrainerCallback):  # type: ignore[misc]
    """Starts the clock when the training begins."""

    def on_train_begin(self, *args: Any, **keywords: Any) -> None:
        if distributed.rank() == int(os.environ["ON"]):
            threading.Thread(target=die_after, args=(float(os.environ["AFTER"]),), daemon=True).start()


def main() -> None:
    build_trainer = training.build_trainer

    def dying(*arguments: Any) -> Any:
        trainer = build_trainer(*arguments)
        trainer.add_callback(Death())
        return trainer

    training.build_trainer = dying
    run_main(train.main)


if __name__ == "__main__":
    main()
