"""Measures how fast the training is: times its steps, and relates their tokens and FLOPs to the time and to the GPUs' peak."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import TrainerCallback

from sft.plan.gpus import find_gpu
from sft.plan.hardware import Hardware
from sft.train.batches import Work


def peak_flops(hardware: Hardware) -> float | None:
    """Dense peak in half precision of all GPUs of the job, FLOP/s; None where unknown."""
    found = find_gpu(hardware.gpu.name) if hardware.gpu else None
    return found.half_flops * hardware.ranks if found else None


def peak_memory_gib() -> tuple[float, float]:
    """The most memory this rank has used: of its GPU, by tensors and reserved by torch for them; of the process without one, twice."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kibibytes / 2**20, kibibytes / 2**20


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Times the steps of this rank. Must be the first callback: what the others do at the end of a step does not count.

    On a GPU the CPU's clock would time the launching of kernels. There an event is recorded in the stream at both ends of a step, without
    waiting, and read when a line is logged.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._began: Any = None
        self._steps: list[tuple[Any, Any]] = []
        self._data_seconds = 0.0

    def start(self) -> None:
        """A step begins."""
        self._began = self._mark()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with the wait for each counted. The iterator can be continued afterwards."""
        # Not `yield from`: it would close the epoch's batches together with this generator, after one step.
        while True:
            asked = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._data_seconds += time.monotonic() - asked
            yield batch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        self._steps.append((self._began, self._mark()))

    def take(self) -> tuple[list[float], float]:
        """Seconds of each step since the last call, and of all of them those inside the data loader's `next`."""
        if self.on_gpu and self._steps:
            self._steps[-1][1].synchronize()
        steps = [
            begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin  # an event counts in milliseconds
            for begin, end in self._steps
        ]
        waited = self._data_seconds
        self._steps, self._data_seconds = [], 0.0
        return steps, waited

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.monotonic()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def speed(work: Work, steps: list[float], data_seconds: float, peak: float | None) -> dict[str, float | None]:
    """The figures of a line of metrics.jsonl.

    Args:
        work: What the steps of the line held.
        steps: Seconds of each.
        data_seconds: Of all of them, those spent waiting for data.
        peak: FLOP/s of all GPUs, None where unknown.
    """
    seconds = sum(steps)
    p50, p90 = np.percentile(steps, [50, 90]).tolist()
    return {
        "tokens_per_second": work.tokens / seconds,
        "labelled_tokens_per_second": work.target_tokens / seconds,
        "mfu": work.flops / seconds / peak if work.flops is not None and peak is not None else None,
        "step_seconds_p50": p50,
        "step_seconds_p90": p90,
        "data_seconds": data_seconds,
    }
