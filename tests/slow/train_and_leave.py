"""Train as sft.train does, save after a step that is no multiple of anything, and end there: `train_and_leave.py STEP RECIPE ...`."""

import sys
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.launch import rank as train
from sft.program import run_main
from sft.train import main as training


class Leave(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == self.step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise SystemExit(5)


def main() -> None:
    step = int(sys.argv.pop(1))
    build_trainer = training.build_trainer

    def leaving(*arguments: Any) -> Any:
        trainer = build_trainer(*arguments)
        trainer.add_callback(Leave(step))
        return trainer

    training.build_trainer = leaving
    run_main(train.main)


if __name__ == "__main__":
    main()
