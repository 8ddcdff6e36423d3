"""The first rank speaks, the others write into files, and of all that fail the first one is heard.

| file | content |
|---|---|
| <run>/logs/rank-N.log | what rank N printed, Python or C++; each start is added |
| <run>/logs/failed.json | which rank ended this start first, and why |

Until the run's folder is known both are in a temporary folder of this machine, named by the launcher's process: so it is the same for
its ranks, whichever launcher it is. Who creates failed.json was first; nobody else speaks. Files need no store or group, which are
often gone by then. What is shown and kept has no secrets in it. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISDIR

from sft.credentials import redact
from sft.visible import visible

ENDING = "failed.json"
"""Which rank ended the job first, in the run's logs/."""
_PATIENCE = 10.0
"""Seconds that a rank which lost the others waits for who was the reason to speak, or for the launcher to end it."""


@dataclass
class _Voice:
    """Where this process's words go."""

    terminal: int
    """A file descriptor: what standard error was at the start."""

    log: Path | None = None
    run: Path | None = None
    asked_to_end: bool = False


_voice = _Voice(2)


def is_rank() -> bool:
    """Whether a launcher started this process beside others."""
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launched_folder(launcher: int) -> Path:
    """The temporary folder that the processes of one launcher share.

    Args:
        launcher: Its process id.
    """
    try:  # a process id comes back, one with the same time of its start does not
        started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "0"
    return Path(tempfile.gettempdir()) / f"sft-{os.getuid()}-{launcher}-{started}"


def _own_folder(launcher: int) -> Path:
    folder = launched_folder(launcher)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not S_ISDIR(
        found.st_mode
    ):  # or a link that somebody has put there, to a folder of ours
        raise PermissionError(f"{folder} is somebody else's")
    return folder


def begin() -> None:
    """Send what every rank but the first prints into a file, C++'s too; the first rank and a single process go on speaking."""
    if not is_rank() or _rank() == 0:
        return
    try:
        log = _own_folder(os.getppid()) / f"rank-{_rank()}.log"
    except OSError:
        return  # no place for a file: better heard than lost
    _voice.terminal = os.dup(2)
    _write_into(log)
    words = redact(" ".join(sys.orig_argv))
    print(f"[{_now()}] rank {_rank()} on {socket.gethostname()}, process {os.getpid()}: {words}", flush=True)


def _write_into(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    _voice.log = log


def move_to(run: Path) -> None:
    """Go on in the run's folder, now that it is known.

    Args:
        run: outputs/RECIPE/RUN, on every rank the same.
    """
    if is_rank() or os.environ.get("SFT_LAUNCHER") == str(os.getppid()):  # the launcher is not told otherwise
        with suppress(OSError):
            (_own_folder(os.getppid()) / "run").write_text(str(run))
    if not is_rank():
        return
    _voice.run = run
    earlier, log = _voice.log, run / "logs" / f"rank-{_rank()}.log"
    if earlier is None:
        return
    try:
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            sys.stdout.flush()
            sys.stderr.flush()
            file.write(earlier.read_bytes())
        _write_into(log)
        earlier.unlink()
    except OSError:
        return
    if os.environ["LOCAL_RANK"] == "0":  # the only sign of life on this machine's terminal
        to_terminal(f"Rank {_rank()} on {socket.gethostname()} and the others of this machine write to {log.parent}")


def end() -> None:
    """Leave nothing in the temporary folder; after the last thing that may fail on several ranks."""
    if is_rank() and os.environ["LOCAL_RANK"] == "0":
        shutil.rmtree(launched_folder(os.getppid()), ignore_errors=True)


def give_back() -> None:
    """Speak where this process spoke before `begin`: what it becomes begins by itself."""
    if _voice.terminal != 2:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(_voice.terminal, stream)


def forget_ending(run: Path) -> None:
    """Remove what an earlier start of the run has left; by the first rank, before the others know the run."""
    (run / "logs" / ENDING).unlink(missing_ok=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def to_terminal(text: str) -> None:
    """Show a line on what was this process's standard error when it started."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _voice.terminal == 2:
        print(text, file=sys.stderr, flush=True)
        return
    with suppress(OSError):  # the terminal may be gone
        os.write(_voice.terminal, f"{text}\n".encode())


@dataclass(frozen=True)
class Ending:
    """How a rank ended the job."""

    rank: int
    host: str
    time: str
    text: str
    """What is shown."""

    @staticmethod
    def of(rank: int, text: str) -> Ending:
        """An ending on this machine, now.

        Args:
            rank: Who.
            text: Shown after the rank and the host.
        """
        host = socket.gethostname()
        return Ending(rank, host, _now(), f"Rank {rank} on {host} {text}")

    def claim(self, launcher: int) -> None:
        """Show the job's first ending, where no process of this machine has shown it yet.

        Args:
            launcher: Process id of who started the ranks of this machine.
        """
        first: Ending | None = self
        with suppress(OSError):
            first = _create(_own_folder(launcher) / ENDING, self)
        if first is None:
            return
        # Whoever is the first here may not be the first of the job.
        run = _voice.run or written_run(launcher)
        if run is not None:
            with suppress(OSError):
                (run / "logs").mkdir(exist_ok=True)
                if _create(run / "logs" / ENDING, self) is None:
                    first = read_ending(run / "logs" / ENDING) or self
        to_terminal(f"\n{first.text}")


def _create(path: Path, ending: Ending) -> Ending | None:
    """The ending, where it is now in the file; None where another is."""
    whole = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    whole.write_text(json.dumps(asdict(ending)))
    try:
        os.link(whole, path)  # at once and only once, on a network's file system too
    except FileExistsError:
        return None
    finally:
        whole.unlink(missing_ok=True)
    return ending


def read_ending(path: Path) -> Ending | None:
    """The ending in a file; None where there is none."""
    try:
        return Ending(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def seen_ending(launcher: int) -> Ending | None:
    """What a rank of this machine has shown."""
    return read_ending(launched_folder(launcher) / ENDING)


def written_run(launcher: int) -> Path | None:
    """The run's folder, where a rank of this launcher has come to know it."""
    try:
        return Path((launched_folder(launcher) / "run").read_text())
    except OSError:
        return None


def tell_message(message: str, lost: bool = False) -> None:
    """Show a message once for all ranks of this machine that have one.

    Args:
        message: For the user.
        lost: This rank has only lost the others: who was the reason, or the launcher, may speak first.
    """
    message = visible(redact(message))
    if not is_rank():
        print(f"\n{message}", file=sys.stderr, flush=True)
        return
    _keep(message)
    if lost:
        _wait_for_the_reason()
    replace(Ending.of(_rank(), ""), text=message).claim(os.getppid())


def tell_crash(error: BaseException) -> None:
    """Show this rank's error where it was the first of the job, and keep it in its log in any case.

    A rank that only lost the others waits: who was the reason speaks, or the launcher tells which process is gone.
    """
    told = visible(redact("".join(traceback.format_exception(error)).rstrip()))
    _keep(told)
    if is_echo(error):
        _wait_for_the_reason()
    log = f" Its log: {_voice.log}" if _voice.log else ""
    Ending.of(_rank(), f"failed; the others are stopped.{log}\n\n{told}").claim(os.getppid())


def _keep(text: str) -> None:
    # What the first rank does not show is nowhere else.
    if _voice.log is not None:
        print(f"\n[{_now()}] {text}", file=sys.stderr, flush=True)
    elif _voice.run is not None:
        with suppress(OSError):
            (_voice.run / "logs").mkdir(exist_ok=True)
            with (_voice.run / "logs" / f"rank-{_rank()}.log").open("a") as file:
                file.write(f"[{_now()}] rank {_rank()} on {socket.gethostname()}: {text}\n")


_ECHOES = ("closed by peer", "reset by peer", "broken pipe", "pair closure", "timed out", "remote process exited")


def is_echo(error: BaseException) -> bool:
    """Whether an error says only that another rank is gone."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"DistError", "LostRank"}:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ECHOES)


def asked_to_end() -> None:
    """A signal has come. From the launcher it may be, because of a rank that is gone."""
    _voice.asked_to_end = True


def _wait_for_the_reason() -> None:
    # The launcher ends this process meanwhile, where the one that is gone was of this machine.
    if _voice.asked_to_end:
        os._exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if seen_ending(os.getppid()) or (_voice.run is not None and read_ending(_voice.run / "logs" / ENDING)):
            time.sleep(1.0)  # the launcher hears of the first one first
            return
