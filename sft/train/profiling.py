"""train.profile: a trace of a few steady steps, and on a GPU the memory they hold, under <run>/profile/.

| file                    | content                                                    | read by                                 |
|-------------------------|------------------------------------------------------------|-----------------------------------------|
| rank<N>.json.gz         | compute, communication, data loading                       | ui.perfetto.dev, or chrome://tracing    |
| memory_rank<N>.pickle   | one step's allocations, with the code that made them (GPU) | pytorch.org/memory_viz                  |

Every rank writes its own. A rank waits in a collective for the one that comes last, and only that one's trace says why;
and to trace a single rank would slow it, and so make it the last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

SKIPPED, WARMUP, RECORDED = 4, 2, 3
"""Steps. The first ones allocate and compile; the profiler's own start is slow, which the warm-up takes."""


@dataclass(frozen=True)
class Window:
    """Steps, one stretch after another."""

    skipped: int
    warmup: int
    recorded: int
    memory: int
    """Recorded after the trace: to note the code behind every allocation slows a step, which would show in it."""


def profile_window(steps: int, on_gpu: bool) -> Window | None:
    """Which of the steps that are left are profiled, or None where there are too few.

    >>> profile_window(100, on_gpu=True)
    Window(skipped=4, warmup=2, recorded=3, memory=1)
    >>> profile_window(4, on_gpu=False)
    Window(skipped=0, warmup=1, recorded=3, memory=0)
    """
    if steps < 2:
        return None
    memory = int(on_gpu and steps > 2)
    recorded = min(RECORDED, steps - memory - 1)
    warmup = min(WARMUP, steps - memory - recorded)
    return Window(min(SKIPPED, steps - memory - recorded - warmup), warmup, recorded, memory)


class Profile(TrainerCallback):  # type: ignore[misc]
    """Traces the window on this rank, and says on the first where it lies. Must be the last callback.

    Args:
        folder: Of the run's profiles.
        rank: Of this process.
        on_gpu: Whether the steps run on a GPU.
    """

    def __init__(self, folder: Path, rank: int, on_gpu: bool) -> None:
        self.folder, self.rank, self.on_gpu = folder, rank, on_gpu
        self.window: Window | None = None
        self._profiler: Any = None
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose the window and make ready."""
        steps, self._first_step = state.max_steps - state.global_step, state.global_step
        self.window = profile_window(steps, self.on_gpu)
        wanted = SKIPPED + WARMUP + RECORDED
        if self.window is None:
            self._say(f"train.profile: {steps} step{'s are' if steps != 1 else ' is'} left, too few to profile.")
            return
        if steps < wanted:
            self._say(
                f"train.profile: only {steps} steps are left of the {wanted} it takes, so {self.window.recorded} of the first ones are "
                "traced: they allocate, and are slower than those that follow."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        kinds = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if self.on_gpu else [])],
            schedule=torch.profiler.schedule(
                wait=self.window.skipped, warmup=self.window.warmup, active=self.window.recorded, repeat=1
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
            acc_events=True,  # there is one cycle; without it torch warns that the next would erase it
        )
        self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move on through the window."""
        if self.window is None:
            return
        if self._profiler is not None:
            self._profiler.step()
        done = state.global_step - self._first_step
        before_memory = self.window.skipped + self.window.warmup + self.window.recorded
        if done == before_memory:
            self._profiler.stop()
            self._profiler = None
        if self.window.memory and done == before_memory:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        if self.window.memory and done == before_memory + 1:
            self._write_memory()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training may end before the window does."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write_trace(self, profiler: Any) -> None:
        assert self.window is not None
        started = time.monotonic()
        profiler.export_chrome_trace(str(self.folder / f"rank{self.rank}.json.gz"))
        first = self._first_step + self.window.skipped + self.window.warmup + 1
        last = first + self.window.recorded - 1
        self._say(
            f"Profile of steps {first} to {last}, one file a rank, written in {time.monotonic() - started:.1f} s: {self.folder} "
            "(open it in ui.perfetto.dev)"
        )

    def _write_memory(self) -> None:
        file = self.folder / f"memory_rank{self.rank}.pickle"
        memory: Any = torch.cuda.memory
        memory._dump_snapshot(str(file))
        memory._record_memory_history(enabled=None)
        self._say(f"Memory of the step after it: {file} (open it in pytorch.org/memory_viz)")

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
