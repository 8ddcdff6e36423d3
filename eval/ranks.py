"""The processes that share an evaluation's documents: how they meet, and how all hear of an error on one of them.

Each has the whole model and every n-th document. All of them meet the same number of times (`exchange`), unless one fails: what it
sends then instead ends the same task on all. A process by itself meets nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from sft.errors import EvaluationError, LostRank
from sft.parallel.process_group import is_lost
from sft.terminal import is_rank

Value = TypeVar("Value")

# One process may have an hour of long answers left when another is done; one that is gone is noticed by its launcher.
_TIMEOUT = timedelta(weeks=52)
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TaskFailed(Exception):
    """A task could not be measured, on this process or on another."""


def launched() -> int:
    """How many processes a launcher has started, this one among them; 1 where it is by itself.

    Raises:
        EvaluationError: They are on several machines.
    """
    if not is_rank():
        return 1
    number = int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", number))
    if here != number:
        raise EvaluationError(
            f"The evaluation was started as {number} processes, {here} of them on this machine. It runs on one machine: start it on one."
        )
    return number


def rank() -> int:
    """The number of this process among those that share the documents."""
    return int(os.environ.get("RANK", "0")) if is_rank() else 0


def is_first() -> bool:
    """Whether this process is the one that speaks and writes."""
    return rank() == 0


def join() -> None:
    """Meet the others, over gloo: what is said between them is said in the machine's memory, also where the models are on GPUs.

    Raises:
        EvaluationError: There are more of them than GPUs.
        LostRank: One of them is gone.
    """
    if launched() == 1:
        leave()
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(gpu_of(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
        # NCCL is not used, and accelerate refuses GPUs between which it does not work until these are set.
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # else accelerate takes each for a process by itself
    with _told_of_lost_ranks():
        torch.distributed.init_process_group("gloo", timeout=_TIMEOUT)


def gpu_of(local_rank: int, visible: int) -> int:
    """The GPU of a process.

    Args:
        local_rank: Its number on this machine.
        visible: GPUs.

    Raises:
        EvaluationError: There is none left for it.
    """
    if local_rank >= visible:
        raise EvaluationError(
            f"Process {local_rank} of the evaluation has no GPU: {visible} {'is' if visible == 1 else 'are'} visible, and each process "
            f"needs one of its own. Start {visible}, or none: the evaluation starts them itself."
        )
    return local_rank


def leave() -> None:
    """Be a process by itself from here on."""
    if _have_met():
        import torch

        torch.distributed.destroy_process_group()
    for name in _OF_A_LAUNCHER:
        os.environ.pop(name, None)


def _have_met() -> bool:
    # A process by itself does not wait for torch's import to be told of a mistake.
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


@contextmanager
def _told_of_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LostRank(
            f"Process {rank()} of the evaluation has lost the others: one has ended. The same command starts it again."
        ) from error


def exchange(value: Value, failure: str | None = None) -> list[Value]:
    """The value of each process, by rank, on every process.

    Args:
        value: This one's; what it pickles to is small.
        failure: Why this process cannot go on with the task.

    Raises:
        TaskFailed: One of them could not go on.
        LostRank: One of them is gone.
    """
    met: list[Any] = [(failure, value)]
    if _have_met():
        import torch

        met *= torch.distributed.get_world_size()
        with _told_of_lost_ranks():
            torch.distributed.all_gather_object(met, (failure, value))
    failures = [text for text, _ in met if text is not None]
    if failures:
        raise TaskFailed(failures[0])
    return [one for _, one in met]


def collect(value: Value) -> list[Value]:
    """The value of each process, however large, on the first one; elsewhere none.

    Raises:
        TaskFailed: One of them could not go on.
        LostRank: One of them is gone.
    """
    import torch

    number = len(exchange(None))
    if number == 1:
        return [value]
    box: list[Any] | None = [None] * number if is_first() else None
    with _told_of_lost_ranks():
        torch.distributed.gather_object(value, box, dst=0)
    return box or []


def from_first(work: Callable[[], Value]) -> Value:
    """What the first process's work gives, on all.

    Args:
        work: Called on the first process alone; an error of it ends that process, and the launcher ends the others.
    """
    return exchange(work() if is_first() else None)[0]  # type: ignore[return-value]


def first_then_others(work: Callable[[], Value]) -> Value:
    """Work that fills a cache on the disk: the first process does it, and then the others find it done."""
    if is_first():
        value = work()
        exchange(None)
        return value
    exchange(None)
    return work()
