"""A root folder in which generated code sees Python, and nothing of the user's. Imports the standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eval.sandbox.system_calls import (
    BIND,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_PIDS,
    NEW_USER,
    NEW_UTS,
    NO_DEVICES,
    NO_EXECUTION,
    NO_SUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    make_read_only,
    mount,
    pivot_root,
    unmount,
    unshare,
)

NOBODY = 65534
FOLDER = "/tmp/program"
"""A program's own folder, as it sees it."""

_DEVICES = ("null", "zero", "full", "random", "urandom")
# What the C library and Python read beside their own folders.
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives")


def python_folders() -> list[str]:
    """Where Python and its packages are, with the system's libraries. Nothing of the working directory or PYTHONPATH."""
    own = [
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        sys.base_exec_prefix,
        str(Path(sys.executable).resolve().parent),
    ]
    packages = [path for path in sys.path if path.endswith(("-packages", "lib-dynload", ".zip"))]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    system = ["/usr", "/lib", "/lib32", "/lib64", "/bin", *(f"/etc/{name}" for name in _SETTINGS)]
    wanted = [path for path in [*system, *own, *packages, *libraries] if path.startswith("/") and Path(path).exists()]
    kept: list[str] = []
    for path in sorted(set(wanted), key=len):  # a folder before what is in it
        if path != "/" and not any(path == other or path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def enter_namespaces() -> None:
    """Leave the user's mounts, processes, network and shared memory.

    Raises:
        OSError: This machine, or its container, does not allow that.
    """
    spaces = NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC | NEW_UTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        unshare(spaces)
    else:
        unshare(spaces | NEW_USER)
        map_users(user, group)
    mount("none", "/", "", RECURSIVE | PRIVATE)


def map_users(user: int, group: int) -> None:
    """Be the same user in a user namespace just entered."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _bind(source: str, root: str) -> None:
    """Show a file or folder below the new root, read-only, where it was."""
    target = Path(root + source)
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    # Mounts inside come along: without them a user namespace would show what they cover, and is refused that.
    mount(source, str(target), "", BIND | RECURSIVE)
    make_read_only(str(target))


def build_root(root: str, folder_bytes: int, owner: int) -> bool:
    """Make a new root out of memory, and be in it: Python read-only, and one folder of limited size to write to.

    The first process of a new namespace of processes calls it, so that /proc shows that namespace.

    Args:
        root: An empty folder; what is mounted there is seen by this process and its children only.
        folder_bytes: Size of the program's folder.
        owner: User and group of it.

    Returns:
        Whether there is a /proc: where a container covers part of its own, the kernel allows none.

    Raises:
        OSError: This machine does not allow that.
    """
    paths = python_folders()
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,nr_inodes=4096,mode=755")
    for path in paths:
        if Path(path).is_symlink() and path.count("/") == 1:  # /lib -> usr/lib
            Path(root + path).symlink_to(Path(path).readlink())
        else:
            _bind(path, root)
    for name in _DEVICES:
        device = Path(root, "dev", name)
        device.parent.mkdir(exist_ok=True)
        device.touch()
        mount(f"/dev/{name}", str(device), "", BIND)
    Path(root, "dev", "shm").symlink_to(FOLDER)  # where locks and pools of processes are kept, within the same size
    proc = _mount_proc(f"{root}/proc")
    Path(root + FOLDER).mkdir(parents=True)
    options = f"size={folder_bytes},nr_inodes=4096,mode=700,uid={owner},gid={owner}"
    mount("tmpfs", root + FOLDER, "tmpfs", NO_SUID | NO_DEVICES, options)
    Path(root, "old").mkdir()
    pivot_root(root, f"{root}/old")
    os.chdir("/")
    unmount("/old")
    Path("/old").rmdir()
    mount("none", "/", "", REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    return proc


def _mount_proc(target: str) -> bool:
    Path(target).mkdir()
    try:
        mount("proc", target, "proc", NO_SUID | NO_DEVICES | NO_EXECUTION)
    except OSError:
        return False
    return True
