"""Documents of the evaluation that were trained on: told before somebody believes the score."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from eval.compare.ngrams import Search
from eval.compare.pairs import Results, Samples, leaves, pair_task
from sft.data.prepared import find_prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.run.directory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NGRAM = 13
"""Words in a row that two texts do not share by chance: as in GPT-3's own check."""

_AT_A_TIME = 500_000
"""Tokens decoded together."""


def _fields(value: object) -> Iterator[str]:
    """The texts in a document of lm_eval."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _fields(one)
    elif isinstance(value, list):
        for one in value:
            yield from _fields(one)


def prepared_folder(run: Run) -> Path | None:
    """Where the data that a run was trained on is prepared; None where it is gone."""
    fingerprint = run.record.get("data_fingerprint")
    # The recipe's output_dir may be relative to another folder than this one, or the run have been copied out of it.
    roots = {run.path.parents[1], Path(run.recipe().output_dir).expanduser().resolve()}
    for file in sorted(file for root in roots for file in root.glob(".prepared/*/prepared.json")):
        prepared = find_prepared(file.parent)
        if prepared is not None and fingerprint is not None and prepared.fingerprint == fingerprint:
            return prepared.folder
    return None


def training_texts(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[str]]:
    """The documents that are trained, as text, some at a time: without control tokens, in the order on disk."""
    store = DocumentStore.open(folder)
    trained = np.unique(SequenceIndex.load(folder / "train.npz").members)
    told = sys.stderr.isatty() or len(trained) > 100_000
    tqdm.monitor_interval = 0
    with tqdm(
        total=len(trained), unit=" documents", desc="Searching the training data", disable=not told, mininterval=10
    ) as progress:
        before = np.cumsum(store.documents["length"][trained], dtype=np.int64) // _AT_A_TIME
        for chosen in np.split(trained, np.flatnonzero(np.diff(before)) + 1):
            ids = [store.document(int(index))[0].tolist() for index in chosen]
            yield tokenizer.batch_decode(ids, skip_special_tokens=True)
            progress.update(len(chosen))


def _scores_without(
    row: Results, found: dict[str, set[int]], results: tuple[Results, Results], samples: tuple[Samples, Samples]
) -> Results:
    """The scores on the documents that were not trained on; nothing where the score is no mean over documents."""
    key, parts = f"{row['metric']},{row['filter']}", leaves(results[1], row["task"])
    documents = pair_task(row["task"], key, *results, samples)
    if documents is None or not any(found[part] for part in parts):
        return {}
    names = [part for part in parts if key in results[1]["results"].get(part, {})]
    clean = [
        np.array([document not in found[name] for document in part.documents])
        for name, part in zip(names, documents.strata, strict=True)
    ]
    # A task of which nothing is left is left out of its group's mean.
    left = [
        float(part.weights[kept].sum() / part.weights.sum()) for part, kept in zip(documents.strata, clean, strict=True)
    ]
    weights = np.array(documents.weights) * left
    if not weights.sum():
        return {}
    means = {
        side: fsum(
            weight * part.score(getattr(part, side), kept)
            for weight, part, kept in zip(weights / weights.sum(), documents.strata, clean, strict=True)
            if weight
        )
        for side in ("base", "tuned")
    }
    return {
        "metric": row["metric"],
        "base_without": means["base"],
        "tuned_without": means["tuned"],
        "difference_without": means["tuned"] - means["base"],
    }


def check_contamination(
    asked: bool | int,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Results],
    results: tuple[Results, Results],
    samples: tuple[Samples, Samples],
) -> dict[str, Any] | None:
    """Count the documents of each task that the training data holds.

    Args:
        asked: The recipe's eval.contamination.
        run: The run, for the data that it was trained on.
        tokenizer: The run's.
        rows: `metrics` of the comparison.
        results: results.json of base and tuned.
        samples: Of base and tuned.

    Returns:
        `ngram`, and for each of `tasks` how many `documents` it has, how many were `found`, how many are too short to be looked for
        (`too_short`), and the scores without those that were found. Where the data is gone `tasks` is empty, and `reason` says so.
        None where it is not asked for.
    """
    if asked is False:
        return None
    size = NGRAM if asked is True else asked
    folder = prepared_folder(run)
    if folder is None:
        reason = f"the data that {run.path.name} was trained on is no longer prepared in its output_dir (.prepared)."
        return {"ngram": size, "tasks": {}, "reason": reason}
    tasks = {row["task"]: row for row in rows if row["decides"]}
    owners: list[tuple[str, int]] = []
    documents: list[tuple[str, ...]] = []
    for leaf in dict.fromkeys(leaf for task in tasks for leaf in leaves(results[1], task)):
        once = {sample["doc_id"]: sample["doc"] for sample in samples[1].get(leaf, [])}
        owners += [(leaf, document) for document in once]
        documents += [tuple(_fields(doc)) for doc in once.values()]
    # Tasks that ask the same documents in several ways must not make their words look like an introduction that many share.
    distinct = {document: index for index, document in enumerate(dict.fromkeys(documents))}
    search, place = Search(list(distinct), size), [distinct[document] for document in documents]
    for texts in training_texts(folder, tokenizer):
        search.look_at(texts)
    seen, unsearchable = search.found()[place], search.unsearchable[place]
    counted: dict[str, Any] = {}
    for task, row in tasks.items():
        parts = leaves(results[1], task)
        mine = np.array([leaf in parts for leaf, _ in owners], bool)
        found = {
            part: {document for (leaf, document), hit in zip(owners, seen, strict=True) if hit and leaf == part}
            for part in parts
        }
        counted[task] = {
            "documents": int(mine.sum()),
            "found": int(seen[mine].sum()),
            "too_short": int(unsearchable[mine].sum()),
            **_scores_without(row, found, results, samples),
        }
    return {"ngram": size, "tasks": counted}
