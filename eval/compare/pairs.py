"""Pairs the scores of base and tuned by document."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import exp, isclose, isnan, log
from typing import Any

import numpy as np

from eval.compare.results import Results, Samples, leaves, number
from eval.compare.statistics import Sample, influence


@dataclass(frozen=True)
class Pairs:
    """One metric of one task on both models. A score is the sum over documents divided by the sum of their weights."""

    documents: tuple[int, ...]
    """lm_eval's doc_id of each."""

    base: np.ndarray
    """Sum of each document's values; negative log-likelihood where the score is a perplexity."""

    tuned: np.ndarray

    weights: np.ndarray
    """How much each document counts: its number of values (IFEval has one for each instruction), of words or of bytes."""

    perplexity: bool = False
    """Whether the score is e to the power of that ratio."""

    bounded: bool = False
    """Whether all values lie between 0 and 1."""

    passages: np.ndarray | None = None
    """For each document the number of the text that it shares with others; None where documents stand alone."""

    def score(self, side: np.ndarray, kept: np.ndarray | None = None) -> float:
        """The score of base or tuned, on all documents or on some."""
        kept = np.ones(len(side), bool) if kept is None else kept
        ratio = float(side[kept].sum() / self.weights[kept].sum())
        return exp(min(ratio, 700.0)) if self.perplexity else ratio

    @property
    def right_or_wrong(self) -> bool:
        """Whether each document has one value, 0 or 1."""
        values = np.concatenate([self.base, self.tuned])
        return self.bounded and bool(np.isin(values, (0.0, 1.0)).all() and (self.weights == 1).all())

    def sample(self, weight: float = 1.0) -> Sample:
        """The differences tuned - base, of log perplexities where the score is one."""
        sums, weights = self.tuned - self.base, self.weights
        if self.passages is not None:
            sums, weights = np.bincount(self.passages, sums), np.bincount(self.passages, weights)
        values = influence(sums, weights)
        seen = float(np.abs(values).max())
        largest = max(seen, float(weights.max() / weights.mean())) if self.bounded else seen
        return Sample(values, largest, self.bounded, weight)


@dataclass(frozen=True)
class Paired:
    """A task's pairs, or those of a group's tasks."""

    strata: tuple[Pairs, ...]
    """One for each task."""

    weights: tuple[float, ...]
    """Of each one's score in the whole; their sum is 1."""

    @property
    def samples(self) -> list[Sample]:
        """One sample where the score is the mean over all documents together, else one for each task."""
        sizes = [len(part.documents) for part in self.strata]
        parts = [part.sample(weight) for part, weight in zip(self.strata, self.weights, strict=True)]
        if not all(isclose(weight, size / sum(sizes)) for weight, size in zip(self.weights, sizes, strict=True)):
            return parts
        units = sum(len(part.values) for part in parts)
        scales = [part.weight * units / len(part.values) for part in parts]
        values = np.concatenate([part.values * scale for part, scale in zip(parts, scales, strict=True)])
        largest = max(part.largest * scale for part, scale in zip(parts, scales, strict=True))
        return [Sample(values, largest, all(part.bounded for part in parts))]

    @property
    def passages(self) -> int | None:
        """How many texts the documents share; None where they stand alone."""
        if all(part.passages is None for part in self.strata):
            return None
        return sum(len(part.documents if part.passages is None else set(part.passages)) for part in self.strata)


def _values(samples: list[dict[str, Any]], key: str) -> dict[int, list[Any]]:
    """Each document's values of one metric after one filter."""
    metric, _, filter_name = key.partition(",")
    found: dict[int, list[Any]] = defaultdict(list)
    for sample in samples:
        if sample["filter"] == filter_name and metric in sample:
            found[sample["doc_id"]].append(sample[metric])
    return found


def _numbers(values: list[Any]) -> list[float]:
    """A document's values one by one: IFEval has one per instruction. NaN is no value, as in lm_eval's nanmean.

    Raises:
        TypeError: One is no number.
    """
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, (bool, int, float)) for one in flat):
        raise TypeError
    return [float(one) for one in flat if not isnan(one)]


def _mean(values: list[Any]) -> tuple[float, float]:
    numbers = _numbers(values)
    return sum(numbers), len(numbers)


def _perplexity(values: list[Any]) -> tuple[float, float]:
    total, count = _mean(values)
    return -total, count


def _per_word(values: list[Any]) -> tuple[float, float]:
    """From a log-likelihood and the number of words or bytes that it is of."""
    ((log_likelihood, count),) = values
    return -float(log_likelihood), float(count)


def _bits(values: list[Any]) -> tuple[float, float]:
    total, count = _per_word(values)
    return total / log(2), count


_READINGS = ((_mean, False), (_perplexity, True), (_per_word, True), (_bits, False))
"""From a document's values to their sum and weight, and whether the score is e to the power of the ratio."""

LONG_TEXT = 100
"""Characters from which a field that several documents share is a passage."""

INSTRUCTION = 0.1
"""Share of the documents from which a text that they share is an instruction, not a passage."""


def _passages(samples: list[dict[str, Any]], documents: list[int]) -> np.ndarray | None:
    """Number the texts that documents share: answers to questions on one passage are correlated, and so are copies of a document.

    The field by which there are the fewest decides.
    """
    known = {sample["doc_id"]: sample.get("doc") for sample in samples}
    docs = [doc if isinstance(doc := known.get(document), dict) else {} for document in documents]
    columns = [[str(doc) if doc else "" for doc in docs]]
    for name in {name: None for doc in docs for name in doc}:
        texts = [doc.get(name) for doc in docs]
        columns.append([text if isinstance(text, str) and len(text) >= LONG_TEXT else "" for text in texts])
    found, fewest = None, len(docs)
    for column in columns:
        times = Counter(column)
        keys = [
            text if text and 1 < times[text] <= INSTRUCTION * len(docs) else place for place, text in enumerate(column)
        ]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) < fewest:
            found, fewest = np.array([numbers[key] for key in keys]), len(numbers)
    return found


def pair(
    base: list[dict[str, Any]], tuned: list[dict[str, Any]], key: str, scores: tuple[Results, Results]
) -> Pairs | None:
    """A task's documents side by side; None where the score cannot be computed from theirs, as an F1 over a corpus cannot.

    Args:
        base: lm_eval's samples of one task.
        tuned: The same of the tuned model.
        key: metric,filter.
        scores: The task's results.
    """
    sides = [_values(samples, key) for samples in (base, tuned)]
    expected = [number(score.get(key)) for score in scores]
    if sides[0].keys() != sides[1].keys():
        return None
    for reading, perplexity in _READINGS:
        try:
            read = [{document: reading(values) for document, values in side.items()} for side in sides]
        except (TypeError, ValueError):
            continue
        documents = sorted(document for document, (_, weight) in read[0].items() if weight > 0)
        sums, weights = (np.array([[side[one][part] for one in documents] for side in read]) for part in (0, 1))
        if len(documents) < 2 or (weights[0] != weights[1]).any() or not np.isfinite(sums).all():
            continue
        flat = [one for side in sides for document in documents for one in side[document]] if reading is _mean else []
        bounded = bool(flat) and all(0 <= one <= 1 for one in _numbers(flat))
        pairs = Pairs(tuple(documents), sums[0], sums[1], weights[0], perplexity, bounded)
        if all(
            score is not None and isclose(pairs.score(side), score, rel_tol=1e-9, abs_tol=1e-9)
            for side, score in zip(sums, expected, strict=True)
        ):
            return replace(pairs, passages=_passages(tuned, documents))
    return None


def pair_task(task: str, key: str, base: Results, tuned: Results, samples: tuple[Samples, Samples]) -> Paired | None:
    """A task's or group's documents side by side.

    Args:
        task: Of the results.
        key: metric,filter.
        base: results.json.
        tuned: results.json.
        samples: Of base and tuned, per task.
    """
    names = [leaf for leaf in leaves(tuned, task) if key in tuned["results"].get(leaf, {})]
    parts = [
        pair(samples[0].get(leaf, []), samples[1].get(leaf, []), key, (base["results"][leaf], tuned["results"][leaf]))
        for leaf in names
        if leaf in base["results"]
    ]
    strata = tuple(part for part in parts if part is not None)
    if not strata or len(strata) < len(names):
        return None
    if len(strata) == 1:
        return Paired(strata, (1.0,))
    if any(part.perplexity for part in strata):  # a mean of perplexities is no sum over documents
        return None
    # A group's score is the mean over documents or over tasks, as its file says: whichever gives the scores that were reported.
    sizes = [len(part.documents) for part in strata]
    expected = [number(one["results"][task].get(key)) for one in (base, tuned)]
    means = np.array([[part.score(part.base), part.score(part.tuned)] for part in strata])
    for weights in ([size / sum(sizes) for size in sizes], [1 / len(sizes)] * len(sizes)):
        found = (np.array(weights) @ means).tolist()
        if all(
            score is not None and isclose(one, score, abs_tol=1e-9) for one, score in zip(found, expected, strict=True)
        ):
            return Paired(strata, tuple(weights))
    return None
