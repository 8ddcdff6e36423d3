"""Fingerprints of the batches: what the ranks were really given, in one number a line of metrics.jsonl.

Each document of a batch has a hash, over its token ids, what is trained of it, and the place of each token. A fingerprint is the sum
of the documents' hashes modulo 2**64: it does not matter who was given which document, in which micro-batch, packed or padded; and
the sum of two lines is the fingerprint of the steps of both. Padding and fillers are no documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sft.data.formats import IGNORED

KEY = "fingerprint"
"""Of a batch on its way from the collator to the trainer."""

_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Each value spread over 64 bits (the last part of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def batch_hash(batch: dict[str, Any]) -> int:
    """The sum of the hashes of a batch's documents, modulo 2**64.

    Args:
        batch: As the collator makes it: `input_ids` and `labels`, with `position_ids` and `cu_seq_lens_q` of packed documents or
            the `attention_mask` of padded ones.
    """
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    if "cu_seq_lens_q" in batch:
        ids, labels, places = ids[0], labels[0], batch["position_ids"][0].numpy()
        lengths = batch["cu_seq_lens_q"].diff().numpy()
    else:
        real = batch["attention_mask"].numpy().astype(bool)
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)[real]
        ids, labels, lengths = ids[real], labels[real], real.sum(1)
    # A document's first token has no loss, whatever its label.
    labels = np.where(places == 0, IGNORED, labels) - IGNORED
    tokens = ids.astype(np.uint64) | labels.astype(np.uint64) << np.uint64(32)
    starts = np.cumsum(lengths) - lengths
    sums = np.add.reduceat(_mixed(tokens + places.astype(np.uint64) * _GOLDEN), starts)
    documents = _mixed(sums + lengths.astype(np.uint64))
    # Of one token are fillers, and padding behind packed documents; nothing is trained on such a document.
    return int(documents[lengths > 1].sum(dtype=np.uint64))


class Fingerprinted:
    """A collator whose batches carry their hash.

    Args:
        collator: Makes the batch.
        counts: Whether this rank counts: of the ranks that share a batch, one.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], counts: bool) -> None:
        self.collator, self.counts = collator, counts

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch, and under KEY its hash."""
        batch = self.collator(rows)
        return batch | {KEY: batch_hash(batch) if self.counts else 0}


class Fingerprint:
    """Adds up the hashes of the batches that this rank trains on, and over the ranks when a line is written."""

    def __init__(self) -> None:
        self.line: str | None = None
        """Of the steps since the line before, over all ranks, 16 hexadecimal digits."""
        self._sum: int | None = None

    def add(self, batches: Sequence[dict[str, Any]]) -> None:
        """Take the hashes off the batches of a step, which the model would not know what to do with."""
        self._sum = ((self._sum or 0) + sum(batch.pop(KEY) for batch in batches)) % 2**64

    def gather(self, accelerator: Any) -> None:
        """Make the line; every rank takes part."""
        if self._sum is None:
            return
        # In halves: 64 bits of several ranks would overflow.
        halves = torch.tensor([self._sum & 0xFFFFFFFF, self._sum >> 32], device=accelerator.device)
        low, high = accelerator.reduce(halves, reduction="sum").tolist()
        self.line, self._sum = f"{(low + (high << 32)) % 2**64:016x}", None
