"""Every error that a user can meet, and how it is shown.

    UserError            the user can fix it: one message, exit status 2, no traceback
    ├── RecipeError      the YAML or an override
    ├── PlanError        the recipe does not fit this machine, or contradicts its DeepSpeed file
    ├── DataError        a dataset is missing or has no usable rows
    ├── ModelError       a model, tokenizer or chat template
    ├── EvaluationError  a task or an evaluation setting
    ├── RunError         the run directory
    ├── ExportError      what is handed over, to whom, and how
    ├── PreflightError   the machines or processes of a job do not fit together
    ├── RanksError       the ranks of a job do not do the same
    └── NonfiniteError   a loss or gradient is NaN or infinite
    LostRank             another process of the job is gone: one message, exit status 1, no traceback
    GateFailed           a tuned model does not hold what eval.gate asks for: a sentence for each failure, exit status 3, no traceback
    WrongSave            what was written is not the model in memory: one message, exit status 1, no traceback
    Interrupted          somebody asked it to stop: one line, exit status 130 (Ctrl-C) or 143

Anything else that escapes is our bug and keeps its traceback.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

from sft.credentials import redact
from sft.terminal import is_rank, tell_crash, tell_message
from sft.visible import visible

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
EXIT_LOST_RANK = 1
"""Not 2: nothing has to be changed before the same command can go on, so that a scheduler may start it again."""

EXIT_GATE = 3
"""By its own number, so that CI can tell a model that is worse from an evaluation that did not come to its end."""

EXIT_WRONG_SAVE = 1
"""Not 2: nothing that the user has written is wrong."""

EXIT_INTERRUPTED = 130
"""By Ctrl-C (SIGINT)."""

EXIT_TERMINATED = 143
"""By whatever else asks a process to stop: docs/interruptions.md."""


class UserError(Exception):
    """A mistake the user can fix. The message holds the value, the reason and the remedy."""


class RecipeError(UserError):
    """The recipe file or an override on the command line."""


class PlanError(UserError):
    """The recipe cannot be carried out as written on this machine."""


class DataError(UserError):
    """A dataset is missing, unreadable, or holds nothing to train on."""


class ModelError(UserError):
    """A model, a tokenizer or a chat template."""


class EvaluationError(UserError):
    """A task or a setting of the evaluation."""


class RunError(UserError):
    """The run directory."""


class ExportError(UserError):
    """What is handed over, where to, or how."""


class PreflightError(UserError):
    """The machines or processes of a job differ, are not all there, or do not reach each other."""


class RanksError(UserError):
    """The ranks of a job do not do the same."""


class NonfiniteError(UserError):
    """A loss or gradient that is NaN or infinite."""


class LostRank(Exception):
    """Another process of the job, its machine, or the network to it is gone, or does not answer in time.

    Args:
        message: For the user.
        named: It names the process.
    """

    def __init__(self, message: str, named: bool = False) -> None:
        super().__init__(message)
        self.named = named


class WrongSave(Exception):
    """A saved model that is not the model in memory: a bug of this project or of a library."""


class GateFailed(Exception):
    """A tuned model that does not hold what eval.gate asks for.

    Args:
        failures: A sentence for each.
    """

    def __init__(self, failures: list[str]) -> None:
        super().__init__("\n  ".join(["The gate has failed:", *failures]))


class Interrupted(BaseException):
    """Somebody asked this process to stop.

    Args:
        by: A signal's name, or what else asked.
        status: Exit status.
        after: What was done before, such as ` after step 7`.
        agreed: All ranks have stopped at the same step, with a checkpoint.
    """

    def __init__(self, by: str, status: int, after: str = "", agreed: bool = False) -> None:
        super().__init__(f"Interrupted by {by}{after}")
        self.status, self.agreed = status, agreed


def did_you_mean(word: str, known: Iterator[str] | list[str], otherwise: str = "") -> str:
    """The closest known word, ready to append to a message.

    Args:
        word: What was written.
        known: What could have been meant.
        otherwise: What to append where nothing is close, such as a full stop.

    >>> did_you_mean("max_len", ["max_length", "packing"])
    '; did you mean `max_length`?'
    """
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{matches[0]}`?" if matches else otherwise


def stop(status: int) -> NoReturn:
    """End this process, threads and all."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a tracker or a process group must not keep a rank alive that has nothing left to do.
    if os.environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
        os._exit(status)
    sys.exit(status)


def disk_was_full(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised for, is that a disk or a quota is full."""
    # safetensors, torch and pyarrow each raise an error of their own, some while handling the one that says it.
    while error is not None:
        # torch's zip writer says only that it stands elsewhere than where it wrote.
        words = str(error)
        if "No space left on device" in words or "Disk quota exceeded" in words:
            return True
        if "inline_container" in words and "unexpected pos" in words:
            return True
        error = error.__cause__ or error.__context__
    return False


def _what_was_refused(text: str) -> str:
    """torch names it within pages of advice on how to load it all the same."""
    named = re.search(r"GLOBAL ([\w.]+)", text)
    return f" It names {named[1]}." if named else ""


_OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "can't start new thread")


def _has_a_working_directory() -> bool:
    try:
        return bool(os.getcwd())  # noqa: PTH109  # torch and transformers ask so
    except FileNotFoundError:
        return False


def _port_was_taken(error: BaseException) -> bool:
    return type(error).__name__ == "DistNetworkError" and "EADDRINUSE" in str(error)


def _known_mistake(error: BaseException) -> str | None:
    """What is wrong, where an error of a library is known to be no bug."""
    if disk_was_full(error):
        return "The disk is full. Free some space, or set output_dir to another disk. What was complete is kept."
    if "File too large" in str(error):
        return "A file is larger than what may be written here: raise the limit (ulimit -f unlimited), or set output_dir to another disk."
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return (
            "Memory ran out: this process asked for more memory or threads than the machine has free, or than it may have (ulimit -v, "
            "ulimit -u). Free some, lower train.micro_batch_size or data.max_length, or start fewer processes (NPROC); docs/memory.md."
        )
    if isinstance(error, FileNotFoundError) and not _has_a_working_directory():
        return "The working directory has been deleted. Change into one that exists, and start again."
    if type(error).__name__ == "AuthenticationError" and type(error).__module__.startswith("wandb"):
        return f"wandb refuses the login: {error} Log in again (wandb login), or keep the run here: WANDB_MODE=offline."
    if type(error).__name__ == "UnpicklingError":
        return (
            "A file holds other things than tensors and plain values, or is damaged, and is not loaded: what it holds could run as a "
            f"program. Go on from another checkpoint, or get the file again from who made it.{_what_was_refused(str(error))}"
        )
    if _port_was_taken(error):
        return (
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} is taken on this machine: by another job, or by a second process that was also "
            "started as RANK=0. Set another MASTER_PORT for all processes of this job, and give each a RANK of its own."
        )
    return None


def _tell_interruption(interrupted: Interrupted) -> None:
    from sft.signals import tell

    tell(interrupted)


def _signals_end_it() -> None:
    from sft.signals import give_up

    give_up()


@contextmanager
def users_mistakes_end_cleanly() -> Iterator[None]:
    """Show a UserError as its message alone and exit with status 2; Ctrl-C ends without a traceback too.

    Of the ranks of a job only the first to end is shown, a bug with its traceback: see sft/terminal.py.
    """
    try:
        yield
    except UserError as error:
        tell_message(str(error))
        stop(EXIT_USER_ERROR)
    except Interrupted as interrupted:
        _tell_interruption(interrupted)
        stop(interrupted.status)
    except LostRank as error:
        _signals_end_it()
        tell_message(str(error), lost=not error.named)
        stop(EXIT_LOST_RANK)
    except GateFailed as error:
        tell_message(str(error))
        stop(EXIT_GATE)
    except WrongSave as error:
        tell_message(str(error))
        stop(EXIT_WRONG_SAVE)
    except BrokenPipeError:
        # `--show 100 | head`: the reader has seen enough. What is still in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop(0)
    except Exception as error:
        _signals_end_it()
        mistake = _known_mistake(error)
        if mistake is not None:
            tell_message(mistake)
            stop(EXIT_USER_ERROR)
        if not is_rank():
            told = "".join(traceback.format_exception(error))
            if visible(redact(told)) == told:
                raise
            print(visible(redact(told)), file=sys.stderr, flush=True)
            stop(EXIT_CRASHED)
        tell_crash(error)
        stop(EXIT_CRASHED)
    except KeyboardInterrupt:
        stop(EXIT_INTERRUPTED)
    except SystemExit as ending:
        # A rank that is still in its group would abort where Python takes it apart.
        if is_rank() and isinstance(ending.code, int):
            stop(ending.code)
        raise


def run_main(main: Callable[[list[str]], None]) -> None:
    """Call a module's main with the command line; the last line of each entry point."""
    from sft.signals import hear_held_back, listening

    with listening(), users_mistakes_end_cleanly():
        hear_held_back()
        os.getcwd()  # noqa: PTH109  # one that was deleted ends here, and not in each process that is started
        main(sys.argv[1:])
