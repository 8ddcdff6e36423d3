"""Decides what each process prints: rank 0 to the terminal, other ranks to files, and of all failures the first, once.

| file | content |
|---|---|
| <run>/logs/rank-N.log | what rank N printed, from Python or C++; each start appends |
| <run>/logs/failed.txt | which rank failed first in this start, and why |
| <run>/logs/failed.status | its exit status, where another start would end the same |

Until the run's folder is known, both are in a temporary folder of this node, named by the launcher's process id, so that its ranks share
it whichever launcher it is. The rank that creates failed.txt was first, and no other prints an error. Files need no store or process
group, which is often gone by then. Nothing that is printed or kept here holds a credential.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sft.credentials import redact
from sft.errors import is_lost

FAILURE, STATUS = "failed.txt", "failed.status"
_WAIT_SECONDS = 10.0  # that a rank which lost the others waits for the rank that failed, or for the launcher to end it


@dataclass
class _Output:
    """Where this process prints."""

    terminal: int = 2  # what standard error was at the start
    log: Path | None = None
    run: Path | None = None
    signalled: bool = False  # perhaps by the launcher because another rank is gone


_output = _Output()


def is_rank() -> bool:
    """Whether a launcher started this process beside others."""
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launch_folder(launcher: int) -> Path:
    """The temporary folder that the processes of one launcher share, by its process id."""
    try:  # a process id is reused, but not together with its start time
        started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "0"
    return Path(tempfile.gettempdir()) / f"sft-{os.getuid()}-{launcher}-{started}"


def _make_launch_folder(launcher: int) -> Path:
    folder = launch_folder(launcher)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Another user may have put a folder, or a link to a folder of ours, in its place.
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def start_rank_log() -> None:
    """Send the output of every rank except rank 0 to a file, including that of C++."""
    if not is_rank() or _rank() == 0:
        return
    try:
        log = _make_launch_folder(os.getppid()) / f"rank-{_rank()}.log"
    except OSError:
        return  # there is no place for a file: print rather than lose it
    _output.terminal = os.dup(2)
    _write_to(log)
    command = redact(" ".join(sys.orig_argv))
    print(f"[{_now()}] rank {_rank()} on {socket.gethostname()}, process {os.getpid()}: {command}", flush=True)


def _write_to(log: Path) -> None:
    _flush()
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    _output.log = log


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def move_rank_log(run: Path) -> None:
    """Move the log into the run's folder, now that it is known."""
    if is_rank() or os.environ.get("SFT_LAUNCHER") == str(os.getppid()):  # the launcher cannot know otherwise
        with suppress(OSError):
            (_make_launch_folder(os.getppid()) / "run").write_text(str(run))
    if not is_rank():
        return
    _output.run = run
    earlier, log = _output.log, run / "logs" / f"rank-{_rank()}.log"
    if earlier is None:
        return
    try:
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            _flush()
            file.write(earlier.read_bytes())
        _write_to(log)
        earlier.unlink()
    except OSError:
        return
    if os.environ["LOCAL_RANK"] == "0":  # the only sign of life on this node's terminal
        to_terminal(f"Rank {_rank()} on {socket.gethostname()} and the other ranks of this node write to {log.parent}")


def remove_launch_folder() -> None:
    """Remove the temporary folder; call it after the last thing that may fail on several ranks."""
    if is_rank() and os.environ["LOCAL_RANK"] == "0":
        shutil.rmtree(launch_folder(os.getppid()), ignore_errors=True)


def to_terminal(text: str) -> None:
    """Print a line to what was this process's standard error at its start."""
    _flush()
    if _output.terminal == 2:
        print(text, file=sys.stderr, flush=True)
        return
    with suppress(OSError):  # the terminal may be gone
        os.write(_output.terminal, f"{text}\n".encode())


def failure_text(rank: int, what: str) -> str:
    """A failure of a rank on this node, for `show_first`: who, where, and what, such as `failed`."""
    return f"Rank {rank} on {socket.gethostname()} {what}"


def show_first(failure: str, launcher: int, status: int | None = None) -> None:
    """Show the job's first failure, unless a process of this node has shown it; with a `status` no node restarts the job."""
    with suppress(OSError):  # better shown twice than never
        if not _create(_make_launch_folder(launcher) / FAILURE, failure):
            return
    run = _output.run or run_of(launcher)
    if run is not None:  # the first of this node may not be the first of the job
        with suppress(OSError):
            (run / "logs").mkdir(exist_ok=True)
            if not _create(run / "logs" / FAILURE, failure):
                failure = (run / "logs" / FAILURE).read_text(encoding="utf-8")
            elif status is not None:
                (run / "logs" / STATUS).write_text(str(status))
    to_terminal(f"\n{failure}")


def _create(path: Path, text: str) -> bool:
    """Write a file that does not exist yet, at once; False if it does."""
    complete = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    complete.write_text(text, encoding="utf-8")
    try:
        os.link(complete, path)  # atomic, on a network file system too
    except FileExistsError:
        return False
    finally:
        complete.unlink(missing_ok=True)
    return True


def shown_failure(run: Path | None = None, launcher: int | None = None) -> str | None:
    """The first failure of a run's newest start, or of a launcher's ranks; None if there is none."""
    folder = run / "logs" if run else launch_folder(launcher or os.getppid())
    try:
        return (folder / FAILURE).read_text(encoding="utf-8")
    except OSError:
        return None


def final_status(run: Path) -> int | None:
    """The exit status of the first failure of a run's newest start, where another start would end the same; else None."""
    try:
        return int((run / "logs" / STATUS).read_text())
    except (OSError, ValueError):
        return None


def forget_failure(run: Path) -> None:
    """Remove the failure of an earlier start; call it on rank 0, before the others know the run."""
    for name in (FAILURE, STATUS):
        (run / "logs" / name).unlink(missing_ok=True)


def run_of(launcher: int) -> Path | None:
    """The run's folder, once a rank of this launcher knows it."""
    try:
        return Path((launch_folder(launcher) / "run").read_text())
    except OSError:
        return None


def show_message(message: str, lost: bool = False, status: int | None = None) -> None:
    """Show a message once for all ranks of this node that have one. Of a rank that has only `lost` the others, the cause may come first.

    `status` is the exit status, where another start would end the same.
    """
    message = visible(redact(message))
    if not is_rank():
        print(f"\n{message}", file=sys.stderr, flush=True)
        return
    _log(message)
    if lost:
        _wait_for_the_cause()
    show_first(message, os.getppid(), status)


def show_crash(error: BaseException) -> None:
    """Show this rank's traceback if it was the first to fail, and keep it in its log in any case."""
    shown = visible(redact("".join(traceback.format_exception(error)).rstrip()))
    _log(shown)
    if is_lost(error):
        _wait_for_the_cause()
    log = f" Its log: {_output.log}" if _output.log else ""
    show_first(failure_text(_rank(), f"failed; the others are stopped.{log}\n\n{shown}"), os.getppid())


def _log(text: str) -> None:
    if _output.log is not None:
        print(f"\n[{_now()}] {text}", file=sys.stderr, flush=True)


def signal_arrived() -> None:
    """Note that a signal has arrived: it may come from the launcher, because a rank is gone."""
    _output.signalled = True


def _wait_for_the_cause() -> None:
    # The launcher ends this process meanwhile if the rank that is gone was of this node.
    if _output.signalled:
        os._exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if shown_failure() or (_output.run and shown_failure(_output.run)):
            time.sleep(1.0)  # the launcher should hear first of the rank that failed first
            return


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# Text of others, safe to show: in the terminal, in Markdown, HTML or a script.

# Line breaks and tabs; the joiners of emoji, Persian and Indic scripts; direction marks that reverse no text.
_KEPT = {"\n", "\t", "\u200c", "\u200d", "\u200e", "\u200f", "\u061c"}
_NOT_PLAIN = re.compile(r"[^ -~\n\t]")


def is_hidden(character: str) -> bool:
    """Whether a character is a control character, overrides the direction, is invisible, or is half a surrogate pair."""
    return character not in _KEPT and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def name_of(character: str) -> str:
    r"""The code point of a character that cannot be seen.

    >>> name_of("\u202e")
    '⟨U+202E⟩'
    """
    return f"⟨U+{ord(character):04X}⟩"


def visible(text: str, mark: Callable[[str], str] = name_of) -> str:
    r"""Show every character of a text.

    >>> visible("a\u202eb\x00"), visible("é 👩‍👩‍👧 سلام")
    ('a⟨U+202E⟩b⟨U+0000⟩', 'é 👩\u200d👩\u200d👧 سلام')
    """
    return _NOT_PLAIN.sub(lambda found: mark(found[0]) if is_hidden(found[0]) else found[0], text)


def visible_line(text: str) -> str:
    r"""Show a name or another short text on one line: after a line break it could imitate a line of ours.

    >>> visible_line("rows\n\x1b[2Jdone.jsonl")
    'rows⟨U+000A⟩⟨U+001B⟩[2Jdone.jsonl'
    """
    return visible(text).replace("\n", name_of("\n"))


def is_plain_name(name: str) -> bool:
    """Whether a name is that of one file or folder, in characters that can be seen."""
    return name not in ("", ".", "..") and "/" not in name and visible_line(name) == name and not name.startswith(".")
