"""Every error that a user can meet, and how it is shown.

    UserError            the user can fix it: one message, exit status 2, no traceback
    ├── RecipeError      the YAML or an override
    ├── PlanError        the recipe does not fit this machine, or contradicts its DeepSpeed file
    ├── DataError        a dataset is missing or has no usable rows
    ├── ModelError       a model, tokenizer or chat template
    ├── EvaluationError  a task or an evaluation setting
    ├── RunError         the run directory
    └── RanksError       the ranks of a job do not do the same

Anything else that escapes is our bug and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


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


class RanksError(UserError):
    """The ranks of a job do not do the same."""


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
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(status)
    sys.exit(status)


def _disk_was_full(error: BaseException | None) -> bool:
    # safetensors, torch and pyarrow each raise an error of their own, some while handling the one that says it.
    while error is not None:
        # torch's zip writer says only that it stands elsewhere than where it wrote.
        if "No space left on device" in str(error) or (
            "inline_container" in str(error) and "unexpected pos" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tell(message: str) -> None:
    # A launcher stops all ranks when one has ended. Where all have the same to say, the first of the machine says it and
    # ends the others while they wait; what only another one knows, it says itself.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    print(f"\n{message}", file=sys.stderr, flush=True)


@contextmanager
def users_mistakes_end_cleanly() -> Iterator[None]:
    """Show a UserError as its message alone and exit with status 2; Ctrl-C ends without a traceback too.

    Only the first rank of a machine speaks.
    """
    try:
        yield
    except UserError as error:
        _tell(str(error))
        stop(EXIT_USER_ERROR)
    except BrokenPipeError:
        # `--show 100 | head`: the reader has seen enough. What is still in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop(0)
    except Exception as error:
        if not _disk_was_full(error):
            raise
        _tell("The disk is full. Free some space, or set output_dir to another disk. What was complete is kept.")
        stop(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        stop(EXIT_INTERRUPTED)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Call a module's main with the command line; the last line of each entry point."""
    with users_mistakes_end_cleanly():
        main(sys.argv[1:])
