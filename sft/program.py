"""Runs a program's main: hears signals, shows an error once, and exits with its status. Its child processes end with it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import join
from typing import NoReturn

from sft import signals
from sft.credentials import redact
from sft.errors import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_USER_ERROR, Interrupted, LostRank, ShownError
from sft.files import disk_was_full
from sft.terminal import is_rank, show_crash, show_message, visible

RESULT_FILE = "SFT_RESULT_FILE"
"""Environment variable: the file in which a process that sft/api.py has started reports what it wrote."""
_PR_SET_PDEATHSIG = 1


def shown_command(script: str, *words: str) -> str:
    """A command for the user to type: the repository's script in its folder, elsewhere `sft` if it is on PATH.

    Installed from a wheel, there are no scripts.
    """
    file = Path("scripts", f"{script}.sh")
    own = Path(__file__).parents[1] / file
    if file.is_file() or (own.is_file() and not shutil.which("sft")):
        return join(["bash", str(file if file.is_file() else own), *words])
    sft = "sft" if shutil.which("sft") else str(Path(sys.executable).with_name("sft"))
    return join([sft, "train" if script == "sft" else script, *words])


def run_main(main: Callable[[list[str]], None]) -> None:
    """Call a module's main with the command line; the last line of each entry point."""
    with signals.listening(), exit_on_error():
        signals.hear_held_back()
        main(sys.argv[1:])


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Show an error once and exit with its status; only our own bugs show a traceback.

    Of all ranks that fail, only the first is shown: see sft/terminal.py.
    """
    try:
        yield
    except ShownError as error:
        lost = isinstance(error, LostRank) and not error.named
        if isinstance(error, LostRank):
            signals.give_up()
        show_message(str(error), lost, error.status if error.status != EXIT_CRASHED else None)
        exit_process(error.status)
    except Interrupted as interrupted:
        signals.report(interrupted)
        exit_process(interrupted.status)
    except BrokenPipeError:
        # `--show 100 | head`: the reader has seen enough. Discard what is still in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_process(0)
    except Exception as error:
        signals.give_up()
        mistake = _known_mistake(error)
        if mistake is not None:
            show_message(mistake, status=EXIT_USER_ERROR)
            exit_process(EXIT_USER_ERROR)
        if is_rank():
            show_crash(error)
            exit_process(EXIT_CRASHED)
        shown = "".join(traceback.format_exception(error))
        if visible(redact(shown)) == shown:
            raise
        print(visible(redact(shown)), file=sys.stderr, flush=True)
        exit_process(EXIT_CRASHED)
    except KeyboardInterrupt:
        exit_process(EXIT_INTERRUPTED)
    except SystemExit as ending:
        # A rank that is still in its process group would abort when Python tears it down.
        if is_rank() and isinstance(ending.code, int):
            exit_process(ending.code)
        raise


def exit_process(status: int) -> NoReturn:
    """End this process; a rank ends at once, with all its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a tracker or a process group must not keep a rank alive that has nothing left to do.
    if os.environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
        os._exit(status)
    sys.exit(status)


_OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "can't start new thread")


def _known_mistake(error: BaseException) -> str | None:
    """The message for a library's error that is known not to be a bug."""
    kind, message = type(error), str(error)
    if disk_was_full(error):
        return (
            "The disk is full. Free some space, or set output_dir to another disk. Files that were complete are kept."
        )
    if isinstance(error, MemoryError) or any(words in message for words in _OUT_OF_MEMORY):
        return (
            "Out of memory: this process requested more memory or threads than the machine has free, or than its limits allow (ulimit -v, "
            "ulimit -u). Free some, lower train.micro_batch_size or data.max_length, or start fewer processes (NPROC); docs/memory.md."
        )
    if kind.__name__ == "AuthenticationError" and kind.__module__.startswith("wandb"):
        return f"wandb refuses the login: {error} Log in again (wandb login), or set WANDB_MODE=offline."
    if kind.__name__ == "UnpicklingError":
        # torch names the refused class among pages of advice on how to load it all the same.
        named = re.search(r"GLOBAL ([\w.]+)", message)
        return (
            "A file is damaged, or holds more than tensors and plain values, which could run as a program: it is not loaded. Resume "
            f"from another checkpoint, or get the file again from its author.{f' It names {named[1]}.' if named else ''}"
        )
    if kind.__name__ == "DistNetworkError" and "EADDRINUSE" in message:
        return (
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} is taken on this machine: by another job, or by a second process that was also "
            "started as RANK=0. Set another MASTER_PORT for all processes of this job, and give each a RANK of its own."
        )
    return None


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def report_result(path: Path) -> None:
    """Report what this process wrote, where the process that started it wants to know; once."""
    file = os.environ.pop(RESULT_FILE, None)
    if file is not None:
        Path(file).write_text(str(path.resolve()))
