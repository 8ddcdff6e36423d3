"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends.

    Args:
        parent: The parent's process id; where it has ended already the signal comes at once.
        number: The signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
