"""Prepares a recipe's data once: read, rendered, tokenized, masked, mixed and packed, before any GPU waits for it.

A second process that prepares the same data waits until the first is done.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sft.data.documents import Counts, DocumentMaker, RowError
from sft.data.findings import Findings, find_in_all
from sft.data.formats import check_format, row_format, unread_columns
from sft.data.ledger import make_ledger
from sft.data.mixture import Mixture, mix
from sft.data.packing import pack
from sft.data.prepared import Prepared, entry_folder, find_prepared, hash_of
from sft.data.readers import BadRow
from sft.data.sources import all_sources, open_source, place, under_key
from sft.data.store import DocumentStore, DocumentWriter, SequenceIndex
from sft.data.tokenizer import CHOICES, check_vocabulary, load_tokenizer
from sft.data.workers import made_chunks
from sft.errors import DataError, ModelError, RunError
from sft.files import checksum
from sft.hub.model_facts import ModelFacts
from sft.hub.pins import pinned
from sft.recipe.local_code import row_function
from sft.recipe.schema import Recipe, Source

_KEPT_SECONDS = 90 * 24 * 3600
"""Entries that were not used for so long are removed."""

_FIRST_ROWS = 1000
"""Rows whose columns decide the format."""


def prepare(recipe: Recipe, model: ModelFacts, workers: int = 1) -> Prepared:
    """Prepare the recipe's data with so many processes, or find it prepared.

    Raises UserError where the data, the tokenizer or the chat template cannot be used.
    """
    folder = entry_folder(recipe, model)
    with _locked(folder):
        prepared = find_prepared(folder)
        if prepared is not None:
            return prepared
        tokenizer = load_tokenizer(pinned(recipe, model))
        if model.vocab_size is not None:
            check_vocabulary(tokenizer, recipe.model.new_tokens, model.vocab_size, recipe.model.name_or_path)
        work = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            work.mkdir()
            summary = _Preparation(recipe, tokenizer, work, workers).run()
            if entry_folder(recipe, model) != folder:
                raise DataError(
                    "The data or the tokenizer changed while it was prepared. Start again once it no longer changes."
                )
            (work / "prepared.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
            _sync(work)
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
            _remove_unused(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    prepared = find_prepared(folder)
    assert prepared is not None
    return prepared


def _sync(folder: Path) -> None:
    """Have every file of a folder on the disk, before it takes its name."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the entry's lock, and remove what an earlier process left unfinished."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as error:
        raise RunError(f"The prepared data cannot be written to {folder.parent}: {error}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another process is preparing this data; waiting for it.", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: both prepare, and the same bytes take the place
            yield
            return
        for unfinished in folder.parent.glob(f".{folder.name}.*"):
            if unfinished.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)
        yield


def _remove_unused(place: Path) -> None:
    """Remove entries that no run has used for long, and what preparations that were killed left. A later run prepares them again."""
    for folder in place.glob("*/"):
        with suppress(OSError):  # another process removes too
            used = folder / "prepared.json"
            if time.time() - (used if used.is_file() else folder).stat().st_mtime > _KEPT_SECONDS:
                gone = folder.rename(
                    folder.with_name(f".{folder.name}.{os.getpid()}")
                )  # for others it disappears at once
                shutil.rmtree(gone, ignore_errors=True)


class _Preparation:
    """Writes the files of one entry to a folder."""

    def __init__(self, recipe: Recipe, tokenizer: Any, folder: Path, workers: int) -> None:
        self.recipe, self.folder, self.workers = recipe, folder, workers
        self.maker = DocumentMaker(recipe.data, tokenizer)
        self.findings = Findings()
        # Of each source:
        self.names: list[str] = []
        self.formats: list[str] = []
        self.counts: list[Counts] = []
        self.file_starts: list[list[tuple[int, str]]] = []
        self.not_read: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Write the files; returns what prepared.json says."""
        started, recipe = time.monotonic(), self.recipe
        with DocumentWriter(self.folder) as writer:
            for number, (key, source) in enumerate(all_sources(recipe)):
                with under_key(key):
                    self._read(number, key, source, writer)
        documents = DocumentStore.open(self.folder).documents
        mixture = mix(documents, recipe.sources, recipe.data)
        if recipe.data.held_out is not None and len(documents) and not mixture.held_out.any():
            what = ", ".join(source.path for source in recipe.held_out_sources) or recipe.data.held_out
            raise DataError(f"data.held_out={what} holds out no usable row. Raise it, or leave it out.")
        train, held_out = _sequences(documents, mixture, recipe)
        train.save(self.folder / "train.npz")
        held_out.save(self.folder / "held_out.npz")
        find_in_all(documents, mixture, self.findings)
        lengths = documents["length"][train.members].astype(float)
        packs = len(train) if recipe.data.packing else None
        ledger = make_ledger(self.names, self.formats, self.counts, documents, mixture, packs, recipe.sequence_length)
        digests = [hash_of(self.folder / f"{name}.bin") for name in ("tokens", "trained", "documents")]
        parts = [*digests, train.digest(), held_out.digest()]
        files = sorted(file.name for file in self.folder.iterdir())
        return {
            "fingerprint": sha256("".join(parts).encode()).hexdigest(),
            "seconds": round(time.monotonic() - started, 2),
            "sequences": len(train),
            "squared_lengths": float((lengths**2).sum()),
            "held_out_sequences": len(held_out),
            "sizes": {name: (self.folder / name).stat().st_size for name in files},
            "checksums": {name: checksum(self.folder / name)[1] for name in files},
            "file_starts": self.file_starts,
            "not_read": self.not_read,
            "ledger": ledger,
            "findings": self.findings.as_json(self.names, self.file_starts, [count.rows_in for count in self.counts]),
        }

    def _read(self, number: int, key: str, source: Source, writer: DocumentWriter) -> None:
        """Turn the rows of one source into documents."""
        opened = open_source(source, self.recipe.output_dir, row_function(self.recipe, key, source))
        head = list(islice(opened.rows, _FIRST_ROWS))
        good = [row for _, row in head if isinstance(row, dict)]
        if not good:
            bad = next((row.reason for _, row in head if isinstance(row, BadRow)), None)
            reason = f": none of its first {len(head)} rows can be read ({bad})" if bad else ""
            raise DataError(f"{source.path} holds no rows in split={source.split}{reason}.")
        format = row_format(good, source)
        self._check_format(source, format)
        self.names.append(source.path if key == "data.train" else f"{source.path} (held out)")
        self.formats.append(format)
        self.counts.append(Counts())
        self.file_starts.append(opened.file_starts)
        if unread := unread_columns(good, format, source):
            self.not_read[self.names[-1]] = ", ".join(unread)
        # On a terminal a line that changes; elsewhere one now and then.
        options = {"desc": f"Preparing {source.path} ({format})", "mininterval": 0.2 if sys.stderr.isatty() else 30}
        tqdm.monitor_interval = 0  # no further thread: processes are forked
        with tqdm(unit=" rows", **options) as progress:
            try:
                for chunk in made_chunks(self.maker, source, number, format, chain(head, opened.rows), self.workers):
                    writer.write(chunk.tokens, chunk.trained, chunk.documents)
                    self.counts[-1].merge(chunk.counts)
                    self.findings.merge(chunk.findings)
                    progress.update(chunk.counts.rows_in)
            except RowError as error:
                where = place(source.path, opened.file_starts, error.row)
                raise DataError(f"{where}: {error.reason}. {error.remedy}") from None

    def _check_format(self, source: Source, format: str) -> None:
        check_format(source, format, self.recipe.data)
        if self.maker.renderer is None and source.chat and format not in ("text", "tokens"):
            raise ModelError(
                f"{self.recipe.model.name_or_path} has no chat template, which rows of the format {format} need ({source.path}). Set "
                f"{CHOICES} Prompts and completions are trained as they stand with `chat: false`."
            )


def _sequences(documents: np.ndarray, mixture: Mixture, recipe: Recipe) -> tuple[SequenceIndex, SequenceIndex]:
    """The sequences to train on, and the held-out ones."""
    train = np.repeat(np.arange(len(documents)), mixture.times)
    # Documents of one length are packed in their order: shuffled, so neighbours in a file do not stay neighbours.
    np.random.default_rng(recipe.data.seed).shuffle(train)
    indices = []
    for chosen in (train, np.flatnonzero(mixture.held_out)):
        if recipe.data.packing and len(chosen):
            members, ends = pack(documents["length"][chosen], recipe.sequence_length)
            indices.append(SequenceIndex(chosen[members], ends))
        else:
            indices.append(SequenceIndex(np.sort(chosen), np.arange(1, len(chosen) + 1)))
    return indices[0], indices[1]
