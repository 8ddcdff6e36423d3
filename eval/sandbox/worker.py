"""Runs generated programs one after another, each in a process that cannot get out. Started by eval/sandbox/runner.py.

    standard input:   the limits, then a program a line, as JSON
    standard output:  what is enforced here, then how each program ended

Imports the standard library only, so that the process of a program is a fork of a few milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from eval.sandbox.confinement import Means, confine, find_means, isolation, with_others
from eval.sandbox.folders import FOLDER, NOBODY, build_root, enter_namespaces
from eval.sandbox.limits import Limits, Outcome
from eval.sandbox.processes import descendants, kill_descendants, reap
from eval.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

RAISED = b"-"
NOT_CONFINED = b"!"
LOOK_SECONDS = 0.05
# Where every process of the machine is in sight, looking at them costs more.
LOOK_SECONDS_IN_SIGHT = 0.25
GRACE_SECONDS = 20.0
# A program that says more than the one word is no pass, whatever it says.
MOST_SAID = 4096


def _end_with_parent() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


def _clean_up_without_parent() -> None:
    """Have the end of the parent, however sudden, be an end that leaves no process and no file."""
    signal.signal(signal.SIGTERM, _leave)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _remove(folder: str) -> None:
    """Remove a folder; shutil's way would fail where folders lie in each other a thousand deep."""
    command = ["rm", "-rf", "--", folder]
    subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _execute(program: str, said: int, nonce: bytes, limits: Limits, means: Means, folder: str) -> NoReturn:
    """Be the process that runs a program. Its exit status says nothing: `os._exit(0)` is no pass."""
    # The program may put others in their place.
    write, leave, number, own = os.write, os._exit, os.getpid, os.getpid()
    try:
        confine(limits, means, folder, keep=said)
        _end_with_parent()  # the kernel forgets it where the user changes
    except BaseException as error:
        write(said, NOT_CONFINED + f"{type(error).__name__}: {error}".encode())
        leave(1)
    tempfile.tempdir = None  # that of this process, which has asked before
    random.seed(0)
    try:
        # Without this file's own `from __future__`, under which a name that is missing in an annotation would be no mistake.
        exec(compile(program, "<program>", "exec", dont_inherit=True), {})
    except BaseException as error:
        if number() != own:
            leave(1)  # a process that the program has started says nothing for it
        try:
            told = f"{type(error).__name__}: {error}"
        except BaseException:
            told = type(error).__name__
        write(said, RAISED + told[:300].encode(errors="replace"))
        leave(1)
    if number() == own:
        write(said, nonce)
    leave(0)


def _wait(child: int, read: int, limits: Limits, look: float) -> tuple[bytes, int, float, str]:
    """Watch a program until it ends or has to.

    Returns:
        What it said, its wait status, its processor seconds, and the limit that it met, if any.
    """
    deadline, next_look, said = time.monotonic() + limits.wall_seconds, 0.0, b""
    while True:
        readable = select.select([read], [], [], min(look, LOOK_SECONDS))[0]
        if readable and (more := os.read(read, MOST_SAID)):
            said += more if len(said) <= MOST_SAID else b""
        elif readable:
            time.sleep(0.001)  # it has closed its end, and is about to leave, or not
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            # Once: what it has left behind may go on writing.
            said += os.read(read, MOST_SAID) if select.select([read], [], [], 0)[0] else b""
            return said, status, used.ru_utime + used.ru_stime, ""
        now = time.monotonic()
        if now > deadline:
            return said, 0, 0.0, "wall time"
        if now > next_look:
            next_look = now + look
            running = descendants(os.getpid()) if Path("/proc/self").exists() else {}
            if sum(running.values()) > limits.memory_bytes:  # pages that several share count for each of them
                return said, 0, 0.0, "memory"


def _judge(said: bytes, status: int, used: float, met: str, nonce: bytes, limits: Limits) -> dict[str, Any]:
    if said.startswith(NOT_CONFINED):
        return {"broken": said[1:].decode(errors="replace")}
    if met == "wall time":
        return asdict(Outcome("wall time", f"still running after {limits.wall_seconds:g} s"))
    if met == "memory":
        return asdict(Outcome("memory", f"more than {limits.memory_bytes} bytes"))
    if said == nonce:
        return asdict(Outcome("passed", ""))
    if said.startswith(RAISED):
        told = said[1:].decode(errors="replace")
        return asdict(Outcome("memory" if told.startswith("MemoryError") else "failed", told))
    by_signal = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
    if used >= limits.cpu_seconds or by_signal == "SIGXCPU":
        return asdict(Outcome("cpu time", f"more than {limits.cpu_seconds} s"))
    if by_signal:
        return asdict(Outcome("killed", by_signal))
    return asdict(Outcome("failed", f"left with status {os.WEXITSTATUS(status)} before its last line"))


def _supervise(program: str, limits: Limits, means: Means, folder: str) -> dict[str, Any]:
    """Run a program in a child of this process, and end whatever it leaves."""
    nonce = os.urandom(16).hex().encode()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _end_with_parent()
        _execute(program, write, nonce, limits, means, folder)
    os.close(write)
    said, status, used, met = _wait(child, read, limits, LOOK_SECONDS if means.namespaces else LOOK_SECONDS_IN_SIGHT)
    if not means.namespaces:
        kill_descendants()
    return _judge(said, status, used, met, nonce, limits)


def _in_namespaces(program: str, limits: Limits, means: Means, root: str) -> dict[str, Any]:
    """Be the first process of new namespaces: when it ends, the kernel ends all the others in them."""
    owner = NOBODY if means.nobody else os.geteuid()
    if not build_root(root, limits.folder_bytes, owner) and means.proc:
        return {"broken": "/proc cannot be mounted any more"}
    return _supervise(program, limits, means, FOLDER)


def _in_sight(program: str, limits: Limits, means: Means, root: str) -> dict[str, Any]:
    """Without namespaces: a folder that is removed afterwards."""
    folder = tempfile.mkdtemp(dir=root)
    try:
        if means.nobody:
            os.chown(folder, NOBODY, NOBODY)
        return _supervise(program, limits, means, folder)
    finally:
        _remove(folder)


def _watcher(program: str, tell: int, limits: Limits, means: Means, root: str) -> None:
    """Be the process that watches one program, and say how it ended."""
    _end_with_parent()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        if means.namespaces:
            enter_namespaces()
            first = os.fork()  # the namespace of processes begins with the next one
            if first:
                os.waitpid(first, 0)
                return
            _end_with_parent()
        how = _in_namespaces if means.namespaces else _in_sight
        ended = how(program, limits, means, root)
    except BaseException as error:
        ended = {"broken": f"{type(error).__name__}: {error}"}
    os.write(tell, json.dumps(ended).encode())


def run_program(program: str, limits: Limits, means: Means, root: str) -> dict[str, Any]:
    """Run one program; says `broken` where it could not be run as it should be."""
    means = with_others(means)
    read, write = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(read)
        try:
            _watcher(program, write, limits, means, root)
        finally:
            os._exit(0)
    os.close(write)
    told, deadline = b"", time.monotonic() + limits.wall_seconds + GRACE_SECONDS
    try:
        with os.fdopen(read, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                more = pipe.read(65536)
                if not more:
                    break
                told += more
    finally:
        kill_descendants()
        reap()
    ended: dict[str, Any] = json.loads(told) if told else {"broken": "the process that watched it is gone"}
    return ended


def main() -> None:
    """Serve until standard input ends."""
    _clean_up_without_parent()
    # Python's own handler would let a program of the same user interrupt the first process of its namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.umask(0o022)
    # Where this file was found is nothing for the programs.
    sys.path[:] = [path for path in sys.path if path != os.environ["PYTHONPATH"]]
    limits = Limits(**json.loads(sys.stdin.readline()))
    root = tempfile.mkdtemp(prefix="generated-code-")
    Path(root).chmod(0o711)
    try:
        means = find_means(root, limits)
        print(json.dumps(asdict(isolation(limits, means))), flush=True)
        for line in sys.stdin:
            print(json.dumps(run_program(json.loads(line), limits, means, root)), flush=True)
    finally:
        _remove(root)


if __name__ == "__main__":
    main()
