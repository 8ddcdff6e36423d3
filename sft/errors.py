"""Every error that a user can meet, and its exit status.

    UserError            the user can fix it: one message, exit status 2, no traceback
    ├── RecipeError      the YAML file or an override
    ├── PlanError        the recipe does not fit this machine, or contradicts its DeepSpeed file
    ├── DataError        a dataset is missing or has no usable rows
    ├── ModelError       a model, tokenizer or chat template
    ├── EvaluationError  a task or an evaluation setting
    ├── RunError         the run directory
    ├── ExportError      what to export, where to, and how
    ├── PreflightError   the nodes or processes of a job do not fit together
    ├── RanksError       the ranks of a job disagree
    ├── NonfiniteError   a loss or gradient is NaN or infinite
    └── OutOfMemory      a GPU has too little memory for the training
    LostRank             another process of the job is gone: one message, exit status 1, no traceback
    GateFailed           the tuned model fails eval.gate: a sentence for each failure, exit status 3, no traceback
    WrongSave            the saved model is not the model in memory: one message, exit status 1, no traceback
    Interrupted          a signal or a stop request: one line, exit status 130 (Ctrl-C) or 143

Anything else that escapes is our bug and keeps its traceback. sft/program.py shows errors and exits.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
EXIT_LOST_RANK = 1  # not 2: there is nothing to change before running the same command again, so a scheduler may do it
EXIT_GATE = 3  # so that CI can tell a worse model from an evaluation that did not finish
EXIT_INTERRUPTED = 130  # Ctrl-C (SIGINT)
EXIT_TERMINATED = 143  # any other request to stop: docs/resume.md


class ShownError(Exception):
    """An error that is shown as its message, without a traceback."""

    status = EXIT_CRASHED
    """The exit status of the process that it ends."""


class UserError(ShownError):
    """A mistake the user can fix. The message holds the value, the reason and the remedy."""

    status = EXIT_USER_ERROR


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
    """What to export, where to, or how."""


class PreflightError(UserError):
    """The nodes or processes of a job differ, are not all there, or do not reach each other."""


class RanksError(UserError):
    """The ranks of a job disagree."""


class NonfiniteError(UserError):
    """A loss or gradient that is NaN or infinite."""


class OutOfMemory(UserError):
    """A GPU has too little memory for the training."""


class LostRank(ShownError):
    """Another process of the job (`named` if the message names it), its node, or the network to it is gone or does not answer."""

    status = EXIT_LOST_RANK

    def __init__(self, message: str, named: bool = False) -> None:
        super().__init__(message)
        self.named = named


class WrongSave(ShownError):
    """A saved model that is not the model in memory: a bug of this project or of a library, and no mistake of the user's."""


class GateFailed(ShownError):
    """A tuned model that does not meet eval.gate."""

    status = EXIT_GATE

    def __init__(self, failures: list[str]) -> None:
        super().__init__("\n  ".join(["The gate has failed:", *failures]))


class Interrupted(BaseException):
    """A request to stop this process.

    Args:
        by: A signal's name, or what else requested it.
        status: Exit status.
        after: What was done before, such as ` after step 7`.
        agreed: All ranks have stopped at the same step, with a checkpoint.
    """

    def __init__(self, by: str, status: int, after: str = "", agreed: bool = False) -> None:
        super().__init__(f"Interrupted by {by}{after}")
        self.status, self.agreed = status, agreed


_SIGNS_OF_A_LOST_RANK = (
    *("timed out", "timeout", "closed by peer", "reset by peer", "broken pipe", "connection refused"),
    *("no route to host", "network is unreachable", "pair closure", "remote process exited"),
)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or does not answer: torch's DistError, gloo's, NCCL's, or LostRank."""
    if {kind.__name__ for kind in type(error).__mro__} & {"DistError", "LostRank"}:
        return True
    text = str(error).lower()
    of_backend = isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text)
    return of_backend and any(sign in text for sign in _SIGNS_OF_A_LOST_RANK)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The closest known word, ready to append to a message.

    >>> did_you_mean("max_len", ["max_length", "packing"])
    '; did you mean `max_length`?'
    """
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{matches[0]}`?" if matches else otherwise
