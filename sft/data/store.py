"""Stores prepared documents on disk: flat arrays that every rank maps into its memory.

| file             | content                                                           |
|------------------|-------------------------------------------------------------------|
| tokens.bin       | int32, all documents one after another                            |
| trained.bin      | uint8, 1 where a token is trained                                 |
| documents.bin    | one DOCUMENT record each: length, counts, where the row stands    |
| train.npz        | the sequences to train on: members (documents) and ends           |
| held_out.npz     | the same of the rows that are held out                            |
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 2**40
"""More rows than a source has: the second row that data.function makes of row 7 has the number ROWS + 7."""

DOCUMENT = np.dtype(
    [
        ("length", "<i4"),
        ("trained", "<i4"),  # target tokens
        ("cut", "<i4"),  # tokens that overlong=truncate cut off
        ("lost", "<i4"),  # with overlong=split, tokens of the row's pieces without a target; on its first document
        ("source", "<i4"),
        ("row", "<i8"),  # number of the row in its source, from 1
        ("digest", "<u8"),  # of the row's tokens
        ("answer", "<u8"),  # of its target tokens
    ]
)
_ARRAYS: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "trained": np.dtype("u1"), "documents": DOCUMENT}


class DocumentWriter:
    """Writes documents, in order, to tokens.bin, trained.bin and documents.bin of a folder."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in _ARRAYS}

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # a disk that is full at one file leaves none of them open
            for file in self._files.values():
                stack.callback(file.close)

    def write(self, tokens: np.ndarray, trained: np.ndarray, documents: np.ndarray) -> None:
        """Append documents: the token ids of all, one after another, the loss mask, and a DOCUMENT record for each."""
        for (name, dtype), array in zip(_ARRAYS.items(), (tokens, trained, documents), strict=True):
            self._files[name].write(array.astype(dtype, copy=False).tobytes())


@dataclass(frozen=True)
class DocumentStore:
    """All documents of a prepared recipe, mapped into memory."""

    tokens: np.ndarray
    trained: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    """First token of each document."""

    @classmethod
    def open(cls, folder: Path) -> DocumentStore:
        """Map the files in a folder into memory."""
        arrays: dict[str, np.ndarray] = {}
        for name, dtype in _ARRAYS.items():
            file = folder / f"{name}.bin"
            # An empty file cannot be mapped.
            arrays[name] = np.memmap(file, dtype, "r") if file.stat().st_size else np.zeros(0, dtype)
        lengths = arrays["documents"]["length"].astype(np.int64)
        return cls(**arrays, starts=np.cumsum(lengths) - lengths)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and loss mask of one document."""
        start = self.starts[index]
        place = slice(start, start + self.documents["length"][index])
        return self.tokens[place], self.trained[place]


@dataclass(frozen=True)
class SequenceIndex:
    """Which documents make up each sequence."""

    members: np.ndarray
    """int64, indices of documents, sequence by sequence."""

    ends: np.ndarray
    """int64, for each sequence the end of its stretch of members."""

    def __len__(self) -> int:
        return len(self.ends)

    def of(self, sequence: int) -> np.ndarray:
        """The documents of one sequence."""
        return self.members[self.ends[sequence - 1] if sequence else 0 : self.ends[sequence]]

    def save(self, file: Path) -> None:
        """Write it to disk."""
        np.savez(file, members=self.members, ends=self.ends)

    @classmethod
    def load(cls, file: Path) -> SequenceIndex:
        """Read a file that `save` wrote."""
        with np.load(file) as arrays:
            return cls(arrays["members"], arrays["ends"])

    def digest(self) -> str:
        """SHA-256 over both arrays."""
        return sha256(self.members.astype("<i8").tobytes() + self.ends.astype("<i8").tobytes()).hexdigest()
