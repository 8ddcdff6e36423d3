"""Pairs the scores of base and tuned by document."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import isnan, log
from typing import Any

import numpy as np

from eval.compare.results import Results, Samples, leaves, number
from eval.compare.statistics import Sample

LONG_TEXT = 100
"""Characters from which a field that several documents share is a passage."""

INSTRUCTION = 0.1
"""Fraction of the documents from which a text that they share is an instruction, not a passage."""


@dataclass(frozen=True)
class Pairs:
    """One metric of one task on both models. A score is the sum over documents divided by the sum of their weights."""

    documents: tuple[int, ...]
    """lm_eval's doc_id of each."""

    sums: np.ndarray
    """Sum of each document's values, for base and tuned: shape (2, documents). Negative log-likelihoods of a perplexity."""

    weights: np.ndarray
    """How much each document counts: its number of values (IFEval has one per instruction), of words or of bytes."""

    perplexity: bool = False
    """Whether the score is e to the power of that ratio."""

    bounded: bool = False
    """Whether all values lie between 0 and 1."""

    passages: np.ndarray | None = None
    """For each document the number of the text that it shares with others; None where documents stand alone."""

    def scores(self) -> np.ndarray:
        """The scores of base and tuned."""
        ratios: np.ndarray = self.sums.sum(axis=1) / self.weights.sum()
        return np.exp(np.minimum(ratios, 700.0)) if self.perplexity else ratios

    @property
    def right_or_wrong(self) -> bool:
        """Whether each document has one value, 0 or 1."""
        return self.bounded and bool(np.isin(self.sums, (0.0, 1.0)).all() and (self.weights == 1).all())

    def sample(self, weight: float = 1.0) -> Sample:
        """The differences tuned - base, of log perplexities where the score is one."""
        sums, weights = self.sums[1] - self.sums[0], self.weights
        if self.passages is not None:
            sums, weights = np.bincount(self.passages, sums), np.bincount(self.passages, weights)
        # Linearized: values whose mean is the ratio, and whose variance is that of its terms.
        ratio = float(sums.sum() / weights.sum())
        values = ratio + (sums - ratio * weights) / weights.mean()
        seen = float(np.abs(values).max())
        largest = max(seen, float(weights.max() / weights.mean())) if self.bounded else seen
        return Sample(values, largest, self.bounded, weight)


@dataclass(frozen=True)
class Paired:
    """A task's pairs, or those of a group's tasks."""

    parts: dict[str, Pairs]
    weights: tuple[float, ...]
    """Of each task's score in the group's; they sum to 1."""

    @property
    def samples(self) -> list[Sample]:
        """One sample where the score is the mean over all documents together, else one per task."""
        sizes = [len(part.documents) for part in self.parts.values()]
        parts = [part.sample(weight) for part, weight in zip(self.parts.values(), self.weights, strict=True)]
        if not np.allclose(self.weights, np.array(sizes) / sum(sizes), rtol=1e-9):
            return parts
        units = sum(len(part.values) for part in parts)
        scales = [part.weight * units / len(part.values) for part in parts]
        values = np.concatenate([part.values * scale for part, scale in zip(parts, scales, strict=True)])
        largest = max(part.largest * scale for part, scale in zip(parts, scales, strict=True))
        return [Sample(values, largest, all(part.bounded for part in parts))]

    def scores(self) -> np.ndarray:
        """The scores of base and tuned."""
        scores: np.ndarray = np.array(self.weights) @ np.array([part.scores() for part in self.parts.values()])
        return scores


_READINGS = (
    (1.0, False, False),  # a mean
    (-1.0, False, True),  # a perplexity per document
    (-1.0, True, True),  # a perplexity per word or byte
    (-1 / log(2), True, False),  # bits per byte
)
"""How documents make a score: the factor of their values; whether a value is a log-likelihood with its number of words or bytes; and
whether the score is e to the power of the ratio."""


def _values(samples: list[dict[str, Any]], key: str) -> dict[int, list[Any]]:
    """Each document's values of one metric after one filter."""
    metric, _, filter_name = key.partition(",")
    found: dict[int, list[Any]] = defaultdict(list)
    for sample in samples:
        if sample["filter"] == filter_name and metric in sample:
            found[sample["doc_id"]].append(sample[metric])
    return found


def _flat(values: list[Any]) -> list[float]:
    """A document's values one by one: IFEval has one per instruction. NaN is left out, as by lm_eval's nanmean."""
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, (bool, int, float)) for one in flat):
        raise TypeError
    return [float(one) for one in flat if not isnan(one)]


def _sum_and_weight(values: list[Any], counted: bool) -> tuple[float, float]:
    if counted:
        ((log_likelihood, count),) = values
        return float(log_likelihood), float(count)
    flat = _flat(values)
    return sum(flat), len(flat)


def _equal(found: np.ndarray, expected: list[float | None]) -> bool:
    """Whether the scores are those that lm_eval reports."""
    if None in expected:
        return False
    return bool(np.isclose(found, np.array(expected, float), rtol=1e-9, atol=1e-9).all())


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
        times, most = Counter(column), INSTRUCTION * len(docs)
        keys = [text if text and 1 < times[text] <= most else place for place, text in enumerate(column)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) < fewest:
            found, fewest = np.array([numbers[key] for key in keys]), len(numbers)
    return found


def pair(
    base: list[dict[str, Any]], tuned: list[dict[str, Any]], key: str, expected: list[float | None]
) -> Pairs | None:
    """Pair the samples of one task on `metric,filter`; None where they do not give lm_eval's scores, as for an F1 over a corpus."""
    sides = [_values(samples, key) for samples in (base, tuned)]
    if sides[0].keys() != sides[1].keys():
        return None
    for factor, counted, perplexity in _READINGS:
        try:
            read = [{document: _sum_and_weight(values, counted) for document, values in side.items()} for side in sides]
        except (TypeError, ValueError):
            continue
        documents = sorted(document for document, (_, weight) in read[0].items() if weight > 0)
        sums, weights = (np.array([[side[one][place] for one in documents] for side in read]) for place in (0, 1))
        if len(documents) < 2 or (weights[0] != weights[1]).any() or not np.isfinite(sums).all():
            continue
        flat = [] if counted or perplexity else [_flat(side[one]) for side in sides for one in documents]
        bounded = bool(flat) and all(0 <= value <= 1 for values in flat for value in values)
        pairs = Pairs(tuple(documents), factor * sums, weights[0], perplexity, bounded)
        if _equal(pairs.scores(), expected):
            return replace(pairs, passages=_passages(tuned, documents))
    return None


def pair_task(task: str, key: str, base: Results, tuned: Results, samples: tuple[Samples, Samples]) -> Paired | None:
    """Pair the documents of a task or group on `metric,filter`; None where they do not give the scores that lm_eval reports."""

    def expected(name: str) -> list[float | None]:
        return [number(one["results"].get(name, {}).get(key)) for one in (base, tuned)]

    names = [leaf for leaf in leaves(tuned, task) if key in tuned["results"].get(leaf, {})]
    parts: dict[str, Pairs] = {}
    for leaf in names:
        found = pair(samples[0].get(leaf, []), samples[1].get(leaf, []), key, expected(leaf))
        if found is None or (found.perplexity and len(names) > 1):  # a mean of perplexities is no sum over documents
            return None
        parts[leaf] = found
    # A group's score is the mean over documents or over tasks, as its file says: whichever gives the scores that were reported.
    sizes = [len(part.documents) for part in parts.values()]
    for weights in ([size / sum(sizes) for size in sizes], [1 / len(sizes) for _ in sizes]):
        paired = Paired(parts, tuple(weights))
        if _equal(paired.scores(), expected(task)):
            return paired
    return None
