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

AT_STEP, SLEEP = 6, 60


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


def main() -> None:
    fault = os.environ["FAULT"] if os.environ.get("RANK", "0") == "1" else "none"
    if fault == "sleep":
        in_data(lambda: data_that_sleeps(SLEEP))
    if fault == "stop":
        in_data(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    if fault == "lock":  # a call that does not let go of Python's lock
        in_data(lambda: print(ctypes.PyDLL(None).sleep(SLEEP)))
    run_main(train.main)


if __name__ == "__main__":
    main()
