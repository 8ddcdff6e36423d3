"""Processes that end with the one that started them, and how one reports its result to it."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1

RESULT_FILE = "SFT_RESULT_FILE"
"""Environment variable: the file in which a process that sft/api.py has started reports what it wrote."""


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def report_result(path: Path) -> None:
    """Report what this process wrote, where the process that started it wants to know; once."""
    file = os.environ.pop(RESULT_FILE, None)
    if file is not None:
        Path(file).write_text(str(path.resolve()))
