"""Decides which documents share a sequence: best-fit decreasing over all of them at once."""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents with best-fit decreasing: the longest that is left goes where the least space stays free.

    `lengths` are 1 to `capacity` tokens. Returns the documents' indices, sequence by sequence, and for each sequence the end of its
    stretch of them. TRL packs each 1,000 documents by themselves, which fills less.

    >>> pack(np.array([3, 5, 2, 4]), 6)
    (array([1, 3, 2, 0]), array([1, 3, 4]))
    """
    longest_first = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), np.int64)
    open_sequences: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the space that is left
    spaces = 0  # bit n is set where a sequence has n tokens free: the least space that fits is one shift away
    count = 0
    for index, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            sequence = open_sequences[space].pop()
            if not open_sequences[space]:
                spaces ^= 1 << space
        else:
            space, sequence = capacity, count
            count += 1
        sequence_of[index] = sequence
        left = space - length
        if left:
            open_sequences[left].append(sequence)
            spaces |= 1 << left
    # Longest first within a sequence too, as they were put there.
    members = longest_first[np.argsort(sequence_of[longest_first], kind="stable")]
    return members, np.cumsum(np.bincount(sequence_of, minlength=count))
