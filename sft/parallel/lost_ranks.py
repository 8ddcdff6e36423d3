"""What a rank says when another one does not answer: one message, where torch and gloo leave a traceback on every rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sft.errors import LostRank
from sft.recipe.schema import Recipe
from sft.run.directory import Run

_SIGNS = (
    "timed out",
    "timeout",
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "no route to host",
    "network is unreachable",
    "pair closure",
)


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch or gloo says that another rank is gone or does not answer."""
    import torch

    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and "gloo" in text and any(sign in text for sign in _SIGNS)


def lost_rank_message(error: BaseException, doing: str, timeout: int, remedy: str, late: str = "") -> str:
    """One message: who lost the others, doing what, how long it waited, what gloo said, and what to do.

    Args:
        error: From torch or gloo.
        doing: A phrase after "while": `step 12 was trained`.
        timeout: train.ddp_timeout, in seconds.
        remedy: What starting again does, without the full stop.
        late: The ranks that it has waited for, in words, where the watchdog knows them.
    """
    reason = str(error).strip().splitlines()[0].rsplit("] ", maxsplit=1)[-1]
    where = f"Rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
    if late:
        return f"{where} waited train.ddp_timeout={timeout} s while {doing}, and gave up.\n{late}\n{remedy}."
    return (
        f"{where} lost the other ranks while {doing}: {reason}. A process or a machine "
        f"has ended, hangs, or cannot be reached; train.ddp_timeout={timeout} is how many seconds a rank waits. Look at what the other "
        f"machines say and at the network between them. {remedy}."
    )


@contextmanager
def told_of_lost_ranks(
    recipe: Recipe, doing: str | Callable[[], str], run: Run | None = None, late: Callable[[], str] = str
) -> Iterator[None]:
    """Turn the error of a collective that did not come back into one message.

    Args:
        recipe: States the timeout.
        doing: What the ranks do meanwhile, as a phrase after "while".
        run: The run's folder, once there is one.
        late: The ranks that this one has waited for, in words; empty where that is not known.

    Raises:
        LostRank: Another rank is gone or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        phrase = doing if isinstance(doing, str) else doing()
        remedy = run.next_start if run else "The same command starts it again"
        named = late()
        raise LostRank(
            lost_rank_message(error, phrase, recipe.train.ddp_timeout, remedy, named), bool(named)
        ) from error
