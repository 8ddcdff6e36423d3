"""Tests whether a difference is more than chance: tests and confidence intervals for two models' scores on the same documents.

docs/comparison.md has the formulas and the measured coverage of each interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

ALPHA = 0.05

FEWEST_BOUNDED, FEWEST = 10, 50
"""Documents that a verdict needs: for scores between 0 and 1, and for all others. With fewer, coverage is below 95%."""


@dataclass(frozen=True)
class Evidence:
    """Test and confidence interval of a difference. The interval excludes 0 exactly where the p-value is at most 0.05."""

    test: str
    p_value: float
    stderr: float
    interval: tuple[float, float]
    too_few: bool = False
    """Whether there are too few documents for a verdict."""


@dataclass(frozen=True)
class Sample:
    """Independent units (documents, or passages with their documents) of one task."""

    values: np.ndarray
    """How much each unit moves the difference; their mean is the difference."""

    largest: float
    """The largest value that a unit could have, in either direction: the largest seen where the score has no bounds."""

    bounded: bool
    """Whether scores lie between 0 and 1."""

    weight: float = 1.0
    """Of its mean in the score."""


def influence(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How much each unit moves sums.sum() / weights.sum(): values whose mean is this ratio and whose variance is that of its terms.

    >>> influence(np.array([1.0, 2.0]), np.array([1.0, 3.0])).tolist()
    [0.875, 0.625]
    """
    ratio = float(sums.sum() / weights.sum())
    moved: np.ndarray = ratio + (sums - ratio * weights) / weights.mean()
    return moved


def paired(samples: Sequence[Sample]) -> Evidence:
    """A t test of the weighted mean of several samples, two units or more in each.

    Each sample's variance is that of its units and of two more, one that gains and one that loses as much as a unit can. So a sample
    whose units all changed alike still has an error, as in Bonett and Price's interval for paired proportions.

    Args:
        samples: One for each task; the sum of their weights is 1.
    """
    difference = sum(one.weight * float(one.values.mean()) for one in samples)
    variances = [
        one.weight**2 * float(np.append(one.values, [one.largest, -one.largest]).var(ddof=1)) / (len(one.values) + 2)
        for one in samples
    ]
    variance = sum(variances)
    bound = 1.0 if all(one.bounded for one in samples) else inf
    too_few = any(len(one.values) < (FEWEST_BOUNDED if one.bounded else FEWEST) for one in samples)
    if variance == 0:  # no document changed, and the score has no bounds
        return Evidence("paired t", 1.0, 0.0, (0.0, 0.0), too_few)
    parts = sum(part**2 / (len(one.values) + 1) for part, one in zip(variances, samples, strict=True))
    freedom, stderr = variance**2 / parts, sqrt(variance)  # Welch and Satterthwaite
    reach = float(stdtrit(freedom, 1 - ALPHA / 2)) * stderr
    interval = max(difference - reach, -bound), min(difference + reach, bound)
    return Evidence("paired t", float(2 * stdtr(freedom, -abs(difference) / stderr)), stderr, interval, too_few)


def independent(difference: float, base_stderr: float, tuned_stderr: float, documents: int) -> Evidence:
    """A normal test of two scores with standard errors of their own, where nothing is known by document."""
    stderr = sqrt(base_stderr**2 + tuned_stderr**2)
    distance = abs(difference) / stderr if stderr > 0 else (inf if difference else 0.0)
    reach = float(ndtri(1 - ALPHA / 2)) * stderr
    interval = difference - reach, difference + reach
    return Evidence("independent", float(2 * ndtr(-distance)), stderr, interval, documents < FEWEST)


def holm(p_values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """p-values of a family, adjusted so that even one false finding among all of them has at most 5 %.

    Args:
        p_values: Of the family.
        weights: A p-value of half the weight must be half as large for the same verdict; None: all weigh the same.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    >>> holm([0.04, 0.01], [1, 0.25])
    [0.05, 0.05]
    """
    weights = [1.0] * len(p_values) if weights is None else weights
    adjusted, most, left = [0.0] * len(p_values), 0.0, sum(weights)
    for index in sorted(range(len(p_values)), key=lambda one: p_values[one] / weights[one]):
        most = max(most, min(1.0, left * p_values[index] / weights[index]))
        adjusted[index] = most
        left -= weights[index]
    return adjusted
