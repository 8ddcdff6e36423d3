"""DeepSpeed's C++ operations: built at first use, in a folder of this environment alone, and never behind a lock that nobody holds.

torch builds them under TORCH_EXTENSIONS_DIR, by default one folder for all environments of a user: one whose paths or versions are
others builds everything again, each time in turn. A build that is killed leaves its lock, for which every later start would wait
without a word.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from sft.errors import PlanError

FOLDER = "TORCH_EXTENSIONS_DIR"
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "wekafs", "afs", "panfs", "vast")
"""How the kinds of file systems begin that other machines may write to."""

_QUIET = 1800.0
"""Seconds without a change after which a build on another machine is over: the longest single file takes minutes."""


def own_folder() -> Path:
    """Where this environment's operations are: by the paths and versions that they are built with."""
    built_with = [sys.prefix, sys.version, version("torch"), version("deepspeed")]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch_extensions" / f"sft-{sha256(chr(10).join(built_with).encode()).hexdigest()[:12]}"


def settle_operations(builds: bool) -> list[str]:
    """Name the folder of the operations, unless the user has, and remove locks that nobody holds; before DeepSpeed is imported.

    Args:
        builds: The job will need some.

    Returns:
        Lines for the user.

    Raises:
        PlanError: They have to be built, and there is nothing to build them with.
    """
    folder = Path(os.environ.setdefault(FOLDER, str(own_folder())))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".checked").open("w") as alone:
            # Of ranks that look at once, the second must not remove the lock of the first one's build.
            fcntl.flock(alone, fcntl.LOCK_EX)
            lines = [line for lock in sorted(folder.glob("*/lock")) for line in _look_at(lock)]
    except OSError:
        return []  # read-only, or a file system without locks: torch says what it cannot do
    if builds and not any(folder.glob("*/*.so")):
        _check_compiler()
        lines.append(f"DeepSpeed builds its C++ operations, once in this environment: about a minute ({folder})")
    return lines


def _check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    missing = [program for program in ("ninja", compiler) if shutil.which(program) is None]
    if missing:
        raise PlanError(
            f"train.deepspeed: on a CPU DeepSpeed builds C++ operations, and PATH has no {' and no '.join(missing)}. Start by "
            "scripts/sft.sh, or put .venv/bin on PATH (ninja); install a compiler (apt-get install g++); or leave train.deepspeed out."
        )


def _look_at(lock: Path) -> list[str]:
    if is_held(lock):
        return [f"Another process is building {lock.parent.name}: waiting for it."]
    if not _is_shared(lock) or time.time() - _changed(lock.parent.iterdir()) > _QUIET:
        lock.unlink(missing_ok=True)
        return [f"A build of {lock.parent.name} was ended before it was done, and its lock is removed: {lock}"]
    return [
        f"Waiting for a build of {lock.parent.name} that no process of this machine does. Where no other machine does it either, remove "
        f"its lock: rm {lock}"
    ]


def is_held(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, as the one that builds has until it is done."""
    wanted = lock.stat()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            opened = list(descriptors.iterdir())
        except OSError:  # ended meanwhile, or somebody else's
            continue
        for descriptor in opened:
            with suppress(OSError):  # closed meanwhile
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    return False


def _changed(files: Iterable[Path]) -> float:
    return max((file.stat().st_mtime for file in files), default=0.0)


def _is_shared(path: Path) -> bool:
    """Whether other machines may write there; unknown counts as that."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return True
    inside = [(len(place), kind) for place, kind in mounts if path.resolve().is_relative_to(place)]
    return not inside or max(inside)[1].startswith(_SHARED)
