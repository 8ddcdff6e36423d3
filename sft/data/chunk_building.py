"""The parts of a chunk of documents in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sft.data.documents import DOCUMENT, Chunk, Counts
from sft.data.findings import Findings


@dataclass(frozen=True)
class Encodable:
    """A row ready for the tokenizer."""

    row: int
    text: str
    spans: list[tuple[int, int]]
    """Characters whose tokens are trained."""

    special: bool
    """Whether the tokenizer adds its own special tokens, such as BOS."""

    mark: str | None = None
    """The character that keeps strings from becoming special tokens; its own tokens are taken out."""

    opening: str = ""
    """The messages up to the first answer, of a conversation where rows are held out."""


@dataclass(frozen=True)
class Given:
    """A row that came tokenized."""

    row: int
    ids: np.ndarray
    mask: np.ndarray


@dataclass
class Building:
    """A chunk in the making."""

    source: int
    counts: Counts
    findings: Findings
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    records: list[tuple[int, ...]] = field(default_factory=list)

    questions: list[tuple[int, int]] = field(default_factory=list)

    def drop(self, reason: str, row: int, tokens: int = 0) -> None:
        """Count a row that is not used, and tell which."""
        self.counts.drop(reason, tokens)
        self.findings.add(reason, self.source, row)

    def done(self, error: tuple[int, str] | None) -> Chunk:
        """The chunk; with an error, as far as it came."""
        tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in self.parts)])
        trained = np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in self.parts)])
        questions = np.array(self.questions, np.uint64).reshape(-1, 2)
        return Chunk(tokens, trained, np.array(self.records, DOCUMENT), self.counts, self.findings, questions, error)


class Stop(Exception):
    """A row at which the run stops."""

    def __init__(self, row: int, reason: str) -> None:
        self.row, self.reason = row, reason
