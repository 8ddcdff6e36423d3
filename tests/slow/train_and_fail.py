"""Train as sft.train does, and have one rank fail on the way: `torchrun ... train_and_fail.py RANK STEP HOW STARTS RECIPE ...`.

HOW is raise, mistake, kill, segfault or exit; STARTS is how many starts of the job fail so.
"""

import os
import signal
import sys
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.errors import ModelError
from sft.launch import rank as train
from sft.program import run_main
from sft.train import main as training


class Failure(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        if self.how == "raise":
            raise ZeroDivisionError("made by the test")
        if self.how == "mistake":
            raise ModelError("a mistake made by the test")
        if self.how == "exit":
            os._exit(7)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV}[self.how])


def main() -> None:
    """Take what is ours off the command line, plant the failure, and train."""
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # the deepspeed launcher's
    rank, step, how, starts, *sys.argv[1:] = words
    build_trainer = training.build_trainer

    def failing(*arguments: Any) -> Any:
        trainer = build_trainer(*arguments)
        if os.environ.get("RANK", "0") == rank and int(os.environ.get("SFT_RESTARTS", "0")) < int(starts):
            trainer.add_callback(Failure(int(step), how))
        return trainer

    training.build_trainer = failing
    run_main(train.main)


if __name__ == "__main__":
    main()
