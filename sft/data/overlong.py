"""What happens to a row that is longer than a document may be, as data.overlong says."""

from __future__ import annotations

import numpy as np

from sft.recipe.schema import Data

Piece = tuple[np.ndarray, np.ndarray]
"""Token ids and mask."""


class Overlong(Exception):
    """A row that is longer than the recipe allows."""


def pieces_of(ids: np.ndarray, mask: np.ndarray, data: Data) -> tuple[list[Piece], int, int, str | None]:
    """A row's documents, none longer than max_length.

    Args:
        ids: Token ids, length T.
        mask: 1 where a token is trained, length T.
        data: Says max_length and overlong.

    Returns:
        The documents, each with a trained token; how many tokens were cut off; how many are in pieces without a trained token;
        and where there are no documents, why.

    Raises:
        Overlong: The row is too long, and overlong is `error`.
    """
    length, limit = len(ids), data.max_length
    if not mask.any():
        return [], 0, 0, "no trained token"
    if length <= limit:
        return [(ids, mask)], 0, 0, None
    if data.overlong == "error":
        raise Overlong(f"{length} tokens, more than data.max_length={limit}")
    if data.overlong == "drop":
        return [], 0, 0, "longer than max_length"
    if data.overlong == "split":
        pieces = _split(ids, mask, limit)
        if not pieces:
            return [], 0, 0, "no trained token within max_length"
        return pieces, 0, length - sum(len(piece) for piece, _ in pieces), None
    if not mask[:limit].any():
        return [], 0, 0, "no trained token within max_length"
    return [(ids[:limit], mask[:limit])], length - limit, 0, None


def _split(ids: np.ndarray, mask: np.ndarray, limit: int) -> list[Piece]:
    pieces = []
    for start in range(0, len(ids), limit):
        piece, kept = ids[start : start + limit], mask[start : start + limit].copy()
        kept[0] = 0  # nothing in the piece predicts its first token
        if kept.any():
            pieces.append((piece, kept))
    return pieces
