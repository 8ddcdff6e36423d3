"""What an optimizer step is made of: sequences, their order, how many tokens each step holds, and fingerprints of the batches.

The order follows from the recipe alone, so one rank can count for all of them: no collective, no wait for the device. What the ranks
were really given is in the fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
import torch

from sft.data.formats import IGNORED
from sft.data.store import DocumentStore, SequenceIndex


class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """The dataset that the trainer sees: packs or single documents, followed by dummy sequences.

    Without dummies the last step of an epoch would hold fewer sequences, divided unevenly between ranks, and its loss would depend on
    the number of ranks. A dummy is one untrained token: it adds nothing to the loss or to its divisor.

    Args:
        store: The documents.
        index: Which of them make up each sequence.
        per_step: Real sequences per optimizer step.
        pad_token_id: What dummies are made of.
        packed: Whether a sequence holds several documents, whose lengths the collator needs.
        empty: Further slots in each step, where the sequences of a step do not divide evenly between the ranks.
    """

    def __init__(
        self, store: DocumentStore, index: SequenceIndex, per_step: int, pad_token_id: int, packed: bool, empty: int = 0
    ) -> None:
        self.store, self.index, self.pad_token_id, self.packed = store, index, pad_token_id, packed
        self.per_step, self.empty = per_step, empty
        self.dummies = -len(index) % per_step + empty * ceil(len(index) / per_step)

    def __len__(self) -> int:
        return len(self.index) + self.dummies

    def order(self, seed: int) -> StepOrder:
        """The order in which the steps of a run take them."""
        return StepOrder(len(self.index), self.dummies, seed, self.per_step, self.empty)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """`input_ids` and `labels`, int64 of equal length, and `seq_lengths` where packed: position ids restart from them."""
        if number >= len(self.index):
            ids, labels, lengths = np.array([self.pad_token_id]), np.array([IGNORED]), [1]
        else:
            documents = [self.store.document(document) for document in self.index.of(number)]
            ids = np.concatenate([tokens for tokens, _ in documents]).astype(np.int64)
            loss_mask = np.concatenate([mask for _, mask in documents])
            labels = np.where(loss_mask == 1, ids, IGNORED)
            lengths = [len(tokens) for tokens, _ in documents]
        return {"input_ids": ids, "labels": labels} | ({"seq_lengths": lengths} if self.packed else {})


class StepOrder(torch.utils.data.Sampler[int]):
    """The order of the sequences: a permutation by seed and epoch, cut into steps, with the dummies at the end of a step.

    Each `per_step` sequences and the `empty` slots behind them are one optimizer step. The trainer deals them out to ranks and
    micro-batches. That decides who computes what, but never which sequences a step holds.

    Args:
        sequences: Number of real sequences.
        dummies: As counted by Sequences.
        seed: The recipe's.
        per_step: Real sequences per step.
        empty: Slots of each step that dummies take.
    """

    def __init__(self, sequences: int, dummies: int, seed: int, per_step: int, empty: int = 0) -> None:
        self.sequences, self.dummies, self.seed = sequences, dummies, seed
        self.per_step, self.empty, self.epoch = per_step, empty, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the passes that begin after this call."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.sequences + self.dummies

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return ceil(self.sequences / self.per_step)

    def permutation(self, epoch: int) -> np.ndarray:
        """The real sequences in the order of an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.sequences)

    def sequences_of(self, step: int) -> np.ndarray:
        """The real sequences of an optimizer step, counted from 1 over the whole run."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        return self.permutation(epoch)[place * self.per_step : (place + 1) * self.per_step]

    def __iter__(self) -> Iterator[int]:
        order = self.permutation(self.epoch).tolist()
        dummies = iter(range(self.sequences, len(self)))
        # Dummies that complete the last step come behind everything, as without empty slots.
        full = self.sequences // self.per_step * self.per_step if self.empty else 0
        for start in range(0, full, self.per_step):
            yield from order[start : start + self.per_step]
            yield from islice(dummies, self.empty)
        yield from order[full:]
        yield from dummies


@dataclass(frozen=True)
class Work:
    """What some optimizer steps hold, on all ranks. Padding and dummies count as nothing."""

    lengths: np.ndarray
    """int64, tokens of each document."""

    target_tokens: int
    """Tokens with a loss. A document's first token has none: nothing comes before it that could predict it."""

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())


class StepWork:
    """Counts the work of optimizer steps by their number in the run.

    Args:
        sequences: The training's.
        order: Of the sequences; its epoch is not touched.
    """

    def __init__(self, sequences: Sequences, order: StepOrder) -> None:
        self.store, self.index, self.order = sequences.store, sequences.index, order
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def between(self, first: int, last: int) -> Work:
        """The work of the steps from `first` up to, but excluding, `last`; the first step of the run is 0."""
        per_epoch, per_step = self.order.steps_per_epoch, self.order.per_step
        parts = [np.zeros(0, np.int64)]
        while first < last:
            epoch, start = divmod(first, per_epoch)
            end = min(last - epoch * per_epoch, per_epoch)
            parts.append(self._permuted(epoch)[start * per_step : end * per_step])
            first = epoch * per_epoch + end
        return self._work(np.concatenate(parts))

    def tokens_before(self, step: int) -> int:
        """Real tokens of all steps before this one, over any number of epochs."""
        epochs, rest = divmod(step, self.order.steps_per_epoch)
        per_epoch = int(self.store.documents["length"][self.index.members].sum(dtype=np.int64)) if epochs else 0
        return epochs * per_epoch + self.between(step - rest, step).tokens

    def _permuted(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self.order.permutation(epoch)
        return self._permutation

    def _work(self, sequences: np.ndarray) -> Work:
        ends = self.index.ends[sequences]
        starts = np.where(sequences > 0, self.index.ends[sequences - 1], 0)
        counts = ends - starts
        # The members of each sequence, one sequence after another.
        places = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        documents = self.index.members[places]
        records, first_tokens = self.store.documents[documents], self.store.starts[documents]
        targets = records["trained"].sum(dtype=np.int64) - self.store.trained[first_tokens].sum(dtype=np.int64)
        return Work(np.asarray(records["length"], dtype=np.int64), int(targets))


# Fingerprints. Each document of a batch has a hash over its token ids, its loss mask, and the position of each token. A fingerprint is
# the sum of the documents' hashes modulo 2**64. It does not depend on which rank or micro-batch got a document, nor on packing, and the
# sum of two lines is the fingerprint of the steps of both. Padding and dummies do not count.

KEY = "fingerprint"
"""Name of a batch's hash on its way from the collator to the trainer."""

_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Each value spread over 64 bits (the last part of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def batch_hash(batch: dict[str, Any]) -> int:
    """Sum of the hashes of a batch's documents, modulo 2**64.

    Args:
        batch: From the collator: `input_ids` and `labels`, with `position_ids` and `cu_seq_lens_q` where packed, else `attention_mask`.
    """
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    if "cu_seq_lens_q" in batch:
        ids, labels, positions = ids[0], labels[0], batch["position_ids"][0].numpy()
        lengths = batch["cu_seq_lens_q"].diff().numpy()
    else:
        real = batch["attention_mask"].numpy().astype(bool)
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)[real]
        ids, labels, lengths = ids[real], labels[real], real.sum(1)
    # A document's first token has no loss, whatever its label.
    labels = np.where(positions == 0, IGNORED, labels) - IGNORED
    tokens = ids.astype(np.uint64) | labels.astype(np.uint64) << np.uint64(32)
    starts = np.cumsum(lengths) - lengths
    sums = np.add.reduceat(_mixed(tokens + positions.astype(np.uint64) * _GOLDEN), starts)
    documents = _mixed(sums + lengths.astype(np.uint64))
    # A length of 1 is a dummy, or padding behind packed documents; nothing is trained on either.
    return int(documents[lengths > 1].sum(dtype=np.uint64))


class Fingerprinted:
    """A collator whose batches carry their hash.

    Args:
        collator: Makes the batch.
        counts: Whether this rank counts: one of the ranks that share a batch does.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], counts: bool) -> None:
        self.collator, self.counts = collator, counts

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch, with its hash under KEY."""
        batch = self.collator(rows)
        return batch | {KEY: batch_hash(batch) if self.counts else 0}


class Fingerprint:
    """Adds up the hashes of the batches that this rank trains on, and sums them over the ranks for each logged line."""

    def __init__(self) -> None:
        self.line: str | None = None
        """Of the steps since the previous line, over all ranks: 16 hexadecimal digits."""
        self._sum: int | None = None

    def add(self, batches: Sequence[dict[str, Any]]) -> None:
        """Remove the hashes from the batches of a step, which the model does not take, and add them up."""
        self._sum = ((self._sum or 0) + sum(batch.pop(KEY) for batch in batches)) % 2**64

    def gather(self, accelerator: Any) -> None:
        """Make the line; every rank takes part."""
        if self._sum is None:
            return
        # In halves: the sum of several ranks' 64 bits would overflow.
        halves = torch.tensor([self._sum & 0xFFFFFFFF, self._sum >> 32], device=accelerator.device)
        low, high = accelerator.reduce(halves, reduction="sum").tolist()
        self.line, self._sum = f"{(low + (high << 32)) % 2**64:016x}", None
