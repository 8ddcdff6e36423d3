"""Prepares DeepSpeed's C++ operations, which are built at first use: a folder per environment and machine, and no wait for a dead build.

By default torch builds them in one folder for all environments of a user, where other paths or versions rebuild everything in turn. A build
that is killed leaves its lock, for which every later start would wait silently.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import psutil

from sft.errors import PlanError
from sft.files import cache_folder

FOLDER = "TORCH_EXTENSIONS_DIR"


def own_folder() -> Path:
    """The folder of this environment on this machine. Homes are shared between machines, whose builds could not see each other's locks."""
    built_with = [sys.prefix, sys.version, version("torch"), version("deepspeed"), socket.gethostname()]
    return cache_folder() / "torch_extensions" / f"sft-{sha256(chr(10).join(built_with).encode()).hexdigest()[:12]}"


def prepare_builds(needed: bool) -> list[str]:
    """Choose the folder of the operations unless the user has, and remove locks that no process holds; before DeepSpeed is imported.

    Returns:
        Lines for the user.

    Raises:
        PlanError: They must be built, and a tool to build them is missing.
    """
    folder = Path(os.environ.setdefault(FOLDER, str(own_folder())))
    lines = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".checked").open("w") as alone:
            # Of ranks that look at once, the second must not remove the lock of the first one's build.
            fcntl.flock(alone, fcntl.LOCK_EX)
            for lock in sorted(folder.glob("*/lock")):
                if _is_held(lock):
                    lines.append(f"Another process is building {lock.parent.name}: waiting for it.")
                elif folder == own_folder():
                    lock.unlink(missing_ok=True)
                    lines.append(f"A build of {lock.parent.name} was killed, and its lock is removed: {lock}")
                else:  # maybe of another machine
                    lines.append(f"Waiting for a build of {lock.parent.name}. If no machine is building it: rm {lock}")
    except OSError:
        return []  # read-only, or a file system without locks: torch reports what it cannot do
    if needed and not any(folder.glob("*/*.so")):
        _check_compiler()
        lines.append(f"DeepSpeed builds its C++ operations, once in this environment: about a minute ({folder})")
    return lines


def _check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    missing = [program for program in ("ninja", compiler) if shutil.which(program) is None]
    if missing:
        raise PlanError(
            f"train.deepspeed: on a CPU DeepSpeed builds C++ operations, and PATH has no {' and no '.join(missing)}. Start with "
            "scripts/sft.sh, or put .venv/bin on PATH (ninja); install a compiler (apt-get install g++); or leave train.deepspeed out."
        )


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, as the one that builds does until it is done."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False
