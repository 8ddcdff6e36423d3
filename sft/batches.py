"""From documents to the sequences of a training step: packed, filled up to whole steps, in an order that ranks cannot change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets

from sft.data import IGNORED


def documents_dataset(file: Path) -> Dataset:
    """The documents that `prepare_documents` wrote, memory-mapped: `input_ids` and `labels`."""
    return Dataset.from_file(str(file))


def pack_documents(documents: Dataset, max_length: int, file: Path) -> Dataset:
    """Put documents into packs by best-fit decreasing, all at once.

    Args:
        documents: `input_ids` and `labels`, none longer than max_length.
        max_length: Tokens in a pack at most.
        file: Where the packs go, as an Arrow stream.

    Returns:
        `input_ids`, `labels`, and `seq_lengths`: the documents' lengths in each pack, from which the collator restarts
        position ids.
    """
    from trl import pack_dataset

    # TRL packs each batch of 1,000 rows by itself unless told otherwise, which fills packs less.
    options = {"batch_size": len(documents), "load_from_cache_file": False, "cache_file_name": str(file)}
    return pack_dataset(documents, max_length, "bfd", options)


def fill_last_step(sequences: Dataset, per_step: int, pad_token_id: int) -> tuple[Dataset, int]:
    """Add sequences of one untrained token until there are whole steps.

    The last step of an epoch would otherwise hold fewer sequences, shared unevenly by the ranks, and its loss would depend
    on their number. An untrained token adds nothing to the loss nor to what it is divided by.

    Returns:
        The sequences with the fillers at the end, and how many fillers there are.
    """
    missing = -len(sequences) % per_step
    if not missing:
        return sequences, 0
    row: dict[str, Any] = {"input_ids": [pad_token_id], "labels": [IGNORED]}
    if "seq_lengths" in sequences.column_names:
        row["seq_lengths"] = [1]
    fillers = Dataset.from_list([row] * missing, features=sequences.features)
    return concatenate_datasets([sequences, fillers]), missing


class StepOrder(torch.utils.data.Sampler[int]):
    """The order of the sequences: a permutation by seed and epoch, fillers last.

    Every `per_step` entries are one optimizer step. The trainer deals them out to ranks and micro-batches, which changes
    who computes what but never what a step holds.

    Args:
        sequences: Real sequences.
        fillers: Sequences behind them that only complete the last step.
        seed: The recipe's.
    """

    def __init__(self, sequences: int, fillers: int, seed: int) -> None:
        self.sequences, self.fillers, self.seed = sequences, fillers, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; the trainer calls this before each pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.sequences + self.fillers

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.sequences)
        yield from order.tolist()
        yield from range(self.sequences, len(self))
