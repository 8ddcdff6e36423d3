"""Is a difference more than chance? Tests and intervals for scores that two models got on the same documents.

docs/comparison.md has the formulas and how often each interval holds what it should, measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.special import bdtr, ndtr, ndtri

ALPHA = 0.05
Z = float(ndtri(1 - ALPHA / 2))
RESAMPLES = 9_999
"""With one more, 2.5 % of them are a whole number, so that p-value and interval agree to the last resample."""

FEWEST_DOCUMENTS = {"mcnemar": 10, "combined": 10, "paired bootstrap": 50, "independent": 50}
"""With fewer the intervals hold the truth less often than they say, where scores are skewed: docs/comparison.md."""

FEWEST_DIFFERING = 10
"""With fewer documents whose scores differ, many a resample has none of them, and the bootstrap says nothing of its error."""

_CHUNK = 4_000_000
"""Draws at a time: 32 MB."""


@dataclass(frozen=True)
class Evidence:
    """What the documents say of a difference. The interval leaves 0 out exactly where the p-value is at most 0.05."""

    test: str
    p_value: float
    stderr: float
    interval: tuple[float, float]
    too_few: bool = False
    """A sample in it has too few documents to be judged by itself."""


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided mid-p value of McNemar's test: were as many documents lost as gained, but for chance?

    Half the probability of what was seen counts, which keeps the error below 5 % without the exact test's loss of power.

    Args:
        gained: Documents that only the tuned model has right.
        lost: Documents that only the base model has right.

    >>> mcnemar(6, 0), mcnemar(3, 3)
    (0.015625, 1.0)
    """
    fewer, changed = min(gained, lost), gained + lost
    if gained == lost:
        return 1.0
    at_most = float(bdtr(fewer, changed, 0.5))
    less = float(bdtr(fewer - 1, changed, 0.5)) if fewer else 0.0
    return at_most + less


def _score_statistic(difference: float, gained: int, lost: int, documents: int) -> float:
    """How many standard errors the counts are from a true difference, at the likeliest rates that have it (Tango 1998)."""
    linear = -gained - lost + (2 * documents - gained + lost) * difference
    constant = -lost * difference * (1 - difference)
    rate = (sqrt(max(linear**2 - 8 * documents * constant, 0.0)) - linear) / (4 * documents)
    variance = documents * (2 * rate + difference * (1 - difference))
    distance = gained - lost - documents * difference
    if variance > 0:
        return distance / sqrt(variance)
    return 0.0 if distance == 0 else inf * distance


def score_interval(gained: int, lost: int, documents: int, z: float = Z) -> tuple[float, float]:
    """Tango's score interval for the difference of two paired proportions.

    Args:
        gained: Documents that only the tuned model has right.
        lost: Documents that only the base model has right.
        documents: All of them.
        z: How many standard errors it reaches.
    """
    centre = (gained - lost) / documents
    ends = []
    for inside, outside in ((centre, -1.0), (centre, 1.0)):
        for _ in range(60):
            middle = (inside + outside) / 2
            kept = abs(_score_statistic(middle, gained, lost, documents)) <= z
            inside, outside = (middle, outside) if kept else (inside, middle)
        ends.append(inside)
    return ends[0], ends[1]


def agreeing(low: float, high: float, p_value: float) -> tuple[float, float]:
    """The interval, stretched to 0 where the test finds nothing."""
    return (low, high) if p_value <= ALPHA else (min(low, 0.0), max(high, 0.0))


def _resampled(values: np.ndarray, resamples: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each resample of some documents' values, [resamples] each."""
    count = len(values)
    kinds, frequencies = np.unique(values, return_counts=True)
    few = len(kinds) <= count / 4
    means, squares = np.empty(resamples), np.empty(resamples)
    step = max(1, _CHUNK // (len(kinds) if few else count))
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        if few:
            drawn = generator.multinomial(count, frequencies / count, size=stop - start)
            means[start:stop], squares[start:stop] = drawn @ kinds / count, drawn @ kinds**2 / count
        else:
            drawn = values[generator.integers(0, count, (stop - start, count))]
            means[start:stop], squares[start:stop] = drawn.mean(axis=1), np.einsum("ij,ij->i", drawn, drawn) / count
    return means, np.maximum(squares - means**2, 0.0) * count / (count - 1)


def wide_interval(strata: Sequence[np.ndarray], weights: Sequence[float], z: float = Z) -> tuple[float, float]:
    """As if every document that differs did so by as much as the one that differs most: from their signs alone."""
    documents = sum(map(len, strata))
    shares = [values * weight * documents / len(values) for weight, values in zip(weights, strata, strict=True)]
    together = np.concatenate(shares)
    low, high = score_interval(int((together > 0).sum()), int((together < 0).sum()), documents, z)
    most = float(np.abs(together).max())
    return low * most, high * most


def studentized(
    strata: Sequence[np.ndarray], weights: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, np.ndarray]:
    """A weighted sum of means, its standard error, and how many standard errors each resample is from it, in order."""
    generator = np.random.default_rng(seed)
    # Centred: the variance is worked out from squares, which would lose digits beside a large mean.
    means = [float(values.mean()) for values in strata]
    parts = [
        _resampled(values - mean, resamples, generator) if np.ptp(values) > 0 else (np.zeros(resamples),) * 2
        for values, mean in zip(strata, means, strict=True)
    ]
    difference = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
    scales = [weight**2 / len(values) for weight, values in zip(weights, strata, strict=True)]
    stderr = sqrt(sum(scale * float(values.var(ddof=1)) for scale, values in zip(scales, strata, strict=True)))
    moved = sum(weight * mean for weight, (mean, _) in zip(weights, parts, strict=True))
    spread = np.sqrt(sum(scale * variance for scale, (_, variance) in zip(scales, parts, strict=True)))
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.sort(np.nan_to_num(moved / spread, nan=0.0, posinf=inf, neginf=-inf))
    return float(difference), stderr, distances


def bootstrap(
    strata: Sequence[np.ndarray], weights: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> Evidence:
    """Studentized paired bootstrap of a weighted mean of means.

    Args:
        strata: Differences tuned - base of the documents, an array for each task, two documents or more in each. Documents
            are drawn within their task.
        weights: Of the tasks' means; their sum is 1.
        resamples: How often documents are drawn; one less than a multiple of 40, for an exact 95 %.
        seed: Of the draws.
    """
    difference, stderr, distances = studentized(strata, weights, resamples, seed)
    distance = difference / stderr if stderr > 0 else inf * np.sign(difference) if difference else 0.0
    # Turning the signs of the documents that differ at random gives no less than this, however far the mean is from 0.
    differing = sum(int(np.count_nonzero(values)) for values in strata)
    p_value = min(1.0, max(_bootstrap_p_value(distances, distance), 2.0 ** (1 - differing)))
    if differing < FEWEST_DIFFERING:
        low, high = wide_interval(strata, weights)
        low, high = min(low, difference - Z * stderr), max(high, difference + Z * stderr)
    else:
        low, high = (difference - reach * stderr for reach in reaches(distances))
    return Evidence("paired bootstrap", p_value, stderr, agreeing(low, high, p_value))


def _bootstrap_p_value(distances: np.ndarray, distance: float) -> float:
    """The larger of two p-values: of being so far from 0 in either direction, and twice that of being so far in this one."""
    resamples, sizes = len(distances), np.sort(np.abs(distances))
    either = resamples - int(np.searchsorted(sizes, abs(distance)))
    above = resamples - int(np.searchsorted(distances, distance))
    below = int(np.searchsorted(distances, distance, side="right"))
    return max(1 + either, 2 * (1 + min(above, below))) / (resamples + 1)


def reaches(distances: np.ndarray, alpha: float = ALPHA) -> tuple[float, float]:
    """How many standard errors the interval reaches, down and up: each the wider of the symmetric and the equal-tailed one.

    Where few documents differ the equal-tailed one is too narrow, where scores are skewed the symmetric one.
    """

    def quantile(values: np.ndarray, share: float) -> float:
        return float(values[max(round(share * (len(values) + 1)) - 1, 0)])

    either = quantile(np.sort(np.abs(distances)), 1 - alpha)
    return max(quantile(distances, 1 - alpha / 2), either), min(quantile(distances, alpha / 2), -either)


def independent(difference: float, base_stderr: float, tuned_stderr: float) -> Evidence:
    """What two scores with their own standard errors say, of which nothing is known by document."""
    stderr = sqrt(base_stderr**2 + tuned_stderr**2)
    distance = abs(difference) / stderr if stderr > 0 else (inf if difference else 0.0)
    p_value = float(2 * ndtr(-distance))
    return Evidence("independent", p_value, stderr, (difference - Z * stderr, difference + Z * stderr))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of a family, adjusted so that even one false finding among all of them has at most 5 %.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    adjusted, most = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = most
    return adjusted
