"""What our launcher does with a signal: the ranks hear of it, and have the time that they need.

torchrun's own agent would pass it on, wait for half a minute, and kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sft import signals
from sft.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, UserError
from sft.run.directory import Run
from sft.terminal import FAILURE, run_of

_ENDED = {*signals.EXITS, *(-number for number in signals.SIGNALS)}
_TIDY_SECONDS = 3.0
"""From the second signal to SIGKILL."""
SAVING = "saving after this step, then stopping. A second signal ends it at once."
"""What ranks that train do when they hear of one."""


class Forwarding:
    """Passes signals on to the ranks of this machine.

    Args:
        stopping: What they do then, for the terminal.
    """

    def __init__(self, stopping: str = SAVING) -> None:
        self._stopping = stopping
        self.asked: signal.Signals | None = None
        self._killed = False
        self._pids: Sequence[int] = ()

    def begin(self, pids: Sequence[int]) -> None:
        """Ranks are there, which hear of what has come before them too."""
        self._pids = pids
        for asking in signals.SIGNALS:  # torchrun has set handlers of its own
            if signal.getsignal(asking) is not signal.SIG_IGN:
                signal.signal(asking, lambda *_: None)
        signals.hold(self._act)

    def end(self) -> None:
        """They end.

        Raises:
            Interrupted: A signal came, which ended them.
        """
        self._pids = ()
        signals.release()

    def _act(self, number: signal.Signals, again: bool) -> None:
        self.asked = self.asked or number
        self._send(number)
        if again and not self._killed:
            self._killed = True
            timer = threading.Timer(_TIDY_SECONDS, self._send, [signal.SIGKILL])
            timer.daemon = True
            timer.start()
        elif not again:
            print(f"\n{number.name}: {self._stopping}", file=sys.stderr, flush=True)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def exit_status(self, failures: Mapping[int, Any]) -> int | None:
        """The exit status where the ranks were interrupted; None where one of them has failed.

        Args:
            failures: torchrun's, by rank.
        """
        ended = {failure.exitcode for failure in failures.values()}
        if not ended <= (_ENDED | {-signal.SIGKILL} if self._killed else _ENDED):
            return None
        if self.asked is not None:
            return signals.exit_status(self.asked)
        return EXIT_INTERRUPTED if EXIT_INTERRUPTED in ended else EXIT_TERMINATED


def tell_interruption(forwarding: Forwarding, status: int) -> None:
    """Say in one line what happened and how it goes on, for all ranks; and have run.json say it where they could not."""
    by = forwarding.asked or (signal.SIGINT if status == EXIT_INTERRUPTED else signal.SIGTERM)
    folder = run_of(os.getpid())
    if folder is None and os.environ.get("SFT_PARENT") == str(os.getppid()):
        return
    error, after = f"Interrupted by {by.name}", "The same command starts again, or resumes"
    if folder is not None:
        run = Run(folder)
        with suppress(OSError, UserError):
            (folder / "logs" / FAILURE).unlink(missing_ok=True)
            if run.record["status"] != "interrupted":
                run.update(status="interrupted", error=error)
            error, after = run.record["error"], run.next_start
    print(f"\n{error}. {after}.", file=sys.stderr, flush=True)
