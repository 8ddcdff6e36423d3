"""How a process is confined before it runs generated code, by what this machine has for it. Imports the standard library only."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from eval.sandbox.folders import NOBODY, build_root, enter_namespaces, map_users, python_folders
from eval.sandbox.landlock import SIGNALS_SINCE, TCP_SINCE, landlock_version, restrict
from eval.sandbox.limits import MIB, VARIABLES, Isolation, Limits
from eval.sandbox.processes import tasks_of
from eval.sandbox.seccomp import refuse_calls
from eval.sandbox.system_calls import NEW_USER, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, drop_capabilities, prctl, unshare

# A process more than the program itself: those that watch it are of the same user.
WATCHERS = 3
# Where the user's others are counted along: what they, and the programs that run beside this one, may start meanwhile.
MARGIN = 128


@dataclass(frozen=True)
class Means:
    """What this machine has. What was found at the start is needed for every program: less is an error."""

    namespaces: bool
    why_no_namespaces: str

    proc: bool
    """Whether the namespace can have a /proc, from which memory is counted."""

    landlock: int
    """Its version; 0 for none."""

    call_filter: bool
    why_no_filter: str

    nobody: bool
    """Whether the program is another user than root. False also where the evaluation is not root's."""

    count_of_its_own: bool
    """Whether the kernel counts the program's processes apart from the user's others."""

    others: int = 0
    """Where it does not: how many those are now. Inside a namespace of processes they are out of sight, and counted all the same."""


def _tried(attempt: Callable[[], object]) -> str | None:
    """What a process that tries something says: None where it worked."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = b""
        try:
            attempt()
        except BaseException as error:
            told = str(error).encode() or b"?"
        os.write(write, told)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    return told.decode(errors="replace") or None


def _try_namespaces(root: str, limits: Limits, owner: int, with_proc: bool) -> str | None:
    def inside() -> None:
        proc = build_root(root, limits.folder_bytes, owner)
        if with_proc and not proc:
            raise OSError("/proc cannot be mounted")

    def attempt() -> None:
        enter_namespaces()
        if told := _tried(inside):
            raise OSError(told)

    return _tried(attempt)


def _be_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _count_apart() -> None:
    """Enter a user namespace, since Linux 5.14 with a count of processes that starts at 0."""
    prctl(PR_SET_DUMPABLE, 1)  # it went with root's rights; without it /proc/self is not ours
    user, group = os.getuid(), os.getgid()
    unshare(NEW_USER)
    map_users(user, group)


def _python_in_sight() -> None:
    """Raise where this user cannot read Python's own folders."""
    _be_nobody()
    for path in python_folders():
        if Path(path).is_dir():
            next(Path(path).iterdir(), None)
    Path(os.__file__).read_bytes()


def _linux_at_least(major: int, minor: int) -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int("".join(filter(str.isdigit, release[1])) or 0)) >= (major, minor)


def find_means(root: str, limits: Limits) -> Means:
    """Try what this machine allows."""
    is_root = os.geteuid() == 0
    owner = NOBODY if is_root else os.geteuid()
    why = _try_namespaces(root, limits, owner, with_proc=False)
    spaces = why is None
    proc = spaces and _try_namespaces(root, limits, owner, with_proc=True) is None
    nobody = is_root and (spaces or _tried(_python_in_sight) is None)

    def apart() -> None:
        if nobody:
            _be_nobody()
        _count_apart()

    def filtered() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        refuse_calls(in_sight=not spaces, forks=True)

    countable = _linux_at_least(5, 14) and (nobody or not is_root)
    own_count = countable and ((spaces and not is_root) or _tried(apart) is None)
    why_no_filter = _tried(filtered)
    return Means(
        spaces, why or "", proc, landlock_version(), why_no_filter is None, why_no_filter or "", nobody, own_count
    )


def with_others(means: Means) -> Means:
    """With the user's others counted, where the kernel will count them along. Called outside the namespaces."""
    if means.count_of_its_own:
        return means
    return replace(means, others=tasks_of(NOBODY if means.nobody else os.getuid()))


def _limit_processes(limits: Limits, means: Means) -> None:
    if os.getuid() == 0:
        return  # the kernel does not count root's
    if means.count_of_its_own:
        if means.nobody or not means.namespaces:  # else it is in a user namespace already
            _count_apart()
        allowed = limits.processes + WATCHERS
    else:
        allowed = means.others + MARGIN + limits.processes
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))


def _limit_resources(limits: Limits) -> None:
    for what, value in (
        (resource.RLIMIT_AS, limits.address_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (value, value))
    # The first ends a program as it should be ended, the second one that does not listen.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))


def _only_descriptor(keep: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    highest = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, keep)
    os.closerange(keep + 1, highest)


def confine(limits: Limits, means: Means, folder: str, keep: int) -> None:
    """Confine this process for good, with all that the machine has.

    Args:
        limits: What it may use.
        means: From `find_means`.
        folder: The only one that it may write to.
        keep: The file descriptor that it keeps, beside standard input, output and error, which lead nowhere.

    Raises:
        OSError: Something that was found at the start does not work now.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGXFSZ else signal.SIG_IGN)
    last_to_stay = Path("/proc/self/oom_score_adj")
    if last_to_stay.exists():
        last_to_stay.write_text("1000")  # where memory runs out all the same, this goes first
    _only_descriptor(keep)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= VARIABLES | {"HOME": folder, "TMPDIR": folder}
    readable = [*python_folders(), "/proc", "/dev"] if means.namespaces else python_folders()
    if means.nobody:
        _be_nobody()
    _limit_processes(limits, means)
    _limit_resources(limits)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if means.landlock:
        restrict(readable, [folder, "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"])
    drop_capabilities()
    if means.call_filter:
        # Root's processes are not counted, so there is one.
        refuse_calls(in_sight=not means.namespaces, forks=os.getuid() != 0)


def isolation(limits: Limits, means: Means) -> Isolation:
    """What the means come to, in words."""
    where = "mount namespace" if means.namespaces else ""
    landlock = f"Landlock {means.landlock}" if means.landlock else ""
    calls = "filter of system calls" if means.call_filter else ""
    enforced = {
        "processor time": f"{limits.cpu_seconds} s a process (RLIMIT_CPU)",
        "wall time": f"{limits.wall_seconds:g} s (watched)",
        "memory": f"{limits.address_bytes // MIB} MiB of addresses a process (RLIMIT_AS)",
        "file size": f"{limits.file_bytes // MIB} MiB (RLIMIT_FSIZE)",
        "open files": f"{limits.open_files} (RLIMIT_NOFILE)",
        "environment": "emptied",
    }
    missing: dict[str, str] = {}
    if means.proc or not means.namespaces:
        enforced["memory"] += f", {limits.memory_bytes // MIB} MiB together (watched)"
    else:
        missing["memory of all processes together"] = "no /proc can be mounted here"
    because = f"no namespaces ({means.why_no_namespaces})"
    if means.namespaces or means.landlock:
        enforced["files"] = f"reads Python and the system's libraries, writes its own folder ({_and(where, landlock)})"
    else:
        missing["files"] = f"{because}, no Landlock"
    if means.namespaces:
        enforced["folder size"] = f"{limits.folder_bytes // MIB} MiB (tmpfs)"
        enforced["network"] = f"none ({_and('network namespace', calls)})"
        enforced["other processes"] = f"out of sight ({_and('process namespace', calls)})"
    else:
        missing["folder size"] = because
        tcp = means.landlock >= TCP_SINCE
        if calls or tcp:
            enforced["network"] = f"none ({calls})" if calls else f"no TCP ({landlock})"
        if not calls:
            missing["network but for TCP" if tcp else "network"] = f"{because}, no filter ({means.why_no_filter})"
        signals = calls or (landlock if means.landlock >= SIGNALS_SINCE else "")
        if signals:
            enforced["signals to other processes"] = f"none ({signals})"
        else:
            missing["signals to other processes"] = f"{because}, no filter ({means.why_no_filter})"
    if os.geteuid() == 0 and not means.nobody:
        if calls:
            enforced["processes"] = f"1, which may have threads ({calls})"
        else:
            missing["processes"] = (
                f"root's are not counted, only root can read Python's folders, no filter ({means.why_no_filter})"
            )
    else:
        own = means.count_of_its_own
        how = "RLIMIT_NPROC in a user namespace" if own else "RLIMIT_NPROC, beside the user's others"
        enforced["processes"] = f"{limits.processes if own else limits.processes + MARGIN} ({how})"
    if means.nobody:
        enforced["user"] = "nobody"
    return Isolation(enforced, missing)


def _and(*means: str) -> str:
    return ", ".join(word for word in means if word) or sys.platform
