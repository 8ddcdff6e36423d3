"""Traces a few steady steps (train.profile), and on a GPU records the memory of the first ones, to <run>/profile/.

| file                    | content                                                      | read by                            |
|-------------------------|--------------------------------------------------------------|------------------------------------|
| rank<N>.json.gz         | compute, communication, data loading                         | ui.perfetto.dev, chrome://tracing  |
| memory_rank<N>.pickle   | allocations of SKIPPED steps, and the code behind them (GPU) | pytorch.org/memory_viz             |

Every rank writes its own. In a collective all ranks wait for the last one, and only the trace of that one shows why; tracing a single
rank would slow it down, and so make it the last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft.parallel import process_group as distributed

SKIPPED, WARMUP, RECORDED = 4, 2, 3
"""Steps. The first ones allocate and compile; the warm-up takes the profiler's own slow start."""


class Profile(TrainerCallback):  # type: ignore[misc]
    """Traces RECORDED steps of this session on this rank. Must be the last callback."""

    def __init__(self, folder: Path, on_gpu: bool) -> None:
        self.folder, self.rank, self.on_gpu = folder, distributed.rank(), on_gpu
        self._profiler: Any = None
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the profiler where enough steps are left."""
        left, needed = state.max_steps - state.global_step, SKIPPED + WARMUP + RECORDED
        if left < needed:
            self._say(f"train.profile: {left} steps are left and {needed} are needed, so there is no profile.")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        kinds = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if self.on_gpu else [])],
            schedule=torch.profiler.schedule(wait=SKIPPED, warmup=WARMUP, active=RECORDED, repeat=1),
            on_trace_ready=self._write_trace,
            record_shapes=True,
            acc_events=True,  # there is one cycle; without it torch warns that the next one would erase it
        )
        self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the profiler on, and write the memory before it starts: noting the code behind each allocation would slow its steps."""
        if self._profiler is None:
            return
        self._steps += 1
        if self.on_gpu and self._steps == SKIPPED:
            memory: Any = torch.cuda.memory
            memory._dump_snapshot(str(self.folder / f"memory_rank{self.rank}.pickle"))
            memory._record_memory_history(enabled=None)
        self._profiler.step()
        if self._steps == SKIPPED + WARMUP + RECORDED:
            self.on_train_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, also where training ends early."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write_trace(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(self.folder / f"rank{self.rank}.json.gz"))
        self._say(f"Profile, one file per rank: {self.folder} (open it in ui.perfetto.dev)")

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
