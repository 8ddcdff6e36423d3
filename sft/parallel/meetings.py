"""Points at which all ranks meet while they write a checkpoint: however long one takes, and whatever fails on one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from sft.parallel.process_group import gather, met_at_the_end

Value = TypeVar("Value")
Meet = Callable[[Any], list[Any]]


@contextmanager
def meetings() -> Iterator[Meet]:
    """Gives what every rank calls as often as the others: it waits for all, and returns what each brings, by rank.

    A rank may take hours on the way to a meeting, and one that is gone is still noticed within the group's timeout. The `with` must be
    left by all ranks alike, or by an error that ends the job.

    Raises:
        RuntimeError: A rank is gone.
    """
    stretch = ExitStack()

    def meet(value: Any) -> list[Any]:
        stretch.close()
        values = gather(value)
        stretch.enter_context(met_at_the_end())
        return values

    with stretch:
        stretch.enter_context(met_at_the_end())
        yield meet


@contextmanager
def in_step(meet: Callable[[], None]) -> Iterator[list[Exception]]:
    """Keep the ranks together while a library writes: it saves on some ranks, and lets all exchange something afterwards.

    A `torch.save` to a file that fails here is remembered and removed, and nothing is saved any more; the rank goes on to where it meets
    the others. A barrier of all ranks is a meeting, where a rank may be hours late.

    Args:
        meet: Called at each barrier.
    """
    save, barrier = torch.save, torch.distributed.barrier
    failed: list[Exception] = []

    def save_or_remember(value: Any, file: Any, *args: Any, **keywords: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(value, file, *args, **keywords)
        elif not failed:
            try:
                save(value, file, *args, **keywords)
            except Exception as error:
                failed.append(error)
                with suppress(OSError):
                    Path(file).unlink()

    def meet_instead(group: Any = None, *args: Any, **keywords: Any) -> Any:
        if group not in (None, torch.distributed.GroupMember.WORLD):
            return barrier(group, *args, **keywords)
        return meet()

    torch.save = save_or_remember  # type: ignore[assignment]
    torch.distributed.barrier = meet_instead
    try:
        yield failed
    finally:
        torch.save, torch.distributed.barrier = save, barrier
