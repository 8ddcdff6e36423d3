"""What an optimizer step is made of: sequences, their order by the recipe alone, and an account of the tensors that a rank really gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
import torch

from sft.data.formats import IGNORED
from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.hub.flops import ModelFlops
from sft.parallel import process_group as distributed
from sft.plan.job import Job

NUMBER, CONTENTS = "number", "contents"
"""Keys of a sequence's number on its way to the collator, and of a batch's Contents on its way to the trainer."""

_DUMMY = -1


class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """The dataset that the trainer sees: packs or single documents, followed by dummy sequences.

    Without dummies the last step of an epoch would hold fewer sequences, divided unevenly between ranks, and its loss would depend on
    the number of ranks. A dummy is one untrained token: it adds nothing to the loss or to its divisor.

    `per_step` are real sequences; `empty` are further slots of each step, where they do not divide evenly between the ranks.
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
            number, ids, labels, lengths = _DUMMY, np.array([self.pad_token_id]), np.array([IGNORED]), [1]
        else:
            documents = [self.store.document(document) for document in self.index.of(number)]
            ids = np.concatenate([tokens for tokens, _ in documents]).astype(np.int64)
            loss_mask = np.concatenate([mask for _, mask in documents])
            labels = np.where(loss_mask == 1, ids, IGNORED)
            lengths = [len(tokens) for tokens, _ in documents]
        row = {NUMBER: number, "input_ids": ids, "labels": labels}
        return row | ({"seq_lengths": lengths} if self.packed else {})


def training_sequences(job: Job, prepared: Prepared, tokenizer: Any) -> Sequences:
    """What the trainer sees of the prepared data."""
    recipe, folder = job.recipe, prepared.folder
    store, index = DocumentStore.open(folder), SequenceIndex.load(folder / "train.npz")
    empty = job.plan.empty_sequences_per_step.value
    return Sequences(store, index, recipe.sequences_per_step, tokenizer.pad_token_id, recipe.data.packing, empty)


class StepOrder(torch.utils.data.Sampler[int]):
    """The order of the sequences: a permutation by seed and epoch, cut into steps, with the dummies at the end of a step.

    Each `per_step` sequences and the `empty` slots behind them are one optimizer step. The trainer deals them out to ranks and
    micro-batches. That decides who computes what, but never which sequences a step holds.
    """

    def __init__(self, sequences: int, dummies: int, seed: int, per_step: int, empty: int = 0) -> None:
        self.sequences, self.dummies, self.seed = sequences, dummies, seed
        self.per_step, self.empty, self.epoch = per_step, empty, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the passes that begin after this call."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.sequences + self.dummies

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.sequences).tolist()
        dummies = iter(range(self.sequences, len(self)))
        # Dummies that complete the last step come behind everything, as without empty slots.
        full = self.sequences // self.per_step * self.per_step if self.empty else 0
        for start in range(0, full, self.per_step):
            yield from order[start : start + self.per_step]
            yield from islice(dummies, self.empty)
        yield from order[full:]
        yield from dummies


@dataclass(frozen=True)
class Contents:
    """What a micro-batch holds. Padding and dummies count as nothing."""

    sequences: tuple[int, ...]
    """Their numbers in the dataset."""

    lengths: np.ndarray
    """int64, tokens of each document."""

    target_tokens: int
    """Tokens with a loss. A document's first token has none: nothing comes before it that could predict it."""

    fingerprint: int
    """Sum of the documents' hashes modulo 2**64: of token ids, loss mask and positions, whatever the rank, micro-batch and pack."""


def contents_of(batch: dict[str, Any], sequences: tuple[int, ...] = ()) -> Contents:
    """Take the account of a batch from the collator, which holds the sequences of these numbers."""
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
    hashes = _mixed(tokens + positions.astype(np.uint64) * _GOLDEN)
    documents = _mixed(np.add.reduceat(hashes, np.cumsum(lengths) - lengths) + lengths.astype(np.uint64))
    # A length of 1 is a dummy, or padding behind packed documents; nothing is trained on either.
    real = lengths > 1
    fingerprint = int(documents[real].sum(dtype=np.uint64))
    return Contents(sequences, lengths[real].astype(np.int64), int(np.count_nonzero(labels)), fingerprint)


_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Each value spread over 64 bits (the last part of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


class Accounted:
    """A collator whose batches carry their Contents.

    Args:
        collator: Makes the batch.
        counts: Whether this rank counts: one of the ranks that share a batch does.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]], counts: bool) -> None:
        self.collator, self.counts = collator, counts

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch, with its Contents under CONTENTS."""
        batch = self.collator(rows)
        sequences = tuple(row[NUMBER] for row in rows if row[NUMBER] != _DUMMY)
        nothing = Contents(sequences, np.zeros(0, np.int64), 0, 0)
        return batch | {CONTENTS: contents_of(batch, sequences) if self.counts else nothing}


@dataclass(frozen=True)
class Work:
    """What the steps of a logged line held, over all ranks."""

    tokens: int
    target_tokens: int
    flops: float | None
    """None where they are not known for the model."""

    fingerprint: str
    """16 hexadecimal digits."""

    peaks: tuple[float, ...]
    """The highest of any rank, of the figures that each has brought."""


def add_ranks(of_ranks: Sequence[tuple[int, int, int, float | None, tuple[float, ...]]]) -> Work:
    """The work of all ranks, from each one's fingerprint, tokens, target tokens, FLOPs and peaks."""
    fingerprints, tokens, targets, flops, peaks = zip(*of_ranks, strict=True)
    total = None if None in flops else sum(flops)
    highest = tuple(map(max, zip(*peaks, strict=True)))
    return Work(sum(tokens), sum(targets), total, f"{sum(fingerprints) % 2**64:016x}", highest)


class WorkSum:
    """Adds up what this rank trains on, and sums it over the ranks for each logged line."""

    def __init__(self, flops: ModelFlops | None = None) -> None:
        self.flops = flops
        self.line: Work | None = None
        """Of the steps since the previous line."""
        self._contents: list[Contents] = []

    def add(self, contents: Sequence[Contents]) -> None:
        """Count the micro-batches of a step."""
        self._contents += contents

    def gather(self, *peaks: float) -> Work | None:
        """Make the line; every rank takes part. None where there was no step."""
        if not self._contents:
            return None
        mine, self._contents = self._contents, []
        fingerprint = sum(one.fingerprint for one in mine)
        tokens, targets = sum(int(one.lengths.sum()) for one in mine), sum(one.target_tokens for one in mine)
        flops = sum(self.flops.of(one.lengths, one.target_tokens) for one in mine) if self.flops else None
        self.line = add_ranks(distributed.gather((fingerprint, tokens, targets, flops, peaks)))
        return self.line
