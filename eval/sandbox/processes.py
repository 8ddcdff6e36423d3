"""What a program has started: counted and ended. Reads /proc; imports the standard library only."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def _processes() -> dict[int, tuple[int, int]]:
    """The parent and the resident pages of each process in sight."""
    found: dict[int, tuple[int, int]] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        found[int(process.name)] = (int(fields[1]), int(fields[21]))
    return found


def descendants(of: int) -> dict[int, int]:
    """What a process has started, directly or not: resident bytes of each by its number."""
    processes = _processes()
    children = defaultdict(list)
    for number, (parent, _) in processes.items():
        children[parent].append(number)
    found: dict[int, int] = {}
    waiting = [of]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found[child] = processes[child][1] * PAGE
            waiting.append(child)
    return found


def kill_descendants() -> None:
    """End all that this process has started, also what was left behind by its parent: this process must be a subreaper."""
    while running := descendants(os.getpid()):
        for signals in (signal.SIGSTOP, signal.SIGKILL):  # what stands still starts nothing new
            for number in running:
                try:
                    os.kill(number, signals)
                except ProcessLookupError:
                    continue
        time.sleep(0.01)
        reap()


def reap() -> None:
    """Take the status of all that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def tasks_of(user: int) -> int:
    """Processes and threads that a user has on this machine: RLIMIT_NPROC counts them all."""
    count = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
        except OSError:
            continue
    return count
