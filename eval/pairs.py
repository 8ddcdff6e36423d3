"""The scores of base and tuned side by side, document by document: what a comparison is made of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import isclose
from typing import Any

import numpy as np

Results = dict[str, Any]
Samples = dict[str, list[dict[str, Any]]]
Sides = tuple[Results, Results]
"""Of base and tuned."""


@dataclass(frozen=True)
class Pairs:
    """One metric of one task on both models. The mean of a side is the score that lm_eval reports."""

    documents: tuple[int, ...]
    """lm_eval's doc_id of each."""

    base: np.ndarray
    tuned: np.ndarray

    @property
    def difference(self) -> np.ndarray:
        """Tuned - base of each document."""
        difference: np.ndarray = self.tuned - self.base
        return difference

    @property
    def right_or_wrong(self) -> bool:
        """Whether each document has 0 or 1."""
        return bool(np.isin(np.concatenate([self.base, self.tuned]), (0.0, 1.0)).all())


@dataclass(frozen=True)
class Paired:
    """A task's pairs, or those of a group's tasks."""

    strata: tuple[Pairs, ...]
    """One sample each: documents are drawn anew within it."""

    weights: tuple[float, ...]
    """Of each one's mean in the score; their sum is 1."""

    @property
    def samples(self) -> list[tuple[np.ndarray, float]]:
        """Differences and weights: one sample where the score is the mean over all documents together."""
        differences, sizes = [part.difference for part in self.strata], [len(part.documents) for part in self.strata]
        if all(isclose(weight, size / sum(sizes)) for weight, size in zip(self.weights, sizes, strict=True)):
            return [(np.concatenate(differences), 1.0)]
        return list(zip(differences, self.weights, strict=True))


def number(value: object) -> float | None:
    """A score; lm_eval writes "N/A" where it has none."""
    return float(value) if isinstance(value, (int, float)) else None


def metric_keys(scores: dict[str, Any]) -> list[str]:
    """The metrics among a task's results, as lm_eval spells them: metric,filter.

    >>> metric_keys({"alias": "arc", "sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.1})
    ['acc,none']
    """
    return [key for key in scores if "," in key and not key.partition(",")[0].endswith("_stderr")]


def leaves(results: Results, task: str) -> list[str]:
    """The tasks in a group, and in groups in it; a task itself."""
    inside = results.get("group_subtasks", {}).get(task) or []
    return [leaf for name in inside for leaf in leaves(results, name)] if inside else [task]


def _values(samples: list[dict[str, Any]], key: str) -> dict[int, list[float]]:
    """The numbers that each document got, of one metric after one filter; empty where one of them is no number."""
    metric, _, filter_name = key.partition(",")
    found: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample["filter"] != filter_name or metric not in sample:
            continue
        # IFEval has a value for each instruction of a prompt.
        values = sample[metric] if isinstance(sample[metric], list) else [sample[metric]]
        if not all(isinstance(value, (bool, int, float)) for value in values):
            return {}
        found[sample["doc_id"]] += [float(value) for value in values]
    return found


def pair(base: list[dict[str, Any]], tuned: list[dict[str, Any]], key: str, scores: Sides) -> Pairs | None:
    """A task's documents side by side; None where its score is not the mean of theirs, as a perplexity is not.

    Args:
        base: lm_eval's samples of one task.
        tuned: The same of the tuned model.
        key: metric,filter.
        scores: The task's results.
    """
    sides = [_values(samples, key) for samples in (base, tuned)]
    documents = sorted(sides[0])
    counts = [[len(side[document]) for document in sorted(side)] for side in sides]
    if len(documents) < 2 or documents != sorted(sides[1]) or counts[0] != counts[1] or 0 in counts[0]:
        return None
    # Where documents have several values the score is the mean of all: each counts by how many it has.
    share = len(documents) / sum(counts[0])
    values = [np.array([sum(side[document]) * share for document in documents]) for side in sides]
    for mean, score in zip(values, scores, strict=True):
        found = number(score.get(key))
        if found is None or not isclose(float(mean.mean()), found, abs_tol=1e-9):
            return None
    return Pairs(tuple(documents), *values)


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
    # A group's score is the mean over documents or over tasks, as its file says: whichever gives the scores that were reported.
    sizes = [len(part.documents) for part in strata]
    for weights in ([size / sum(sizes) for size in sizes], [1 / len(sizes)] * len(sizes)):
        means = [
            sum(weight * float(side.mean()) for weight, side in zip(weights, sides, strict=True))
            for sides in ([part.base for part in strata], [part.tuned for part in strata])
        ]
        scores = [number(one["results"][task].get(key)) for one in (base, tuned)]
        if all(
            score is not None and isclose(mean, score, abs_tol=1e-9) for mean, score in zip(means, scores, strict=True)
        ):
            return Paired(strata, tuple(weights))
    return None
