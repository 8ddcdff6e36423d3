"""A limit on how long somebody else's program, such as a chat template, may keep this process busy."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class TookTooLong(Exception):
    """The time is up."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End what runs inside after some processor time of this process: not of the clock, so that a busy machine changes nothing.

    Args:
        seconds: Processor time, of Python's code and of C code that Python calls in between.

    Raises:
        TookTooLong: The time is up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a signal reaches the main thread only; all rendering is done there
        return

    def end(number: int, frame: Any) -> NoReturn:
        raise TookTooLong(f"it was not done after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
