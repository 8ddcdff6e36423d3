"""A filter of system calls: no sockets, no memory that belongs to no process, no new namespaces. Needs no privilege.

Numbers from asm/unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64); on other processors there is no filter.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from eval.sandbox.system_calls import PR_SET_SECCOMP, SECCOMP_MODE_FILTER, machine, prctl

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name: number on x86_64, on aarch64.
_REFUSED = {
    # The network, and ways around a filter of it.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # Memory that is in no process and that no limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    # The kernel itself.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
# Where the user's own files and processes are in sight: Landlock knows no right to change a mode, an owner or a time.
_REFUSED_IN_SIGHT = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_FORKS = {"fork": (57, None), "vfork": (58, None)}
_NEW_NAMESPACES = 0x7E020000 | 0x80
_THREAD = 0x00010000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, value)


def _refuse(number: int, error: int = errno.EPERM) -> bytes:
    return _line(_EQUAL, number, 0, 1) + _line(_RETURN, _ERROR | error)


def filter_program(processor: str, in_sight: bool, forks: bool) -> bytes:
    """The filter, as the kernel takes it.

    Args:
        processor: x86_64 or aarch64.
        in_sight: Whether the user's files and processes are in sight, so that more is refused.
        forks: Whether it may start processes, and not only threads.
    """
    column = list(_AUDIT).index(processor)
    refused = _REFUSED | (_REFUSED_IN_SIGHT if in_sight else {}) | ({} if forks else _FORKS)
    numbers = [both[column] for both in refused.values()]
    lines = _line(_LOAD, _ARCHITECTURE) + _line(_EQUAL, _AUDIT[processor], 1, 0) + _line(_RETURN, _KILL)
    lines += _line(_LOAD, _NUMBER)
    if processor == "x86_64":  # its 32-bit calls have numbers of their own
        lines += _line(_AT_LEAST, 0x40000000, 0, 1) + _line(_RETURN, _ERROR | errno.ENOSYS)
    lines += b"".join(_refuse(number) for number in numbers if number is not None)
    # Its flags are in memory, where a filter cannot look; libc goes on with clone.
    lines += _refuse(_CLONE3[column], errno.ENOSYS)
    refusal = _line(_RETURN, _ERROR | errno.EPERM)
    clone = _line(_LOAD, _FIRST_ARGUMENT) + _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1) + refusal
    clone += b"" if forks else _line(_ANY_BIT, _THREAD, 1, 0) + refusal
    # The limits of a process that is not this one.
    limits = _line(_LOAD, _FIRST_ARGUMENT) + _line(_EQUAL, 0, 1, 0) + refusal
    for number, looked_into in ((_CLONE[column], clone), (_PRLIMIT[column], limits)):
        lines += _line(_EQUAL, number, 0, len(looked_into) // 8 + 1) + looked_into + _line(_RETURN, _ALLOW)
    return lines + _line(_RETURN, _ALLOW)


def refuse_calls(in_sight: bool, forks: bool) -> None:
    """Put the filter on this process and whatever it starts, as `filter_program` says. `no_new_privs` has to be set.

    Raises:
        OSError: There is none for this processor, or the kernel has no filters.
    """
    if machine() not in _AUDIT:
        raise OSError(errno.ENOSYS, f"no filter of system calls is written for {machine()}")
    program = filter_program(machine(), in_sight, forks)
    kept = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described)
