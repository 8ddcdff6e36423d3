"""From prepared documents to the sequences of a training step: filled up to whole steps, in an order that ranks cannot change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
import torch

from sft.data.formats import IGNORED
from sft.data.store import DocumentStore, SequenceIndex


class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """What the trainer sees: packs, or single documents, and fillers behind them.

    The last step of an epoch would otherwise hold fewer sequences, shared unevenly by the ranks, and its loss would depend
    on their number. A filler is one untrained token: it adds nothing to the loss nor to what it is divided by.

    Args:
        store: The documents.
        index: Which of them make up each sequence.
        per_step: Sequences of an optimizer step.
        pad_token_id: What fillers are made of.
        packed: Whether sequences hold several documents, whose lengths the collator needs.
        empty: Places that each step has besides, where the ranks cannot share its sequences evenly.
    """

    def __init__(
        self,
        store: DocumentStore,
        index: SequenceIndex,
        per_step: int,
        pad_token_id: int,
        packed: bool,
        empty: int = 0,
    ) -> None:
        self.store, self.index, self.pad_token_id, self.packed = store, index, pad_token_id, packed
        self.fillers = -len(index) % per_step + empty * ceil(len(index) / per_step)

    def __len__(self) -> int:
        return len(self.index) + self.fillers

    def __getitem__(self, number: int) -> dict[str, Any]:
        """`input_ids` and `labels`, int64 of one length, and packed `seq_lengths`: from them position ids restart."""
        if number >= len(self.index):
            ids, labels, lengths = np.array([self.pad_token_id]), np.array([IGNORED]), [1]
        else:
            documents = [self.store.document(document) for document in self.index.of(number)]
            ids = np.concatenate([tokens for tokens, _ in documents]).astype(np.int64)
            trained = np.concatenate([mask for _, mask in documents])
            labels = np.where(trained == 1, ids, IGNORED)
            lengths = [len(tokens) for tokens, _ in documents]
        return {"input_ids": ids, "labels": labels} | ({"seq_lengths": lengths} if self.packed else {})


class StepOrder(torch.utils.data.Sampler[int]):
    """The order of the sequences: a permutation by seed and epoch, cut into steps, and fillers at the end of a step.

    Every `per_step` sequences and the empty places behind them are one optimizer step. The trainer deals them out to ranks and
    micro-batches, which changes who computes what but never which sequences a step holds.

    Args:
        sequences: Real sequences.
        fillers: As Sequences counts them: those that complete the last step, and those of the empty places.
        seed: The recipe's.
        per_step: Real sequences of a step; of no matter where no step has empty places.
        empty: Places of each step that fillers take.

    Attributes:
        left_out: Steps of the run, counted from 1, that hold nothing but fillers.
    """

    def __init__(self, sequences: int, fillers: int, seed: int, per_step: int = 1, empty: int = 0) -> None:
        self.sequences, self.fillers, self.seed = sequences, fillers, seed
        self.per_step, self.empty = per_step, empty
        self.epoch, self.left_out = 0, frozenset[int]()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the passes that begin after this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.sequences + self.fillers

    def permutation(self, epoch: int) -> np.ndarray:
        """The real sequences, in the order of an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.sequences)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return ceil(self.sequences / self.per_step)

    def place_of(self, step: int) -> tuple[int, int]:
        """Epoch of a step of the run, counted from 1, and its number there, counted from 0."""
        return divmod(step - 1, self.steps_per_epoch)

    def __iter__(self) -> Iterator[int]:
        order = self.permutation(self.epoch).tolist()
        for epoch, place in map(self.place_of, self.left_out):
            if epoch == self.epoch:
                mine = slice(place * self.per_step, (place + 1) * self.per_step)
                order[mine] = [self.sequences] * len(order[mine])  # any number behind the real ones
        fillers = iter(range(self.sequences, len(self)))
        # The last step's, whole or not, come behind everything.
        whole = self.sequences // self.per_step * self.per_step if self.empty else 0
        for start in range(0, whole, self.per_step):
            yield from order[start : start + self.per_step]
            yield from islice(fillers, self.empty)
        yield from order[whole:]
        yield from fillers
