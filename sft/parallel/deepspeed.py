"""Prepares DeepSpeed's C++ operations, which are built at first use: a folder per environment and machine, and no wait for a dead build.

By default torch builds them in one folder for all environments of a user, where other paths or versions rebuild everything in turn. A build
that is killed leaves its lock, for which every later start would wait silently.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil

from sft.files import cache_folder
from sft.plan.build_tools import check_build_tools
from sft.plan.deepspeed import DeepSpeedFile

FOLDER = "TORCH_EXTENSIONS_DIR"


def own_folder() -> Path:
    """The folder of this environment on this machine. Homes are shared between machines, whose builds could not see each other's locks."""
    built_with = [sys.prefix, sys.version, version("torch"), version("deepspeed"), socket.gethostname()]
    return cache_folder() / "torch_extensions" / f"sft-{sha256(chr(10).join(built_with).encode()).hexdigest()[:12]}"


def operations(file: DeepSpeedFile, uses_gpu: bool) -> list[str]:
    """The operations that a training with this file uses: CPU ranks reduce by one, an offloaded optimizer is one, and disks take two."""
    offloads = file.devices[0] != "none" and file.config.get("zero_force_ds_cpu_optimizer", True)
    disk = ["pin_memory", "async_io"] if "nvme" in file.devices else []
    return ([] if uses_gpu else ["deepspeed_shm_comm"]) + (["cpu_adam"] if offloads else []) + disk


def prepare_builds(needed: Collection[str]) -> list[str]:
    """Choose the folder of the operations unless the user has, and remove locks that no process holds; before DeepSpeed is imported.

    Args:
        needed: Those that will be used.

    Returns:
        Lines for the user.

    Raises:
        PlanError: One must be built, and a tool to build it is missing.
    """
    folder = Path(os.environ.setdefault(FOLDER, str(own_folder())))
    lines = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for lock in sorted(folder.glob("*/lock")):
            if folder == own_folder() and not _is_held(lock):
                lock.unlink(missing_ok=True)
                lines.append(f"A build of {lock.parent.name} was killed, and its lock is removed: {lock}")
            else:  # in a folder that the user has named, maybe of another machine
                lines.append(f"Waiting for a build of {lock.parent.name}. If nothing is building it: rm {lock}")
    except OSError:
        return []  # read-only: torch reports what it cannot do
    unbuilt = [name for name in needed if not (folder / name / f"{name}.so").exists() and not _is_installed(name)]
    if unbuilt:
        compiler = (os.environ.get("CXX") or "c++").split()[0]
        what = f"train.deepspeed ({' and '.join(unbuilt)})"
        check_build_tools(what, [["ninja"], [compiler]], "use a file without offload_optimizer, or no train.deepspeed")
        lines.append(f"DeepSpeed builds {' and '.join(unbuilt)}, once in this environment: about a minute ({folder})")
    return lines


def _is_installed(name: str) -> bool:
    """Whether the operation was built when DeepSpeed was installed (DS_BUILD_OPS)."""
    package = find_spec("deepspeed")
    return package is not None and any(Path(str(package.origin)).parent.glob(f"ops/*/{name}_op*.so"))


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, as the one that builds does until it is done."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False
