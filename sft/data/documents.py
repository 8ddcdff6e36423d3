"""Documents: what rows become, and where the rows and tokens went that became none.

Law 5 is kept here row by row: every token a row has is trained, masked, truncated, or dropped for a reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sft.data.findings import Findings

DOCUMENT = np.dtype(
    [
        ("length", "<i4"),
        ("trained", "<i4"),
        ("cut", "<i4"),  # tokens that overlong=truncate cut off
        ("lost", "<i4"),  # with overlong=split, tokens of the row's pieces without a trained one; on its first document
        ("source", "<i4"),
        ("row", "<i8"),  # number of the row in its source, from 1
        ("digest", "<u8"),  # of the row's tokens
        ("answer", "<u8"),  # of its trained tokens
    ]
)
LENGTHS = 2 ** np.arange(3, 33, 0.5)
"""Upper ends of the histogram's bins, in tokens."""


@dataclass
class Counts:
    """Where the rows and tokens went that became no document."""

    rows_in: int = 0
    tokens_in: int = 0
    """Of all rows that were tokenized."""

    dropped_rows: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(LENGTHS), np.int64))
    """Rows by length, dropped ones too; bins as in LENGTHS."""

    def drop(self, reason: str, tokens: int = 0) -> None:
        """Count a row that is not used."""
        self.dropped_rows[reason] += 1
        self.dropped_tokens[reason] += tokens

    def merge(self, other: Counts) -> None:
        """Add what was counted in later rows."""
        self.rows_in += other.rows_in
        self.tokens_in += other.tokens_in
        self.dropped_rows += other.dropped_rows
        self.dropped_tokens += other.dropped_tokens
        self.lengths += other.lengths


@dataclass
class Chunk:
    """What some rows of one source became."""

    tokens: np.ndarray
    """int32, all documents one after another."""

    trained: np.ndarray
    """uint8, 1 where a token is trained."""

    documents: np.ndarray
    """Of DOCUMENT, one for each document."""

    counts: Counts
    findings: Findings
    questions: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    """Two digests for each document: its questions, and its first question and answer; empty where no row is held out."""

    error: tuple[int, str] | None = None
    """The first row that stops the run, and why."""
