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
    measurements = training.measurements

    def leaving(*arguments: Any) -> tuple[Any, list[Any]]:
        clock, callbacks = measurements(*arguments)
        return clock, [*callbacks, Leave(step)]

    training.measurements = leaving
    run_main(train.main)


if __name__ == "__main__":
    main()
