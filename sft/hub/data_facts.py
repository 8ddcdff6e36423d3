"""Holds how much data a recipe trains on; sft/data/facts.py estimates it, and preparing the data counts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFacts:
    """How much data one epoch holds: an estimate, or the count once the data is prepared."""

    documents: int
    tokens: int
    """Of all documents, prompts included, none longer than data.max_length."""

    trained_tokens: int
    """Target tokens."""

    sequences: int | None = None
    """Rows the trainer sees: packs with packing, else documents. None: as if every pack were full."""

    squared_lengths: float | None = None
    """The squares of the documents' lengths added up, for the work of attention; None: as if all were as long as the mean."""

    exact: bool = False
    """Counted on the prepared data, not estimated from the first rows."""
