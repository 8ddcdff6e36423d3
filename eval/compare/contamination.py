"""Finds documents of the evaluation in the training data, by n-grams of their words.

The training data is searched as it streams by: the n-grams of a few thousand documents are held as hashes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from eval.compare.pairs import pair_task
from eval.compare.results import Results, Samples, leaves
from sft.data.prepared import find_prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.run.directory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NGRAM = 13
"""Words that two texts do not share in a row by chance: as in GPT-3's own check."""

_AT_A_TIME = 500_000
"""Tokens decoded together."""


# Chinese, Japanese and Korean are written without spaces: each sign is a word.
_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BETWEEN = np.uint64(0x5851F42D4C957F2D)
"""Stands between two texts, so that no n-gram reaches from one into the next."""

_MOST_BITS = 24


def words(text: str) -> list[str]:
    """The words of a text, in lower case, without punctuation.

    >>> words("Don't panic: it's 7 o'clock!")
    ['don', 't', 'panic', 'it', 's', '7', 'o', 'clock']
    """
    return _WORD.findall(text.lower())


def hash_words(texts: Iterable[str]) -> np.ndarray:
    """Hashes of the words of texts, in order, with a separator after each text; uint64."""
    parts = []
    for text in texts:
        found = words(text)
        parts.append(np.fromiter((xxh3_64_intdigest(word.encode()) for word in found), np.uint64, len(found)))
        parts.append(np.array([_BETWEEN]))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def ngrams(hashed: np.ndarray, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Hashes of all n-grams, for each length n; uint64."""
    found, wanted = {}, set(lengths)
    so_far = hashed
    for length in range(1, max(wanted, default=0) + 1):
        if length > 1:
            so_far = so_far[:-1] * _FACTOR + hashed[length - 1 :] if len(so_far) else so_far
        if length in wanted:
            found[length] = so_far
    return found


class Search:
    """Finds the documents that share n-grams with a stream of texts.

    Args:
        documents: The texts of each document: its fields.
        size: n, in words.
        fewest: Words that one field of a document needs, or the document is too short to search for.
        most_shared: An n-gram in more documents than this belongs to the task's own text, and does not count.
    """

    def __init__(self, documents: Sequence[Sequence[str]], size: int, fewest: int = 5, most_shared: int = 10) -> None:
        self.unsearchable = np.zeros(len(documents), bool)
        owners: dict[int, list[tuple[np.ndarray, int]]] = {}
        for index, fields in enumerate(documents):
            hashed = [hash_words([field])[:-1] for field in fields]
            long = [one for one in hashed if len(one) >= size]
            # A shorter document is searched for as a whole: by its longest field.
            chosen = long or sorted((one for one in hashed if len(one) >= fewest), key=len)[-1:]
            self.unsearchable[index] = not chosen
            if chosen:
                length = min(size, len(chosen[0]))
                # Once per document, however many of its fields have it.
                every = np.unique(np.concatenate([ngrams(one, [length])[length] for one in chosen]))
                owners.setdefault(length, []).append((every, index))
        self._known: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._flags: dict[int, np.ndarray] = {}
        for length, found in owners.items():
            every = np.concatenate([hashes for hashes, _ in found])
            of = np.concatenate([np.full(len(hashes), index, np.int32) for hashes, index in found])
            unique, place, count = np.unique(every, return_inverse=True, return_counts=True)
            kept = count[place] <= most_shared
            bits = min(_MOST_BITS, 4 + len(unique).bit_length())
            table = np.zeros(1 << bits, bool)
            table[unique >> np.uint64(64 - bits)] = True
            self._known[length] = (unique, table, np.stack([place[kept].astype(np.int32), of[kept]]))
            self._flags[length] = np.zeros(len(unique), bool)
        self._documents = len(documents)

    def scan(self, texts: Iterable[str]) -> None:
        """Mark the n-grams of these texts."""
        hashed = hash_words(texts)
        for length, hashes in ngrams(hashed, list(self._known)).items():
            unique, table, _ = self._known[length]
            # The first bits rule out nearly all of them without a search.
            hashes = hashes[table[hashes >> np.uint64(65 - len(table).bit_length())]]
            place = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
            self._flags[length][place[unique[place] == hashes]] = True

    def found(self) -> np.ndarray:
        """Whether each document has been seen; bool."""
        seen = np.zeros(self._documents, bool)
        for length, (_, _, owned) in self._known.items():
            seen[owned[1][self._flags[length][owned[0]]]] = True
        return seen


def texts_in(value: object) -> Iterator[str]:
    """The texts inside a document of lm_eval."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)


def prepared_folder(run: Run) -> Path | None:
    """The folder of the prepared data that a run was trained on; None where it is gone."""
    fingerprint = run.record.get("data_fingerprint")
    # The recipe's output_dir may be relative to another folder, or the run may have been moved.
    roots = {run.path.parents[1], Path(run.recipe().output_dir).expanduser().resolve()}
    for file in sorted(file for root in roots for file in root.glob(".prepared/*/prepared.json")):
        prepared = find_prepared(file.parent)
        if prepared is not None and fingerprint is not None and prepared.fingerprint == fingerprint:
            return prepared.folder
    return None


def training_texts(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[str]]:
    """The training documents as text, in batches: without special tokens, in the order on disk."""
    store = DocumentStore.open(folder)
    trained = np.unique(SequenceIndex.load(folder / "train.npz").members)
    shown = sys.stderr.isatty() or len(trained) > 100_000
    tqdm.monitor_interval = 0
    with tqdm(
        total=len(trained), unit=" documents", desc="Searching the training data", disable=not shown, mininterval=10
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
        reason = f"the data that {run.path.name} was trained on is no longer in its output_dir (.prepared)."
        return {"ngram": size, "tasks": {}, "reason": reason}
    tasks = {row["task"]: row for row in rows if row["decides"]}
    owners: list[tuple[str, int]] = []
    documents: list[tuple[str, ...]] = []
    for leaf in dict.fromkeys(leaf for task in tasks for leaf in leaves(results[1], task)):
        once = {sample["doc_id"]: sample["doc"] for sample in samples[1].get(leaf, [])}
        owners += [(leaf, document) for document in once]
        documents += [tuple(texts_in(doc)) for doc in once.values()]
    # Documents that several tasks share must not make their words look like text of the task itself.
    distinct = {document: index for index, document in enumerate(dict.fromkeys(documents))}
    search, place = Search(list(distinct), size), [distinct[document] for document in documents]
    for texts in training_texts(folder, tokenizer):
        search.scan(texts)
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
