"""debug: true. The ranks tell one another where they are and what they go by, before they wait for one another.

Ranks that have come apart (one has a micro-batch fewer, say) wait for ever in collectives that do not belong together. Compared
first, they end with what differs. Packs of one step differ in length between the ranks, and may: what must be equal is the step,
the number of its micro-batches, the trained tokens that the loss is divided by, and the place in the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft.errors import RanksError
from sft.parallel.progress import Progress
from sft.parallel.stall import ranks


def check_agreement(told: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> None:
    """Compare what the ranks have told.

    Args:
        told: Of each rank, in their order, by name.
        notes: Of each rank, what need not be equal and helps to understand.

    Raises:
        RanksError: What differs, with the value of each rank.
    """
    lines = []
    for name in told[0]:
        values: defaultdict[Any, list[int]] = defaultdict(list)
        for rank, facts in enumerate(told):
            values[facts.get(name)].append(rank)
        if len(values) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{value} on {ranks(who)}" for value, who in values.items()))
    if lines:
        lines += [f"  rank {rank} has {note}" for rank, note in enumerate(notes[:8]) if note]
        raise RanksError(
            "\n".join(
                [
                    "The ranks have come apart, and would wait for each other for ever:",
                    *lines,
                    "Each rank must go through as many micro-batches, over the same data. Where code and data are the same everywhere, "
                    "report it with run.json.",
                ]
            )
        )


class Agreement(TrainerCallback):  # type: ignore[misc]
    """Compares the ranks when a step's batches have come, at each micro-batch, and before the optimizer steps.

    Args:
        progress: Of this rank.
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, progress: Progress, timeout: float) -> None:
        self.progress = progress
        # On the CPU, and apart from the training's own collectives.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._count = torch.distributed.get_world_size()

    def batches(self, batches: Sequence[dict[str, Any]], tokens: Any) -> None:
        """Compare the batches of a step, before the first goes into the model."""
        shapes = ", ".join("x".join(map(str, batch["input_ids"].shape)) for batch in batches)
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        self._compare(
            {"place": "its batches", "micro-batches": len(batches), "trained tokens of the step": _number(tokens)},
            f"{trained} trained tokens in batches of {shapes or 'nothing'}",
        )

    def micro_batch(self) -> None:
        """Compare the place, before a micro-batch goes into the model."""
        self._compare({"place": f"micro-batch {self.progress.passes} of {self.progress.batches}"})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the place, before the optimizer steps."""
        self._compare(
            {"place": f"the optimizer's step, after {self.progress.passes} of {self.progress.batches} micro-batches"}
        )

    def _compare(self, facts: dict[str, Any], note: str = "") -> None:
        told: list[Any] = [None] * self._count
        mine = ({"step": self.progress.place.step, **facts}, note)
        torch.distributed.all_gather_object(told, mine, group=self._group)
        check_agreement([facts for facts, _ in told], [note for _, note in told])


def _number(tokens: Any) -> int | None:
    return None if tokens is None else int(torch.as_tensor(tokens).sum())
