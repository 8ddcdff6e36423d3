"""What each optimizer step holds: real tokens, labelled tokens, lengths of documents. Counted, not measured.

The order of the data follows from the recipe alone, so one rank can count for all of them: no collective, no wait for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from sft.data.store import DocumentStore, SequenceIndex
from sft.train.batches import StepOrder


@dataclass(frozen=True)
class Work:
    """What some optimizer steps hold, on all ranks. Padding and fillers are nothing."""

    lengths: np.ndarray
    """int64, tokens of each document."""

    labelled_tokens: int
    """Tokens whose loss is trained. A document's first token is none: nothing comes before it that could predict it."""

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())

    @property
    def squares(self) -> int:
        """Sum of the squares of the documents' lengths, which attention grows with."""
        return int(np.square(self.lengths).sum())


class StepWork:
    """Counts the work of optimizer steps, by their number in the run.

    Args:
        store: The documents.
        index: Which of them make up each sequence.
        order: Of the sequences; its epoch is not touched.
        per_step: Real sequences of an optimizer step. Fillers complete the last step of each epoch, and stand in empty places.
    """

    def __init__(self, store: DocumentStore, index: SequenceIndex, order: StepOrder, per_step: int) -> None:
        self.store, self.index, self.order, self.per_step = store, index, order, per_step
        self.steps_per_epoch = ceil(order.sequences / per_step)
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def between(self, first: int, last: int) -> Work:
        """The work of steps `first` up to, but not with, `last`; the first step of the run is 0."""
        parts = [np.zeros(0, np.int64)]
        while first < last:
            epoch, start = divmod(first, self.steps_per_epoch)
            end = min(last - epoch * self.steps_per_epoch, self.steps_per_epoch)
            steps = [
                step for step in range(start, end) if epoch * self.steps_per_epoch + step + 1 not in self.order.left_out
            ]
            sequences = self._sequences(epoch)
            parts += [sequences[step * self.per_step : (step + 1) * self.per_step] for step in steps]
            first = epoch * self.steps_per_epoch + end
        return self._work(np.concatenate(parts))

    def tokens_before(self, step: int) -> int:
        """Real tokens of all steps before this one, also over several epochs."""
        if self.order.left_out:
            return self.between(0, step).tokens
        epochs, rest = divmod(step, self.steps_per_epoch)
        of_one = int(self.store.documents["length"][self.index.members].sum(dtype=np.int64)) if epochs else 0
        return epochs * of_one + self.between(step - rest, step).tokens

    def _sequences(self, epoch: int) -> np.ndarray:
        """The real sequences in the order of an epoch; the fillers that follow them hold no work."""
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self.order.permutation(epoch)
        return self._permutation

    def _work(self, sequences: np.ndarray) -> Work:
        ends = self.index.ends[sequences]
        starts = np.where(sequences > 0, self.index.ends[sequences - 1], 0)
        counts = ends - starts
        # Each sequence's stretch of members, one after another.
        places = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        documents = self.index.members[places]
        records, first_tokens = self.store.documents[documents], self.store.starts[documents]
        labelled = records["trained"].sum(dtype=np.int64) - self.store.trained[first_tokens].sum(dtype=np.int64)
        return Work(np.asarray(records["length"], dtype=np.int64), int(labelled))
