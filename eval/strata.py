"""A weighted mean over several samples: the mean over tasks, or of a group that counts each task alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from eval.statistics import (
    FEWEST_DIFFERING,
    FEWEST_DOCUMENTS,
    Evidence,
    Z,
    agreeing,
    bootstrap,
    mcnemar,
    reaches,
    score_interval,
    studentized,
    wide_interval,
)

FARTHEST = 30.0
"""Standard errors; its p-value is 1e-197."""

Samples = Sequence[tuple[np.ndarray, float]]
"""Differences of the documents, and the weight of their mean."""

Limits = Callable[[float], tuple[float, float]]
"""How far a part of the mean may lie below and above what was measured, by the number of standard errors."""


def right_or_wrong(differences: np.ndarray) -> bool:
    """Whether each document has 0 or 1 from both models."""
    return bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())


def paired(samples: Samples) -> Evidence:
    """What paired differences say.

    Args:
        samples: Differences tuned - base of the documents, and the weight of their mean; the weights' sum is 1.

    Returns:
        McNemar's test and Tango's interval for one sample of right and wrong; the bootstrap for other scores; what the samples
        say together where some are right and wrong, or hardly vary.
    """
    values = samples[0][0]
    if len(samples) > 1 or not right_or_wrong(values):
        return _together(samples)
    gained, lost = int((values > 0).sum()), int((values < 0).sum())
    p_value = mcnemar(gained, lost)
    interval = agreeing(*score_interval(gained, lost, len(values)), p_value)
    return Evidence("mcnemar", p_value, float(values.std(ddof=1)) / sqrt(len(values)), interval)


def _hardly_varies(values: np.ndarray) -> bool:
    """Whether a bootstrap would find next to no error in it, because few documents differ from all others."""
    return len(values) - int(np.unique(values, return_counts=True)[1].max()) < FEWEST_DIFFERING


def _by_signs(values: np.ndarray, weight: float) -> Limits:
    """Tango's interval of one sample."""
    mean = float(values.mean())
    stderr = float(values.std(ddof=1)) / sqrt(len(values))

    def limits(z: float) -> tuple[float, float]:
        if right_or_wrong(values):
            low, high = score_interval(int((values > 0).sum()), int((values < 0).sum()), len(values), z)
        else:
            low, high = wide_interval([values], [1.0], z)
            low, high = min(low, mean - z * stderr), max(high, mean + z * stderr)
        return weight * (mean - low), weight * (high - mean)

    return limits


def _together(samples: Samples) -> Evidence:
    """The limits of a sum from those of its parts: MOVER, Zou and Donner (2008).

    A bootstrap of right and wrong finds no error in a sample that is unanimous. The score interval does, so such samples bring
    theirs; all others are drawn anew together.
    """
    alone = [right_or_wrong(values) or _hardly_varies(values) for values, _ in samples]
    if any(alone):
        limits = [_by_signs(*sample) for sample, single in zip(samples, alone, strict=True) if single]
        if not all(alone):
            limits.append(_by_resamples([sample for sample, single in zip(samples, alone, strict=True) if not single]))
        evidence = _combined(samples, limits)
    else:
        evidence = bootstrap([values for values, _ in samples], [weight for _, weight in samples])
    return replace(evidence, too_few=any(map(_too_few, samples)))


def _too_few(sample: tuple[np.ndarray, float]) -> bool:
    values, _ = sample
    return len(values) < FEWEST_DOCUMENTS["mcnemar" if right_or_wrong(values) else "paired bootstrap"]


def _by_resamples(samples: Samples) -> Limits:
    """The bootstrap's limits of several samples, drawn together."""
    _, stderr, distances = studentized([values for values, _ in samples], [weight for _, weight in samples])
    most = float(-ndtri(1 / len(distances)))  # the last resample: beyond it they reach as a normal distribution does

    def limits(z: float) -> tuple[float, float]:
        up, down = reaches(distances, float(2 * ndtr(-min(z, most))))
        further = max(z / most, 1.0) * stderr
        return up * further, -down * further

    return limits


def _combined(samples: Samples, limits: Sequence[Limits]) -> Evidence:
    """The p-value is 1 - the confidence of the interval that ends at 0."""
    difference = sum(weight * float(values.mean()) for values, weight in samples)
    variance = sum(weight**2 * float(values.var(ddof=1)) / len(values) for values, weight in samples)

    def reach(z: float) -> tuple[float, float]:
        found = np.array([part(z) for part in limits])
        below, above = np.sqrt((found**2).sum(axis=0))
        return float(below), float(above)

    def left(z: float) -> float:
        return abs(difference) - reach(z)[0 if difference > 0 else 1]

    z = 0.0 if left(0.0) <= 0 else FARTHEST if left(FARTHEST) > 0 else float(brentq(left, 0.0, FARTHEST, xtol=1e-6))
    differing = sum(int(np.count_nonzero(values)) for values, _ in samples)
    p_value = min(1.0, max(float(2 * ndtr(-z)), 2.0 ** (1 - differing)))
    below, above = reach(Z)
    return Evidence("combined", p_value, sqrt(variance), agreeing(difference - below, difference + above, p_value))
