"""Whether the kernel ended a process because memory ran out."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Of this container, and of the whole machine."""


class OutOfMemoryKills:
    """The kernel's count of the processes that it ended for memory, from now on."""

    def __init__(self) -> None:
        self.before = _count()

    def explanation(self) -> str:
        """What can be said about a process that signal 9 ended; a phrase to append."""
        now = _count()
        if self.before is None or now is None:
            return ", which the kernel sends when memory runs out (dmesg tells), and a scheduler when a limit is passed"
        if now > self.before:
            return (
                ": memory ran out, and the kernel chose it. Start fewer processes (NPROC), or have each need less "
                "(train.micro_batch_size, a DeepSpeed file with a higher stage, docs/memory.md)"
            )
        return ", by somebody or a scheduler: the kernel has not ended a process for memory in this time"


def _count() -> int | None:
    counts = [count for path in _COUNTERS if (count := _kills(path)) is not None]
    return sum(counts) if counts else None


def _kills(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
