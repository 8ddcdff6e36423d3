"""Landlock: the kernel refuses a process every file, and since Linux 6.7 every TCP connection, that it was not given.

It needs no privilege and no namespace, so that it also works inside containers. https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from eval.sandbox.system_calls import system_call

_ASK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_ALL_TCP = 0b11
_SCOPES = 0b11
"""Abstract unix sockets and signals, of processes outside."""

SIGNALS_SINCE = 6
TCP_SINCE = 4


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 where there is none."""
    try:
        return system_call("landlock_create_ruleset", None, 0, _ASK_VERSION)
    except OSError:
        return 0


def _handled(version: int) -> int:
    """Everything that this version can refuse."""
    added = [(2, _REFER), (3, _TRUNCATE), (5, _IOCTL)]
    return ((1 << 13) - 1) | sum(right for since, right in added if version >= since)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process, and whatever it starts, these paths only. `no_new_privs` has to be set.

    Args:
        readable: Files and folders with all that is in them. What does not exist is left out.
        writable: The same, to be read and written.

    Raises:
        OSError: There is no Landlock here.
    """
    version = landlock_version()
    handled = _handled(version)
    attributes = struct.pack("<Q", handled)
    if version >= TCP_SINCE:
        attributes += struct.pack("<Q", _ALL_TCP)
    if version >= SIGNALS_SINCE:
        attributes += struct.pack("<Q", _SCOPES)
    ruleset = system_call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for rights, paths in ((_READ, readable), (handled, writable)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        system_call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("<Qi", rights, beneath)
        system_call("landlock_add_rule", ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(beneath)
