"""Reads the files by which anyone requests something of a running job: <run>/stop and <run>/save. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

STOP, SAVE = "stop", "save"


def began() -> float:
    """When this start of the job began: its launcher, or this process. Seconds since 1970, up to one too few."""
    # A single process under torchrun is no rank; one without a launcher has LOCAL_RANK set for DeepSpeed.
    launched = os.environ.get("WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RUN_ID" in os.environ
    process = psutil.Process(os.getppid() if launched else os.getpid())
    return float(process.create_time())


def forget_stale(run: Path, since: float) -> list[str]:
    """Remove the files meant for an earlier start, which ended before it acted on them; returns their names."""
    removed = []
    for name in (STOP, SAVE):
        with suppress(FileNotFoundError):
            if (run / name).stat().st_mtime < since:
                (run / name).unlink()
                removed.append(name)
    return removed
