"""Train as sft.train does, with one planted fault on rank 1: `FAULT=... torchrun ... train_and_stall.py RECIPE ...`."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from sft.launch import rank as train
from sft.program import run_main
from sft.train.trainer import RecipeTrainer

AT_STEP, SLEEP = 6, 10


def data_that_sleeps(seconds: int) -> None:
    time.sleep(seconds)


def in_data(fault: Callable[[], None]) -> None:
    """Have it happen while a micro-batch is read."""
    read = RecipeTrainer.get_batch_samples

    def read_late(self: Any, epoch_iterator: Any, *args: Any) -> Any:
        def batches() -> Any:
            if self.state.global_step + 1 == AT_STEP:
                fault()
            while True:
                try:
                    yield next(epoch_iterator)
                except StopIteration:
                    return

        return read(self, batches(), *args)

    RecipeTrainer.get_batch_samples = read_late  # type: ignore[method-assign]


def skip_a_micro_batch() -> None:
    step = RecipeTrainer.training_step

    def skip(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == AT_STEP and self.progress.passes == 1:
            self.progress.passes += 1  # as a loop does that has gone on
            return self._tr_loss * 0
        return step(self, model, *args, **kwargs)

    RecipeTrainer.training_step = skip  # type: ignore[method-assign]


def a_batch_fewer() -> None:
    read = RecipeTrainer.get_batch_samples

    def read_fewer(self: Any, epoch_iterator: Any, count: int, device: Any) -> Any:
        return read(self, epoch_iterator, count - (self.state.global_step + 1 == AT_STEP), device)

    RecipeTrainer.get_batch_samples = read_fewer  # type: ignore[method-assign]


def main() -> None:
    fault = os.environ["FAULT"] if os.environ.get("RANK", "0") == "1" else "none"
    if fault == "sleep":
        in_data(lambda: data_that_sleeps(SLEEP))
    if fault == "stop":
        in_data(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    if fault == "lock":  # a call that does not let go of Python's lock
        in_data(lambda: print(ctypes.PyDLL(None).sleep(SLEEP)))
    if fault == "skip":
        skip_a_micro_batch()
    if fault == "fewer":
        a_batch_fewer()
    run_main(train.main)


if __name__ == "__main__":
    main()
