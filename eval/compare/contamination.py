"""Finds documents of the evaluation in the training data, by n-grams of their words.

The training data is searched as it streams by: the n-grams of a few thousand documents are held as hashes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from eval.compare.flips import texts_in
from eval.compare.results import Results, Samples, leaves
from eval.compare.verdicts import Metric
from sft.data.prepared import find_prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.run.directory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NGRAM = 13
"""Words that two texts do not share in a row by chance: as in GPT-3's own check."""

FEWEST_WORDS = 5
"""Words that a field of a document needs, or the document is too short to search for."""

_TOKENS_AT_A_TIME = 500_000

# Chinese, Japanese and Korean are written without spaces: each sign is a word.
_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SEPARATOR = np.uint64(0x5851F42D4C957F2D)
"""Stands between two texts, so that no n-gram reaches from one into the next."""


def words(text: str) -> list[str]:
    """The words of a text, in lower case, without punctuation.

    >>> words("Don't panic: it's 7 o'clock!")
    ['don', 't', 'panic', 'it', 's', '7', 'o', 'clock']
    """
    return _WORD.findall(text.lower())


def hash_words(texts: Iterable[str]) -> np.ndarray:
    """Hashes of the words of texts, in order, with a separator after each text; uint64."""
    parts = [np.zeros(0, np.uint64)]
    for text in texts:
        found = words(text)
        parts.append(np.fromiter((xxh3_64_intdigest(word.encode()) for word in found), np.uint64, len(found)))
        parts.append(np.array([_SEPARATOR]))
    return np.concatenate(parts)


def ngrams(hashed: np.ndarray, lengths: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each length n with the hashes of all n-grams; uint64."""
    wanted, so_far = set(lengths), hashed
    for length in range(1, max(wanted, default=0) + 1):
        if length > 1:
            so_far = so_far[:-1] * _FACTOR + hashed[length - 1 :] if len(so_far) else so_far
        if length in wanted:
            yield length, so_far


class _Ngrams(NamedTuple):
    """The n-grams of one length, and which documents have them."""

    hashes: np.ndarray
    """Sorted."""

    seen: np.ndarray
    """Whether the training data has each; bool."""

    places: np.ndarray
    """Of an n-gram in `hashes`, for each that a document has."""

    documents: np.ndarray
    """That document."""


class Search:
    """Finds the documents that share n-grams with a stream of texts.

    Args:
        documents: The texts of each document: its fields.
        size: n, in words. A shorter document is searched for as a whole, by its longest field.
        most_shared: An n-gram in more documents than this belongs to the task's own text, and does not count.
    """

    def __init__(self, documents: Sequence[Sequence[str]], size: int, most_shared: int = 10) -> None:
        self.too_short = np.zeros(len(documents), bool)
        owned: dict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for index, fields in enumerate(documents):
            hashed = sorted((hash_words([field])[:-1] for field in fields), key=len)
            chosen = [one for one in hashed if len(one) >= size]
            chosen = chosen or [one for one in hashed[-1:] if len(one) >= FEWEST_WORDS]
            self.too_short[index] = not chosen
            if chosen:
                length = min(size, len(chosen[0]))
                # Once per document, however many of its fields have it.
                hashes = np.unique(np.concatenate([one for text in chosen for _, one in ngrams(text, [length])]))
                owned[length].append((hashes, np.full(len(hashes), index, np.int32)))
        self._known: dict[int, _Ngrams] = {}
        for length, pairs in owned.items():
            hashes, owners = map(np.concatenate, zip(*pairs, strict=True))
            unique, places, counts = np.unique(hashes, return_inverse=True, return_counts=True)
            kept = counts[places] <= most_shared
            self._known[length] = _Ngrams(unique, np.zeros(len(unique), bool), places[kept], owners[kept])

    def scan(self, texts: Iterable[str]) -> None:
        """Mark the n-grams of these texts."""
        for length, hashes in ngrams(hash_words(texts), self._known):
            known = self._known[length]
            places = np.minimum(np.searchsorted(known.hashes, hashes), len(known.hashes) - 1)
            known.seen[places[known.hashes[places] == hashes]] = True

    def found(self) -> np.ndarray:
        """Whether each document shares an n-gram with the texts; bool."""
        found = np.zeros(len(self.too_short), bool)
        for known in self._known.values():
            found[known.documents[known.seen[known.places]]] = True
        return found


def prepared_folder(run: Run) -> Path | None:
    """The folder of the prepared data that a run was trained on; None where it is gone."""
    fingerprint = run.record.get("data_fingerprint")
    for file in sorted(run.output_dir.glob(".prepared/*/prepared.json")):
        prepared = find_prepared(file.parent)
        if prepared is not None and prepared.fingerprint == fingerprint:
            return prepared.folder
    return None


def training_texts(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[str]]:
    """Yield the training documents as text, in batches: without special tokens, in the order on disk."""
    store = DocumentStore.open(folder)
    trained = np.unique(SequenceIndex.load(folder / "train.npz").members)
    with tqdm(total=len(trained), unit=" documents", desc="Searching the training data", disable=None) as progress:
        batch = np.cumsum(store.documents["length"][trained], dtype=np.int64) // _TOKENS_AT_A_TIME
        for chosen in np.split(trained, np.flatnonzero(np.diff(batch)) + 1):
            ids = [store.document(int(index))[0].tolist() for index in chosen]
            yield tokenizer.batch_decode(ids, skip_special_tokens=True)
            progress.update(len(chosen))


def check_contamination(
    wanted: bool | int,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    metrics: list[Metric],
    results: Results,
    samples: Samples,
) -> dict[str, Any] | None:
    """Count the documents of each task that the run's training data holds, as eval.contamination wants it.

    Returns:
        `ngram`, and for each of `tasks` how many `documents` it has, how many were `found`, and how many are too short to search for
        (`too_short`). Where the data is gone `tasks` is empty, and `reason` says so. None where the recipe does not want it.
    """
    if wanted is False:
        return None
    size = NGRAM if wanted is True else wanted
    folder = prepared_folder(run)
    if folder is None:
        reason = f"the data that {run.path.name} was trained on is no longer in its output_dir (.prepared)."
        return {"ngram": size, "tasks": {}, "reason": reason}
    deciding = [metric for metric in metrics if metric.row["decides"]]
    parts = {metric.row["task"]: leaves(results, metric.row["task"]) for metric in deciding}
    texts = {
        (leaf, sample["doc_id"]): tuple(texts_in(sample["doc"]))
        for leaf in dict.fromkeys(leaf for task in parts.values() for leaf in task)
        for sample in samples.get(leaf, [])
    }
    # Documents that several tasks share must not make their words look like text of the task itself.
    places = {text: place for place, text in enumerate(dict.fromkeys(texts.values()))}
    search = Search(list(places), size)
    for some in training_texts(folder, tokenizer):
        search.scan(some)
    hits = search.found()
    tasks: dict[str, Any] = {}
    for task, inside in parts.items():
        mine = [places[text] for (leaf, _), text in texts.items() if leaf in inside]
        tasks[task] = {
            "documents": len(mine),
            "found": int(hits[mine].sum()),
            "too_short": int(search.too_short[mine].sum()),
        }
    return {"ngram": size, "tasks": tasks}
