"""What generated code may use, and what became of it: the words that both sides of the runner share. Imports the standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one generated program may use. Part of the evaluation's settings: base and tuned get the same."""

    cpu_seconds: int = 5
    """Processor time of each of its processes: what ends an endless loop, however busy the machine is."""

    wall_seconds: float = 60.0
    """Time until it is ended, waiting included; so long because a busy machine must not decide a score."""

    memory_bytes: int = 1024 * MIB
    """Resident memory of all its processes together, looked at 20 times a second."""

    address_bytes: int = 2048 * MIB
    """Address space of each process, where the kernel itself says no: Python raises MemoryError."""

    processes: int = 16
    """Processes and threads at one time."""

    file_bytes: int = 16 * MIB
    """Largest file."""

    folder_bytes: int = 64 * MIB
    """Everything in its folder together."""

    open_files: int = 64


LIMITS = Limits()

# Sets and dictionaries of strings in one order: a program that depends on it ends the same way each time.
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HOME": "",
    "TMPDIR": "",
}
"""The environment of a program; the last two name its folder."""

Ending = Literal["passed", "failed", "cpu time", "wall time", "memory", "killed"]


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    ending: Ending
    """`passed` only where it ran to its last line."""

    detail: str
    """The exception or the signal; empty where it passed."""


@dataclass(frozen=True)
class Isolation:
    """What is enforced on this machine, found by trying."""

    enforced: dict[str, str]
    """Per limit: how much, and by what."""

    not_enforced: dict[str, str]
    """Per limit that this machine cannot enforce: why."""
