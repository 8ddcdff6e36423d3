"""What happens to a row that is longer than a document may be, as data.overlong says."""

from __future__ import annotations

import numpy as np

from sft.documents import Counts
from sft.recipe import Data

Piece = tuple[np.ndarray, np.ndarray]
"""Token ids and mask."""


class Overlong(Exception):
    """A row that is longer than the recipe allows."""


def pieces_of(ids: np.ndarray, mask: np.ndarray, data: Data, counts: Counts) -> tuple[list[Piece], int]:
    """A row's documents, none longer than max_length.

    Args:
        ids: Token ids, length T.
        mask: 1 where a token is trained, length T.
        data: Says max_length and overlong.
        counts: What is dropped is counted here.

    Returns:
        The documents, each with a trained token, and how many tokens were cut off.

    Raises:
        Overlong: The row is too long, and overlong is `error`.
    """
    length, limit = len(ids), data.max_length
    if not mask.any():
        counts.drop("no trained token", length)
        return [], 0
    if length <= limit:
        return [(ids, mask)], 0
    if data.overlong == "error":
        raise Overlong(f"{length} tokens, more than data.max_length={limit}")
    if data.overlong == "drop":
        counts.drop("longer than max_length", length)
        return [], 0
    if data.overlong == "split":
        return _split(ids, mask, limit, counts), 0
    if not mask[:limit].any():
        counts.drop("no trained token within max_length", length)
        return [], 0
    return [(ids[:limit], mask[:limit])], length - limit


def _split(ids: np.ndarray, mask: np.ndarray, limit: int, counts: Counts) -> list[Piece]:
    pieces = []
    for start in range(0, len(ids), limit):
        piece, kept = ids[start : start + limit], mask[start : start + limit].copy()
        kept[0] = 0  # nothing in the piece predicts its first token
        if kept.any():
            pieces.append((piece, kept))
        else:
            counts.drop("piece without a trained token", len(piece), rows=0)
    if not pieces:
        counts.drop("no trained token within max_length")
    return pieces
