"""Chooses which documents are trained, how often, and which are held out: a function of their contents and data.seed.

Works on whole rows: the pieces of a row that was split stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.errors import DataError
from sft.recipe.schema import Data, Source


@dataclass(frozen=True)
class Mixture:
    """What becomes of each document."""

    times: np.ndarray
    """How often each document is trained in one epoch."""

    held_out: np.ndarray
    """Whether each document is held out."""

    dropped: dict[str, np.ndarray]
    """Documents that are neither, by reason."""

    duplicate_rows: np.ndarray
    """The first document of each training row that equals an earlier one."""


def mix(documents: np.ndarray, sources: Sequence[Source], data: Data) -> Mixture:
    """Choose what becomes of each document; those of sources behind `sources` are held out.

    Raises DataError where a source has fewer rows than the recipe takes.
    """
    first = first_documents(documents)
    rows = documents[first]
    training = rows["source"] < len(sources)
    held_out = ~training
    if isinstance(data.held_out, float):
        held_out = held_out | (training & (_spread(rows["digest"], data.seed) < data.held_out))
    # Of equal rows to train on, the first stays.
    repeated = training & ~held_out
    candidates = np.flatnonzero(repeated)
    repeated[candidates[np.unique(rows["digest"][candidates], return_index=True)[1]]] = False
    reasons = {"held_out": training & ~held_out & np.isin(rows["digest"], rows["digest"][held_out])}
    if data.deduplicate:
        reasons["duplicate"] = repeated & ~reasons["held_out"]
    left = training & ~held_out
    for dropped in reasons.values():
        left &= ~dropped
    times = _times(rows["source"], left, sources, data.seed)
    reasons["not_drawn"] = left & (times == 0)
    counts = np.diff(np.append(first, len(documents)))
    return Mixture(
        np.repeat(times, counts),
        np.repeat(held_out, counts),
        {reason: np.repeat(which, counts) for reason, which in reasons.items()},
        first[repeated],
    )


def first_documents(documents: np.ndarray) -> np.ndarray:
    """The index of each row's first document: the pieces of a row that was split stand together."""
    if not len(documents):
        return np.zeros(0, np.int64)
    same = (documents["row"][1:] == documents["row"][:-1]) & (documents["source"][1:] == documents["source"][:-1])
    return np.flatnonzero(np.append(True, ~same))


def _spread(digests: np.ndarray, seed: int) -> np.ndarray:
    """A number in [0, 1) for each digest: the same for the same content, so that duplicates fall on one side."""
    with np.errstate(over="ignore"):  # multiplication modulo 2**64 is what mixes the bits (splitmix64)
        mixed = digests + np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed / 2.0**64


def _times(row_sources: np.ndarray, left: np.ndarray, sources: Sequence[Source], seed: int) -> np.ndarray:
    """How often each row is trained."""
    times = np.zeros(len(row_sources), np.int64)
    available = [np.flatnonzero(left & (row_sources == number)) for number in range(len(sources))]
    wanted = wanted_rows(sources, [len(rows) for rows in available])
    for number, (rows, count) in enumerate(zip(available, wanted, strict=True)):
        if not count and len(rows):
            raise DataError(
                f"data.train: no row of {sources[number].path} is used ({len(rows)} are usable). Remove the source, or give it more."
            )
        drawn = rows[np.random.default_rng([seed, number]).permutation(len(rows))]
        drawn = drawn[: sources[number].rows]
        passes, rest = divmod(count, len(drawn)) if len(drawn) else (0, 0)
        times[drawn] = passes
        times[drawn[:rest]] += 1
    return times


def wanted_rows(sources: Sequence[Source], available: list[int]) -> list[int]:
    """Rows that each source gives to one epoch, repetitions included.

    Raises DataError where a source has fewer rows than the recipe takes.
    """
    capacity = [round(count * source.epochs) for source, count in zip(sources, available, strict=True)]
    for number, source in enumerate(sources):
        if source.rows is not None:
            if source.rows > available[number]:
                raise DataError(
                    f"data.train: rows={source.rows} of {source.path}, which has {available[number]} usable rows. Take fewer, or leave "
                    f"`rows` out and repeat them with epochs: {source.rows / max(available[number], 1):.2f}."
                )
            capacity[number] = round(source.rows * source.epochs)
    weights = [source.weight for source in sources]
    if weights[0] is None:
        return capacity
    empty = [source.path for source, count in zip(sources, available, strict=True) if not count]
    if empty:
        raise DataError(
            f"data.train: {empty[0]} has a weight and no usable rows. Remove the source, or look at its rows with --show."
        )
    # As many rows as the scarcest source allows.
    per_weight = min(count / (weight or 1.0) for count, weight in zip(capacity, weights, strict=True))
    return [min(count, round(per_weight * (weight or 1.0))) for count, weight in zip(capacity, weights, strict=True)]
