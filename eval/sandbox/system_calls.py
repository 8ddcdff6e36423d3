"""The system calls that Python has no function for, on Linux. Imports the standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

# clone's flags, which unshare takes.
NEW_MOUNTS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

# mount's flags; the first three are mount_setattr's too.
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXECUTION, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_AND_BELOW = 0x8000

_NUMBERS = {
    # asm/unistd_64.h and asm-generic/unistd.h. From number 424 on they are the same everywhere.
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
}
_EVERYWHERE = {
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def machine() -> str:
    """The processor's name as the tables here have it."""
    return platform.machine()


def system_call(name: str, *arguments: int | bytes | None) -> int:
    """Call the kernel.

    Args:
        name: Of the call.
        arguments: Bytes go as their address, None as 0.

    Raises:
        OSError: It said no, or this processor's number of the call is not known.
    """
    number = _EVERYWHERE.get(name) or _NUMBERS.get(machine(), {}).get(name)
    if number is None:
        raise OSError(f"{name}: its number is not known on {machine()}")
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *wide)), name)


def unshare(flags: int) -> None:
    """Leave the namespaces that are named.

    Raises:
        OSError: The kernel, or who configured it, does not allow that.
    """
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount.

    Raises:
        OSError: It cannot be.
    """
    words = [os.fsencode(word) for word in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount away, now or when nobody uses it any more."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(_DETACH)), f"umount {target}")


def make_read_only(target: str) -> None:
    """Let nobody write below a mount, mounts inside it included.

    Raises:
        OSError: The kernel is older than Linux 5.12.
    """
    set_flags = struct.pack("<QQQQ", READ_ONLY | NO_SUID, 0, 0, 0)
    system_call("mount_setattr", -100, os.fsencode(target), _AND_BELOW, set_flags, len(set_flags))


def pivot_root(root: str, old: str) -> None:
    """Have a mount be the root, and see the old one in a folder of it.

    Raises:
        OSError: It cannot be.
    """
    system_call("pivot_root", os.fsencode(root), os.fsencode(old))


def prctl(option: int, *arguments: int | bytes) -> None:
    """Change what the kernel keeps of this process.

    Raises:
        OSError: It said no.
    """
    wide = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(ctypes.c_int(option), *wide), f"prctl {option}")


def drop_capabilities() -> None:
    """Keep no privilege of root's."""
    header = struct.pack("<Ii", CAPABILITY_VERSION_3, 0)
    system_call("capset", header, bytes(24))
