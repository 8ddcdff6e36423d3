"""Hears signals that ask this process to stop, and decides when it acts on them.

| signal  | exit status | sent by                                     |
|---------|-------------|---------------------------------------------|
| SIGTERM | 143         | a scheduler, `kill`, Kubernetes             |
| SIGUSR1 | 143         | Slurm, before the time is up (`--signal`)   |
| SIGHUP  | 143         | a terminal that closes; not under nohup     |
| SIGINT  | 130         | Ctrl-C                                      |

Before step 1 and after the last step there is nothing to save: the main thread raises `Interrupted` where it is. During training it holds
the signal, and sft/train/stopping.py asks for it at the end of each step. A second signal ends the process at once.

A thread hears the signals through Python's wake-up file descriptor, also while the main thread waits in C++ for a GPU or another rank.
docs/resume.md is for users.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sft import terminal
from sft.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
EXITS = (EXIT_INTERRUPTED, EXIT_TERMINATED)  # of a process that was asked to stop

# The main thread may take so long to end after a signal: it may hang in C++, and Python drops an exception in a destructor.
_TIDY_SECONDS = 10.0
# A second signal within this time is the first one again: `timeout` and Slurm signal a process and its group, and a launcher passes on
# what its ranks may have heard themselves.
_SAME_SECONDS, _SAME_SECONDS_OF_A_RANK = 0.5, 2.0
_STARTED_BY = (
    "SFT_PARENT"  # environment variable: id of the process of ours that started this one and reports how it ended
)

Act = Callable[[signal.Signals, bool], None]
"""Called in another thread with a signal, and whether it is the second one."""


def exit_status(number: int) -> int:
    """The exit status of a process that a signal has asked to stop.

    >>> exit_status(signal.SIGINT), exit_status(signal.SIGUSR1)
    (130, 143)
    """
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED


@contextmanager
def held_back() -> Iterator[None]:
    """Have processes that are started meanwhile hear of signals once they listen; they would die of them before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_held_back() -> None:
    """Hear what the process that started this one has `held_back`; raises Interrupted if there was something."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Listener:
    """The signals of this process. Without `listening`, no method has an effect."""

    def __init__(self) -> None:
        self._listens = False
        self._forget()

    def _forget(self) -> None:
        self._first: signal.Signals | None = None
        self._first_at = 0.0
        self._holds = self._ignores = self._raised = False
        self._act: Act = self._stop_after_the_step
        self._record: Callable[[Interrupted], str] = lambda _: "The same command starts again, or resumes."
        self._clean_up: Callable[[], None] = lambda: None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear signals: the main thread raises `Interrupted`, unless `hold` or `ignore` says otherwise."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self.close()

    def _begin(self) -> None:
        self._forget()
        self._listens = True
        self._same_seconds = _SAME_SECONDS_OF_A_RANK if "LOCAL_RANK" in os.environ else _SAME_SECONDS
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # What is ignored stays so: under nohup, and after a shell's `&`.
        self._handlers_before = {
            number: signal.signal(number, self._in_main_thread)
            for number in SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._descriptor_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._hear, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening: this process ends, or becomes another program, which hears what comes from now on."""
        if not self._listens:
            return
        self._listens = False
        signal.set_wakeup_fd(self._descriptor_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
        self._forget()

    def after_fork(self) -> None:
        """In a forked child: it ends by itself, during training when its parent does."""
        if self._listens:
            self._listens = False
            signal.set_wakeup_fd(-1)
            for number in self._handlers_before:
                signal.signal(number, signal.SIG_IGN if self._holds else signal.SIG_DFL)
            self._forget()

    def _in_main_thread(self, number: int, frame: object) -> None:
        if not (self._holds or self._ignores or self._raised):
            self._raised = True
            raise Interrupted(signal.Signals(number).name, exit_status(number))

    def _hear(self) -> None:
        while True:
            tidies_up = self._first is not None and not self._holds and not self._ignores
            left = max(0.0, self._first_at + _TIDY_SECONDS - time.monotonic()) if tidies_up else None
            if not select.select([self._read], [], [], left)[0]:
                self._end_now()
            for number in os.read(self._read, 64):
                if number == 0:
                    return
                if number in SIGNALS:
                    self._arrived(signal.Signals(number))

    def _arrived(self, number: signal.Signals) -> None:
        terminal.signal_arrived()
        now = time.monotonic()
        if self._ignores:
            return
        if self._first is None:
            self._first, self._first_at = number, now
            if self._holds:
                self._act(number, False)
        elif now - self._first_at > self._same_seconds:
            self._act(number, True) if self._holds else self._end_now()

    def _stop_after_the_step(self, number: signal.Signals, again: bool) -> None:
        if again:
            self._end_now()
        if not terminal.is_rank():  # else the launcher says so, or has another reason to end the ranks
            terminal.to_terminal(
                f"{number.name}: saving after this step, then stopping. A second signal ends it at once."
            )

    def _end_now(self) -> None:
        first = self._first or signal.SIGTERM
        self.report(Interrupted(first.name, exit_status(first)))
        self._clean_up()
        os._exit(exit_status(first))

    def asked(self) -> signal.Signals | None:
        """The first signal that asked this process to stop."""
        return self._first

    def hold(self, act: Act | None = None) -> None:
        """From here on a signal does not end the main thread: `act` is called, which by default announces the stop after this step."""
        self._holds, self._act = True, act or self._stop_after_the_step
        if self._first is not None:
            self._act(self._first, False)

    def release(self) -> None:
        """From here on a signal ends the main thread again. Raises Interrupted if one has arrived meanwhile."""
        self._holds = False
        if self._first is not None:
            raise Interrupted(self._first.name, exit_status(self._first))

    def ignore(self) -> None:
        """This process is ending by itself: signals change nothing any more."""
        self._ignores = True

    def give_up(self) -> None:
        """This process ends by an error: signals do what they do to any process."""
        if self._listens:
            self._ignores = True
            for number in self._handlers_before:
                signal.signal(number, signal.SIG_DFL)

    def interrupts(self, record: Callable[[Interrupted], str], clean_up: Callable[[], None]) -> None:
        """From here on `record` records an interruption and returns what the next start does, as a sentence; before the process is ended
        at once, `clean_up` removes what is half written."""
        if self._listens:
            self._record, self._clean_up = record, clean_up

    def report(self, interrupted: Interrupted) -> None:
        """Record the interruption, and print one line: what happened, and what the next start does."""
        next_start = self._record(interrupted)
        parent_reports = os.environ.get(_STARTED_BY) == str(os.getppid())
        if parent_reports or (interrupted.agreed and os.environ.get("RANK", "0") != "0"):
            return
        message = f"{interrupted}. {next_start}"
        if interrupted.agreed:  # rank 0 speaks for all
            terminal.to_terminal(f"\n{message}")
        else:
            terminal.show_message(message)


_listener = _Listener()
os.register_at_fork(after_in_child=_listener.after_fork)

listening, close = _listener.listening, _listener.close
hold, release, ignore, give_up = _listener.hold, _listener.release, _listener.ignore, _listener.give_up
asked = _listener.asked
interrupts, report = _listener.interrupts, _listener.report
