"""Tests whether a difference between two models on the same documents is more than chance.

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

    @property
    def variance(self) -> float:
        """The variance of the weighted mean, counting two more units: one that gains and one that loses as much as a unit can.

        So a sample whose units all changed alike still has an error, as in Bonett and Price's interval for paired proportions.
        """
        values = np.append(self.values, [self.largest, -self.largest])
        return self.weight**2 * float(values.var(ddof=1)) / len(values)


def paired(samples: Sequence[Sample]) -> Evidence:
    """A t test of the weighted mean of several samples, each of two units or more; their weights sum to 1."""
    difference = sum(one.weight * float(one.values.mean()) for one in samples)
    variances = [one.variance for one in samples]
    too_few = any(len(one.values) < (FEWEST_BOUNDED if one.bounded else FEWEST) for one in samples)
    variance = sum(variances)
    if variance == 0:  # no document changed, and the score has no bounds
        return Evidence("paired t", 1.0, 0.0, (0.0, 0.0), too_few)
    terms = sum(part**2 / (len(one.values) + 1) for part, one in zip(variances, samples, strict=True))
    freedom, stderr = variance**2 / terms, sqrt(variance)  # Welch and Satterthwaite
    reach = float(stdtrit(freedom, 1 - ALPHA / 2)) * stderr
    bound = 1.0 if all(one.bounded for one in samples) else inf
    interval = max(difference - reach, -bound), min(difference + reach, bound)
    return Evidence("paired t", float(2 * stdtr(freedom, -abs(difference) / stderr)), stderr, interval, too_few)


def independent(difference: float, base_stderr: float, tuned_stderr: float, documents: int) -> Evidence:
    """A normal test of two scores with standard errors of their own, where nothing is known by document."""
    stderr = sqrt(base_stderr**2 + tuned_stderr**2)
    distance = abs(difference) / stderr if stderr > 0 else (inf if difference else 0.0)
    reach = float(ndtri(1 - ALPHA / 2)) * stderr
    interval = difference - reach, difference + reach
    return Evidence("independent", float(2 * ndtr(-distance)), stderr, interval, documents < FEWEST)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values together, so that the chance of even one false finding among them is at most 5%.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.minimum(np.array(p_values, float)[order] * np.arange(len(order), 0, -1), 1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(scaled)
    return [float(one) for one in adjusted]
