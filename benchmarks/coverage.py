"""How often do the intervals of a comparison hold the true difference, and how often is one found where there is none?

    python benchmarks/coverage.py          # a minute
    python benchmarks/coverage.py 4000     # the tables of benchmarks/README.md

Right and wrong: summed over everything that can happen, so these numbers have no error. All others: simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import exp, lgamma, log
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.compare.pairs import Pairs
from eval.compare.statistics import ALPHA, Evidence, Sample, paired

Generator = np.random.Generator
Draw = Callable[[Generator, int], Sample]


def bounded(values: np.ndarray) -> Sample:
    """Differences of scores between 0 and 1."""
    return Sample(values, 1.0, bounded=True)


def unbounded(values: np.ndarray) -> Sample:
    """Differences of scores without known bounds."""
    return Sample(values, float(np.abs(values).max()), bounded=False)


def changing(generator: Generator, documents: int) -> np.ndarray:
    return generator.random(documents) < 0.3


def few_skewed(generator: Generator, documents: int) -> np.ndarray:
    up, down = generator.beta(2, 6, documents) / 3, -generator.beta(2, 6, documents)
    return changing(generator, documents) * np.where(generator.random(documents) < 0.75, up, down)


def most_gain_a_little(generator: Generator, documents: int) -> np.ndarray:
    """1 document in 100 loses everything and the others gain as much together: nothing has changed."""
    return np.where(generator.random(documents) < 0.01, -1.0, 0.01 / 0.99)


def perplexity(generator: Generator, documents: int) -> Sample:
    """Documents of 50 to 5,000 words; of each the log-likelihood a word moves by 0.02 on average, and by chance."""
    words = np.exp(generator.uniform(np.log(50), np.log(5000), documents))
    change = words * generator.normal(-0.02, 0.1, documents)
    sums = np.array([np.zeros(documents), change])
    return Pairs(tuple(range(documents)), sums, words, perplexity=True).sample()


def passages(generator: Generator, documents: int, known: bool = True) -> Sample:
    """Right and wrong of ten questions on each passage, half of whose changes they have in common."""
    owner = np.arange(documents) // 10
    common = generator.choice([-1.0, 0.0, 1.0], documents // 10, p=[0.3, 0.4, 0.3])[owner]
    own = generator.choice([-1.0, 0.0, 1.0], documents, p=[0.3, 0.4, 0.3])
    change = np.where(generator.random(documents) < 0.5, common, own)
    sums = np.array([change < 0, change > 0], float)
    owners = owner if known else None
    return Pairs(tuple(range(documents)), sums, np.ones(documents), bounded=True, passages=owners).sample()


DRAWS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda generator, n: unbounded(generator.normal(0, 1, n)), 0.0),
    "heavy tails (t, 3 degrees)": (lambda generator, n: unbounded(generator.standard_t(3, n)), 0.0),
    "thirds (F1, instructions)": (
        lambda generator, n: bounded((generator.integers(0, 4, n) - generator.integers(0, 4, n)) / 3),
        0.0,
    ),
    "shares (beta)": (lambda generator, n: bounded(generator.beta(0.5, 0.5, n) - generator.beta(0.4, 0.6, n)), 0.1),
    "3 in 10 differ": (
        lambda generator, n: bounded(
            changing(generator, n) * generator.beta(2, 2, n) * generator.choice([-1, 1], n),
        ),
        0.0,
    ),
    "3 in 10 differ, skewed": (lambda generator, n: bounded(few_skewed(generator, n)), 0.0),
    "1 in 100 loses 1, all others gain 0.0101": (lambda generator, n: bounded(most_gain_a_little(generator, n)), 0.0),
    "skewed (exponential)": (lambda generator, n: unbounded(generator.exponential(1, n) - 1), 0.0),
    "perplexity, as its logarithm": (perplexity, -0.02),
}
"""Differences of the documents, and their true mean."""

HARD: dict[str, tuple[Draw, float]] = {
    "very skewed (lognormal)": (lambda generator, n: unbounded(generator.lognormal(0, 1, n) - exp(0.5)), 0.0),
    "ten questions a passage": (passages, 0.0),
    "the same, taken for independent": (lambda generator, n: passages(generator, n, known=False), 0.0),
}
"""Where 50 documents are not enough, or the test does not fit."""


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


def right_or_wrong(gained: int, lost: int, documents: int) -> Sample:
    """Differences of documents that are right (1) or wrong (0)."""
    return bounded(np.repeat([1.0, -1.0, 0.0], [gained, lost, documents - gained - lost]))


def holds_and_finds(evidence: Evidence, truth: float) -> np.ndarray:
    """Whether the interval holds the truth, and whether the test finds a difference."""
    low, high = evidence.interval
    return np.array([low <= truth + 1e-12 and truth - 1e-12 <= high, evidence.p_value <= ALPHA], float)


def exact(gain: float, loss: float, documents: int) -> tuple[float, float]:
    """Of right and wrong: how often the interval holds the true difference, and how often the test finds one.

    Args:
        gain: Share of documents that only the tuned model has right.
        loss: Share that only the base model has right.
        documents: How many are measured.
    """
    total = np.zeros(2)
    for gained in range(documents + 1):
        for lost in range(documents + 1 - gained):
            same = documents - gained - lost
            likely = lgamma(documents + 1) - sum(lgamma(count + 1) for count in (gained, lost, same))
            likely += gained * log(gain) + lost * log(loss) + same * log(1 - gain - loss)
            if likely > -18:
                evidence = paired([right_or_wrong(gained, lost, documents)])
                total += exp(likely) * holds_and_finds(evidence, gain - loss)
    return float(total[0]), float(total[1])


def simulated(draw: Draw, truth: float, documents: int, times: int) -> tuple[float, float]:
    """The same of other scores, by drawing documents and comparing them so many times."""
    generator = np.random.default_rng(2)
    found = [holds_and_finds(paired([draw(generator, documents)]), truth) for _ in range(times)]
    holds, finds = np.mean(found, axis=0)
    return float(holds), float(finds)


def of_means(rates: Sequence[tuple[float, float]], documents: int, times: int) -> tuple[float, float]:
    """The same of the mean over tasks with so many documents each, which are right or wrong."""
    generator = np.random.default_rng(3)
    truth = sum(gain - loss for gain, loss in rates) / len(rates)
    total = np.zeros(2)
    for _ in range(times):
        counts = [generator.multinomial(documents, (gain, loss, 1 - gain - loss)) for gain, loss in rates]
        parts = [right_or_wrong(int(gained), int(lost), documents) for gained, lost, _ in counts]
        evidence = paired([Sample(part.values, part.largest, part.bounded, 1 / len(rates)) for part in parts])
        total += holds_and_finds(evidence, truth)
    return float(total[0] / times), float(total[1] / times)


def print_table(
    title: str, first: str, sizes: Sequence[int], rows: dict[str, tuple[Callable[[int], tuple[float, float]], bool]]
) -> None:
    """Print a row for each name: what its function gives for each number of documents, and whether nothing has changed."""
    print(f"\n{title}\n\n| {first} | " + " | ".join(map(str, sizes)) + " |\n|---|" + "--:|" * len(sizes))
    for name, (measure, nothing) in rows.items():
        found = [measure(documents) for documents in sizes]
        cells = [f"{100 * holds:.1f}" + (f" ({100 * finds:.1f})" if nothing else "") for holds, finds in found]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


RATES = ((0.02, 0.02), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (0.1, 0.05), (0.3, 0.1), (0.6, 0.1))


def main(times: int) -> None:
    """Print the tables."""
    print("Share of intervals that hold the truth (in brackets, where nothing has changed, share of verdicts).")
    print_table(
        "Right and wrong, exact",
        "only tuned right / only base right",
        (10, 20, 50, 100, 200),
        {f"{one[0]:g} / {one[1]:g}": (lambda n, one=one: exact(*one, n), one[0] == one[1]) for one in RATES},
    )
    print_table(
        f"Other scores, {times:,} simulations each",
        "differences of the documents",
        (20, 50, 100, 200, 500),
        {
            name: (lambda n, one=one: simulated(*one, documents=n, times=times), one[1] == 0)
            for name, one in (DRAWS | HARD).items()
        },
    )
    print_table(
        f"Means over tasks of right and wrong, {times:,} simulations each",
        "tasks: only tuned right / only base right",
        (50, 100, 200),
        {
            name: (lambda n, rates=rates: of_means(rates, n, times), all(gain == loss for gain, loss in rates))
            for name, rates in MEANS.items()
        },
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
