"""Words in a row as numbers, so that a training set is searched for the words of a few thousand documents as it streams by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

# Chinese, Japanese and Korean are written without spaces: each sign is a word.
_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BETWEEN = np.uint64(0x5851F42D4C957F2D)
"""Stands between two texts, so that no words in a row reach from one into the next."""

_MOST_BITS = 24


def words(text: str) -> list[str]:
    """The words of a text, in lower case, without punctuation.

    >>> words("Don't panic: it's 7 o'clock!")
    ['don', 't', 'panic', 'it', 's', '7', 'o', 'clock']
    """
    return _WORD.findall(text.lower())


def hash_words(texts: Iterable[str]) -> np.ndarray:
    """Hashes of the words of some texts, one after another, with a mark after each text; uint64."""
    parts = []
    for text in texts:
        found = words(text)
        parts.append(np.fromiter((xxh3_64_intdigest(word.encode()) for word in found), np.uint64, len(found)))
        parts.append(np.array([_BETWEEN]))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def ngrams(hashed: np.ndarray, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Hashes of all words in a row, for each length that was asked for; uint64."""
    found, wanted = {}, set(lengths)
    so_far = hashed
    for length in range(1, max(wanted, default=0) + 1):
        if length > 1:
            so_far = so_far[:-1] * _FACTOR + hashed[length - 1 :] if len(so_far) else so_far
        if length in wanted:
            found[length] = so_far
    return found


class Search:
    """Which documents have words in a row that a stream of texts has too.

    Args:
        documents: The texts of each document: its fields.
        size: How many words in a row.
        fewest: Documents of which no field has so many words have not enough to be told from others.
        most_shared: Words in a row that more documents than these have are the task's own, not one document's.
    """

    def __init__(self, documents: Sequence[Sequence[str]], size: int, fewest: int = 5, most_shared: int = 10) -> None:
        self.unsearchable = np.zeros(len(documents), bool)
        owners: dict[int, list[tuple[np.ndarray, int]]] = {}
        for index, fields in enumerate(documents):
            hashed = [hash_words([field])[:-1] for field in fields]
            long = [one for one in hashed if len(one) >= size]
            # A document that is shorter is looked for as a whole: by its longest field.
            chosen = long or sorted((one for one in hashed if len(one) >= fewest), key=len)[-1:]
            self.unsearchable[index] = not chosen
            if chosen:
                length = min(size, len(chosen[0]))
                # Once for each document, however many of its fields have it: documents are what is counted below.
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

    def look_at(self, texts: Iterable[str]) -> None:
        """Mark what these texts have."""
        hashed = hash_words(texts)
        for length, hashes in ngrams(hashed, list(self._known)).items():
            unique, table, _ = self._known[length]
            # Nearly all are dismissed by their first bits, without a search.
            hashes = hashes[table[hashes >> np.uint64(65 - len(table).bit_length())]]
            place = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
            self._flags[length][place[unique[place] == hashes]] = True

    def found(self) -> np.ndarray:
        """Whether each document has been seen; bool."""
        seen = np.zeros(self._documents, bool)
        for length, (_, _, owned) in self._known.items():
            seen[owned[1][self._flags[length][owned[0]]]] = True
        return seen
