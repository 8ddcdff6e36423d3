"""Which rows a step is made of, and which of them a rank was given: what a fault in the numbers is looked for in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sft.train.batches import Sequences, StepOrder

_TOKENS_SHOWN = 64


class StepRows:
    """The documents of a step as the prepared data knows them.

    Args:
        sequences: What the trainer sees.
        order: Their order.
        sources: Path of each source, in the recipe's order.
        tokenizer: Decodes what is shown of them.
    """

    def __init__(self, sequences: Sequences, order: StepOrder, sources: Sequence[str], tokenizer: Any) -> None:
        self.sequences, self.order, self.sources, self.tokenizer = sequences, order, sources, tokenizer

    def of_step(self, step: int) -> list[int]:
        """Documents of an optimizer step, counted from 1."""
        epoch, place = self.order.place_of(step)
        start = place * self.order.per_step
        numbers = self.order.permutation(epoch)[start : start + self.order.per_step]
        return [int(document) for number in numbers for document in self.sequences.index.of(number)]

    def told(self, documents: Sequence[int]) -> list[dict[str, Any]]:
        """Where each stands in its source, and how it begins."""
        store = self.sequences.store
        rows = []
        for document in documents:
            record, (ids, trained) = store.documents[document], store.document(document)
            source = int(record["source"])
            rows.append(
                {
                    "source": self.sources[source] if source < len(self.sources) else source,
                    "row": int(record["row"]),
                    "tokens": len(ids),
                    "trained_tokens": int(trained.sum()),
                    "begins": self.tokenizer.decode(ids[:_TOKENS_SHOWN].tolist()),
                }
            )
        return rows

    def given(self, batch: dict[str, Any], step: int) -> list[int]:
        """Documents of a step that a micro-batch holds, by its token ids; a rank with a part of each sequence finds none."""
        held = set(documents_in(batch))
        of_step = self.of_step(step)
        return [one for one in of_step if tuple(self.sequences.store.document(one)[0].tolist()) in held]


def documents_in(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """Token ids of each document of a collated batch."""
    ids = batch["input_ids"].cpu().numpy()
    if "cu_seq_lens_q" in batch:
        pieces = np.split(ids[0], batch["cu_seq_lens_q"].cpu().numpy()[1:-1])
    elif "attention_mask" in batch:
        pieces = [row[real] for row, real in zip(ids, batch["attention_mask"].cpu().numpy().astype(bool), strict=True)]
    else:
        return []
    return [tuple(piece.tolist()) for piece in pieces]


def finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss as it is where it is finite; else NaN, and so are its gradients.

    An infinite loss can have finite gradients: those of a token that the model gives no chance at all. This way the norm of the
    gradients, which every engine takes, tells of both, on all ranks, and nothing is read from the device for it.
    """
    return loss * (loss.detach() * 0 + 1)
