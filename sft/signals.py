"""Signals that ask this process to stop: what hears them, and when it acts.

| signal                   | exit status | who sends it                                            |
|--------------------------|-------------|---------------------------------------------------------|
| SIGTERM                  | 143         | a scheduler, `kill`, Kubernetes                         |
| SIGUSR1                  | 143         | Slurm, before the time is up (`--signal`)               |
| SIGHUP                   | 143         | a terminal that is closed; not under nohup              |
| SIGINT                   | 130         | Ctrl-C                                                  |

Before the first step and after the last there is nothing to save: the main thread ends by `Interrupted` where it stands. While
steps are trained it goes on, and sft/train/stopping.py asks at the end of each. A second signal ends the process at once.

A thread hears the signals (through Python's wake-up file descriptor), so that a second one is heard while the main thread waits
in C++ for a GPU or for another rank. docs/interruptions.md is for users. Imports no torch.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from sft import terminal as rank_logs
from sft.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
EXITS = (EXIT_INTERRUPTED, EXIT_TERMINATED)
"""Exit statuses of a process that was asked to stop."""
_TIDY_SECONDS = 10.0
"""After the first signal, where there is nothing to save: what swallows the exception, or hangs in C++, has so long."""
_APART, _APART_LAUNCHED = 0.5, 2.0
"""Seconds within which a second signal is the first one again. `timeout` and Slurm signal a process and its group; a launcher
passes on what its ranks may have heard themselves."""
_ONCE_MORE = 0.1
"""Seconds after which a signal is heard again whose exception was dropped; within those in which it is the first one."""

_STARTED_BY = "SFT_PARENT"
"""The process id of the process of ours that this one works for, and that says how it ended."""


def exit_status(number: int) -> int:
    """The exit status of a process that a signal has asked to stop.

    >>> exit_status(signal.SIGINT), exit_status(signal.SIGUSR1)
    (130, 143)
    """
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED


def others_speak() -> bool:
    """Whether the process that started this one tells how it ended."""
    return os.environ.get(_STARTED_BY) == str(os.getppid())


class Interruptible(Protocol):
    """What a stop request interrupts: a run."""

    def record(self, interrupted: Interrupted) -> str:
        """Record the interruption, and return what the next start does, as a sentence."""

    def clean_up(self) -> None:
        """Remove what is half written, just before the process ends."""


class _Listener:
    """Hears the signals of this process, in a thread of its own."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.interruptible: Interruptible | None = None
        self._at = 0.0
        self._holds = self._raised = self._deaf = False
        self._act: Callable[[signal.Signals, bool], None] = lambda number, again: None
        self.others: dict[int, Callable[[], None]] = {}
        """Signals that do not ask to stop, and what this thread then does."""
        self._apart = _APART_LAUNCHED if "LOCAL_RANK" in os.environ else _APART
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # What is ignored stays so: nohup, and a shell's `&`.
        self._before = {
            number: signal.signal(number, self._in_main_thread)
            for number in SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._dropped
        self._thread = threading.Thread(target=self._hear, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear no longer; as it was before."""
        sys.unraisablehook = self._hook_before
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _in_main_thread(self, number: int, frame: object) -> None:
        if not (self._holds or self._deaf or self._raised):
            self._raised = True
            raise Interrupted(signal.Signals(number).name, exit_status(number))

    def _dropped(self, dropped: Any) -> None:
        """An exception that Python drops, since it came in a destructor or in a callback of a weak reference."""
        if not isinstance(dropped.exc_value, Interrupted):
            self._hook_before(dropped)
            return
        self._raised = False
        number = signal.SIGINT if dropped.exc_value.status == EXIT_INTERRUPTED else self.asked or signal.SIGTERM
        with suppress(RuntimeError):  # the interpreter is ending
            threading.Timer(_ONCE_MORE, os.kill, (os.getpid(), number)).start()

    def _hear(self) -> None:
        while True:
            waits = self.asked is not None and not self._holds and not self._deaf
            left = max(0.0, self._at + _TIDY_SECONDS - time.monotonic()) if waits else None
            if not select.select([self._read], [], [], left)[0]:
                self.end_now()
            for byte in os.read(self._read, 64):
                if byte == 0:
                    return
                if byte in SIGNALS:
                    self._arrived(signal.Signals(byte))
                elif byte in self.others:
                    self.others[byte]()

    def _arrived(self, number: signal.Signals) -> None:
        rank_logs.asked_to_end()
        now = time.monotonic()
        if self._deaf:
            return
        if self.asked is None:
            self.asked, self._at = number, now
            if self._holds:
                self._act(number, False)
        elif now - self._at > self._apart:
            self._act(number, True) if self._holds else self.end_now()

    def hold(self, act: Callable[[signal.Signals, bool], None]) -> None:
        self._act, self._holds = act, True
        if self.asked is not None:
            act(self.asked, False)

    def take_over(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._in_main_thread if number in self._before else signal.SIG_IGN)

    def release(self) -> None:
        self._holds = False
        if self.asked is not None:
            raise Interrupted(self.asked.name, exit_status(self.asked))

    def ignore(self) -> None:
        self._deaf = True

    def end_now(self) -> None:
        """End this process, whatever its main thread does."""
        asked = self.asked or signal.SIGTERM
        report(Interrupted(asked.name, exit_status(asked)))
        if self.interruptible is not None:
            self.interruptible.clean_up()
        os._exit(exit_status(asked))


_listener: _Listener | None = None


@contextmanager
def listening() -> Iterator[None]:
    """Hear signals; `Interrupted` is raised in the main thread while nothing else was agreed by `hold`."""
    global _listener
    if _listener is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _listener = _Listener()
    try:
        yield
    finally:
        _listener.close()
        _listener = None


def on_signal(number: signal.Signals, act: Callable[[], None] | None) -> None:
    """Call `act` in the listening thread whenever the signal arrives; None: no longer. Only while signals are listened to."""
    if _listener is None:
        return
    if act is None:
        _listener.others.pop(number, None)
        return
    _listener.others[number] = act
    # The wake-up file descriptor is written only for a signal that Python handles.
    signal.signal(number, lambda number, frame: None)


def hear_held_back() -> None:
    """Hear what whoever started this process has held back until it hears: `held_back`.

    Raises:
        Interrupted: There was something.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _as_a_child() -> None:
    """A process forked from this one ends by itself: while steps are trained, when its parent does."""
    global _listener
    if _listener is None:
        return
    signal.set_wakeup_fd(-1)
    for number in _listener._before:
        signal.signal(number, signal.SIG_IGN if _listener._holds else signal.SIG_DFL)
    _listener = None


os.register_at_fork(after_in_child=_as_a_child)


@contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started meanwhile hear of signals once they listen, and not before: they would die of them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close() -> None:
    """Hear no longer: this process becomes another program, which hears what comes from now on."""
    global _listener
    if _listener is not None:
        _listener.close()
        _listener = None


def asked() -> signal.Signals | None:
    """The first signal that this process was sent."""
    return _listener.asked if _listener else None


def hold(act: Callable[[signal.Signals, bool], None] | None = None) -> None:
    """From here on a signal does not end the main thread, which asks for it instead.

    Args:
        act: Called in another thread with a signal, and whether it is the second.
    """
    if _listener is not None:
        _listener.hold(act or _wait_for_the_step)


def take_over() -> None:
    """Hear again what a library has set handlers for."""
    if _listener is not None:
        _listener.take_over()


def _wait_for_the_step(number: signal.Signals, again: bool) -> None:
    if again and _listener is not None:
        _listener.end_now()
    if not again and not rank_logs.is_rank():  # else our launcher says so, or has another reason to end the ranks
        rank_logs.to_terminal(f"{number.name}: saving after this step, then stopping. A second signal ends it at once.")


def release() -> None:
    """A signal ends the main thread again.

    Raises:
        Interrupted: One has come meanwhile.
    """
    if _listener is not None:
        _listener.release()


def ignore() -> None:
    """This process is ending by itself, and signals change nothing any more."""
    if _listener is not None:
        _listener.ignore()


def give_up() -> None:
    """This process ends by an error, and signals do what they do to any process."""
    if _listener is not None:
        _listener.ignore()
        for number in _listener._before:
            signal.signal(number, signal.SIG_DFL)


def interrupts(interruptible: Interruptible) -> None:
    """Name what records an interruption from here on."""
    if _listener is not None:
        _listener.interruptible = interruptible


def report(interrupted: Interrupted) -> None:
    """Record the interruption, and print one line: what happened, and how to resume."""
    interruptible = _listener.interruptible if _listener else None
    resume = "The same command starts again, or resumes."
    if interruptible is not None:
        resume = interruptible.record(interrupted)
    if others_speak() or (interrupted.agreed and os.environ.get("RANK", "0") != "0"):
        return
    text = f"{interrupted}. {resume}"
    if interrupted.agreed or not rank_logs.is_rank():
        print(f"\n{text}", file=sys.stderr, flush=True)
    else:
        rank_logs.tell_message(text)
