"""Connect the processes that share an evaluation's documents, and have all of them learn of an error on one.

Each has the whole model and every n-th document. All communicate equally often (`exchange`), unless one fails: what it sends then
ends the same task on all. A single process communicates with nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from sft.errors import EvaluationError, LostRank, is_lost
from sft.terminal import is_rank

Value = TypeVar("Value")

# One process may have an hour of long answers left when another is done; the launcher notices one that is gone.
_TIMEOUT = timedelta(weeks=52)
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TaskFailed(Exception):
    """A task could not be measured, on this process or on another."""


def launched() -> int:
    """How many processes a launcher has started, this one among them; 1 without a launcher.

    Raises:
        EvaluationError: They are on several nodes.
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
    """This process's rank among those that share the documents."""
    return int(os.environ.get("RANK", "0")) if is_rank() else 0


def is_first() -> bool:
    """Whether this is rank 0, which prints and writes."""
    return rank() == 0


def join() -> None:
    """Connect to the others over gloo, on GPUs too: the messages are small and stay in the machine's memory.

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
        os.environ["ACCELERATE_USE_CPU"] = "true"  # else accelerate takes each for a single process
    with _lost_ranks_named():
        torch.distributed.init_process_group("gloo", timeout=_TIMEOUT)


def gpu_of(local_rank: int, visible: int) -> int:
    """The GPU of a process.

    Raises:
        EvaluationError: There are fewer visible GPUs than processes.
    """
    if local_rank >= visible:
        raise EvaluationError(
            f"Process {local_rank} of the evaluation has no GPU: {visible} {'is' if visible == 1 else 'are'} visible, and each process "
            f"needs one of its own. Start {visible}, or none: the evaluation starts them itself."
        )
    return local_rank


def leave() -> None:
    """Be a single process from here on."""
    if _connected():
        import torch

        torch.distributed.destroy_process_group()
    for name in _OF_A_LAUNCHER:
        os.environ.pop(name, None)


def exchange(value: Value, failure: str | None = None) -> list[Value]:
    """The value of each process, by rank, on every process.

    Args:
        value: This one's; small once pickled.
        failure: Why this process cannot go on with the task.

    Raises:
        TaskFailed: One of them cannot go on.
        LostRank: One of them is gone.
    """
    values: list[Any] = [(failure, value)]
    if _connected():
        import torch

        values *= torch.distributed.get_world_size()
        with _lost_ranks_named():
            torch.distributed.all_gather_object(values, (failure, value))
    failures = [text for text, _ in values if text is not None]
    if failures:
        raise TaskFailed(failures[0])
    return [one for _, one in values]


def collect(value: Value) -> list[Value]:
    """The value of each process, however large, on rank 0; elsewhere none.

    Raises:
        TaskFailed: One of them cannot go on.
        LostRank: One of them is gone.
    """
    number = len(exchange(None))
    if number == 1:
        return [value]
    import torch

    values: list[Any] | None = [None] * number if is_first() else None
    with _lost_ranks_named():
        torch.distributed.gather_object(value, values, dst=0)
    return values or []


def from_first(work: Callable[[], Value]) -> Value:
    """What the work gives on rank 0, on all. An error of it ends rank 0, and the launcher ends the others."""
    return exchange(work() if is_first() else None)[0]  # type: ignore[return-value]


def first_then_others(work: Callable[[], Value]) -> Value:
    """Do work that fills a cache on the disk: on rank 0, and then on the others, which find it filled."""
    if is_first():
        value = work()
        exchange(None)
        return value
    exchange(None)
    return work()


def _connected() -> bool:
    # A single process must not wait for torch's import to report a mistake.
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LostRank(
            f"Process {rank()} of the evaluation has lost the others: one has ended. The same command starts it again."
        ) from error
