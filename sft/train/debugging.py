"""debug: true. What the libraries are told to log and compare, and the memory of each rank.

| file in <run>/logs     | content                                                             |
|------------------------|---------------------------------------------------------------------|
| rank-N.memory.jsonl    | a line a logging step: the GPU's memory and the process's            |
| rank-N.nccl.log        | NCCL's own log (GPU)                                                |
| flight-recorder-N      | the last collectives of the rank, where one did not end (GPU)       |

The watchdog and its files are always on: sft/train/watchdog.py. The ranks are compared with one another in sft/parallel/agreement.py.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback


def debug_level() -> str:
    """What torch.distributed goes by: it has read TORCH_DISTRIBUTED_DEBUG when it was imported."""
    distributed: Any = torch.distributed
    return str(distributed.get_debug_level().name)


def prepare_files(folder: Path, rank: int) -> None:
    """Name the files of NCCL and its flight recorder, before NCCL starts: it does with the first collective on a GPU.

    Args:
        folder: <run>/logs.
        rank: Of this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / f"rank-{rank}.nccl.log"))
    # The rank's number is added to it.
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "flight-recorder-"))


def memory() -> dict[str, int | None]:
    """Bytes: of the process, and of the GPU where there is one."""
    gpu: dict[str, int | None] = {"gpu_allocated": None, "gpu_reserved": None, "gpu_peak": None}
    if torch.cuda.is_available():
        gpu = {
            "gpu_allocated": torch.cuda.memory_allocated(),
            "gpu_reserved": torch.cuda.memory_reserved(),
            "gpu_peak": torch.cuda.max_memory_allocated(),
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**gpu, "cpu_rss": _resident(), "cpu_rss_peak": peak}


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


class MemoryLog(TrainerCallback):  # type: ignore[misc]
    """Writes the memory of this rank, each logging step.

    Args:
        file: rank-N.memory.jsonl.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if logs is None or "loss" not in logs:
            return
        with self.file.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **memory()}) + "\n")
