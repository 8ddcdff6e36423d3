"""How often do the intervals of a comparison hold the true difference, and how often is one found where there is none?

    python benchmarks/coverage.py          # a minute
    python benchmarks/coverage.py 4000     # the tables of docs/comparison.md

Right and wrong: summed over everything that can happen, so these numbers have no error. Other scores: simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.statistics import ALPHA, bootstrap, mcnemar, score_interval
from eval.strata import paired

Draw = Callable[[np.random.Generator, int], np.ndarray]


def few_skewed(generator: np.random.Generator, count: int) -> np.ndarray:
    up, down = generator.beta(2, 6, count), -3 * generator.beta(2, 6, count)
    return (generator.random(count) < 0.3) * np.where(generator.random(count) < 0.75, up, down)


DRAWS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda generator, n: generator.normal(0, 1, n), 0.0),
    "heavy tails (t, 3 degrees)": (lambda generator, n: generator.standard_t(3, n), 0.0),
    "thirds (F1, instructions)": (
        lambda generator, n: (generator.integers(0, 4, n) - generator.integers(0, 4, n)) / 3,
        0.0,
    ),
    "shares (beta)": (lambda generator, n: generator.beta(0.5, 0.5, n) - generator.beta(0.4, 0.6, n), 0.1),
    "3 in 10 differ": (
        lambda generator, n: (generator.random(n) < 0.3) * generator.beta(2, 2, n) * generator.choice([-1, 1], n),
        0.0,
    ),
    "skewed (exponential)": (lambda generator, n: generator.exponential(1, n) - 1, 0.0),
}
"""Differences of the documents, and their true mean."""

HARD: dict[str, tuple[Draw, float]] = {
    "3 in 10 differ, skewed": (few_skewed, 0.0),
    "very skewed (lognormal)": (lambda generator, n: generator.lognormal(0, 1, n) - float(np.exp(0.5)), 0.0),
}
"""Where 50 documents are not enough."""


MEANS: dict[str, tuple[tuple[float, float], ...]] = {
    "two: 0.02 / 0.02 each": ((0.02, 0.02),) * 2,
    "two: 0.05 / 0.05 each": ((0.05, 0.05),) * 2,
    "two: 0.2 / 0.2 each": ((0.2, 0.2),) * 2,
    "two: 0.3 / 0.1 and 0.05 / 0.05": ((0.3, 0.1), (0.05, 0.05)),
    "two: 0.9 / 0.02 and 0.02 / 0.02": ((0.9, 0.02), (0.02, 0.02)),
    "five: 0.05 / 0.05 each": ((0.05, 0.05),) * 5,
    "twenty: 0.1 / 0.1 each": ((0.1, 0.1),) * 20,
}
"""Of tasks with right and wrong: only tuned right and only base right, for each."""


def exact(gain: float, loss: float, documents: int) -> tuple[float, float]:
    """Of right and wrong: how often the interval holds the true difference, and how often the test finds one.

    Args:
        gain: Share of documents that only the tuned model has right.
        loss: Share that only the base model has right.
        documents: How many are measured.
    """
    holds = finds = 0.0
    log_factorial = np.concatenate([[0], np.cumsum(np.log(np.arange(1, documents + 1)))])
    for gained in range(documents + 1):
        for lost in range(documents + 1 - gained):
            same = documents - gained - lost
            likely = log_factorial[documents] - log_factorial[[gained, lost, same]].sum()
            likely += gained * np.log(gain) + lost * np.log(loss) + same * np.log(1 - gain - loss)
            if likely < -18:
                continue
            p_value, (low, high) = mcnemar(gained, lost), score_interval(gained, lost, documents)
            low, high = (low, high) if p_value <= ALPHA else (min(low, 0.0), max(high, 0.0))
            holds += float(np.exp(likely)) * (low <= gain - loss <= high)
            finds += float(np.exp(likely)) * (p_value <= ALPHA)
    return holds, finds


def simulated(draw: Draw, truth: float, documents: int, times: int, resamples: int = 399) -> tuple[float, float]:
    """The same of other scores, by drawing documents and comparing them so many times."""
    generator = np.random.default_rng(2)
    holds = finds = 0
    for number in range(times):
        evidence = bootstrap([draw(generator, documents)], [1.0], resamples, seed=number)
        holds += evidence.interval[0] <= truth <= evidence.interval[1]
        finds += evidence.p_value <= ALPHA
    return holds / times, finds / times


def of_means(rates: Sequence[tuple[float, float]], documents: int, times: int) -> tuple[float, float]:
    """The same of the mean over tasks with so many documents each, which are right or wrong."""
    generator = np.random.default_rng(3)
    truth = sum(gain - loss for gain, loss in rates) / len(rates)
    holds = finds = 0
    for _ in range(times):
        shares = [(gain, loss, 1 - gain - loss) for gain, loss in rates]
        drawn = [np.repeat([1.0, -1.0, 0.0], generator.multinomial(documents, share)) for share in shares]
        evidence = paired([(values, 1 / len(rates)) for values in drawn])
        holds += evidence.interval[0] <= truth + 1e-12 and truth - 1e-12 <= evidence.interval[1]
        finds += evidence.p_value <= ALPHA
    return holds / times, finds / times


def print_means(times: int) -> None:
    """Print the table of means over tasks."""
    print(f"\nMeans over tasks of right and wrong, {times:,} simulations each\n")
    sizes = (50, 100, 200)
    print("| tasks: only tuned right / only base right | " + " | ".join(map(str, sizes)) + " |")
    print("|---|" + "--:|" * len(sizes))
    for name, rates in MEANS.items():
        cells = []
        for documents in sizes:
            holds, finds = of_means(rates, documents, times)
            nothing = all(gain == loss for gain, loss in rates)
            cells.append(f"{100 * holds:.1f} ({100 * finds:.1f})" if nothing else f"{100 * holds:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main(times: int) -> None:
    """Print the tables."""
    print(
        "Right and wrong, exact: share of intervals that hold the truth (share of verdicts, where nothing has changed)\n"
    )
    sizes = (10, 20, 50, 100, 200)
    print("| only tuned right / only base right | " + " | ".join(map(str, sizes)) + " |")
    print("|---|" + "--:|" * len(sizes))
    for gain, loss in (
        (0.02, 0.02),
        (0.05, 0.05),
        (0.1, 0.1),
        (0.2, 0.2),
        (0.3, 0.3),
        (0.1, 0.05),
        (0.3, 0.1),
        (0.6, 0.1),
    ):
        cells = []
        for documents in sizes:
            holds, finds = exact(gain, loss, documents)
            cells.append(f"{100 * holds:.1f} ({100 * finds:.1f})" if gain == loss else f"{100 * holds:.1f}")
        print(f"| {gain:g} / {loss:g} | " + " | ".join(cells) + " |")
    print(f"\nOther scores, {times:,} simulations each\n")
    sizes = (20, 50, 100, 200)
    print("| differences of the documents | " + " | ".join(map(str, sizes)) + " |")
    print("|---|" + "--:|" * len(sizes))
    for name, (draw, truth) in (DRAWS | HARD).items():
        cells = []
        for documents in sizes:
            holds, finds = simulated(draw, truth, documents, times)
            cells.append(f"{100 * holds:.1f} ({100 * finds:.1f})" if truth == 0 else f"{100 * holds:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print_means(times)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
