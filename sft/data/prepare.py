"""Prepare a recipe's data, once: read, rendered, tokenized, masked, mixed and packed, before any GPU waits for it.

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
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sft.data.audit import check_not_rendered, check_tokenizer, find_in_all, findings_json
from sft.data.chunks import made_chunks
from sft.data.document_maker import DocumentMaker
from sft.data.documents import Counts
from sft.data.findings import Findings
from sft.data.formats import common_columns, row_format, unread_columns
from sft.data.ledger import lengths_json, settle, total
from sft.data.mixture import Mixture, mix
from sft.data.packing import pack
from sft.data.prepared import Prepared, entry_folder, find_prepared
from sft.data.readers import BadRow
from sft.data.sources import open_source, told_as
from sft.data.store import DocumentStore, DocumentWriter, SequenceIndex
from sft.data.tokenizer import CHOICES, check_vocabulary, load_tokenizer
from sft.errors import DataError, ModelError, RunError
from sft.files import checksum
from sft.hub.model_facts import ModelFacts
from sft.hub.pins import pinned
from sft.recipe.schema import Recipe, Source

_KEPT = 10
"""Entries that stay whenever they were used."""

_UNUSED_SECONDS = 24 * 3600
"""Others stay as long after their last use: a start that has found one opens it within that time."""

_COMPARED_ROWS = 200
"""Rows of each source whose text is compared with what the tokenizer makes of it."""

_FIRST_ROWS = 1000
"""Rows whose columns decide the format."""


def prepare(recipe: Recipe, model: ModelFacts, workers: int = 1) -> Prepared:
    """Prepare the recipe's data, or find it prepared.

    Args:
        recipe: Names the data, the model and how rows become sequences.
        model: From inspect_model.
        workers: Processes that render and tokenize; 1 does it in this process.

    Raises:
        UserError: The data, the tokenizer or the chat template cannot be used.
    """
    folder = entry_folder(recipe, model)
    with _alone(folder):
        prepared = find_prepared(folder)
        if prepared is not None:
            return prepared
        tokenizer = load_tokenizer(pinned(recipe, model))
        if model.vocab_size is not None:
            check_vocabulary(tokenizer, recipe.model.new_tokens, model.vocab_size, recipe.model.name_or_path)
        work = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            work.mkdir()
            summary = _build(recipe, tokenizer, work, workers)
            if entry_folder(recipe, model) != folder:
                raise DataError(
                    "The data or the tokenizer has changed while it was prepared. Start again when nobody writes to it."
                )
            _write_durably(work / "prepared.json", summary)
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
            _prune(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    prepared = find_prepared(folder)
    assert prepared is not None
    return prepared


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the entry's lock; what an earlier process left half-written is removed."""
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
        _remove_left_overs(folder)
        yield


def _remove_left_overs(folder: Path) -> None:
    """Remove what preparations that were ended have left, of this entry and of others that nobody is making."""
    for left in folder.parent.glob(".*.*"):
        if not left.is_dir():
            continue
        entry = left.name[1:].partition(".")[0]
        with left.with_name(f".{entry}.lock").open("w") as lock:
            if entry != folder.name:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
            shutil.rmtree(left, ignore_errors=True)


def _prune(place: Path) -> None:
    """Remove entries that were not used for a day, but for the newest and those of runs that are unfinished or recent."""
    kept = set()
    for file in place.parent.glob("*/*/run.json"):
        with suppress(OSError, ValueError, AttributeError):
            record = json.loads(file.read_text(encoding="utf-8"))
            # The evaluation that follows a run looks into its data too.
            if record.get("status") != "finished" or time.time() - file.stat().st_mtime < _UNUSED_SECONDS:
                kept.add(record.get("data_fingerprint"))
    with suppress(OSError):  # another process prunes too
        used = {file.parent: file.stat().st_mtime for file in place.glob("[!.]*/prepared.json")}
        for folder in sorted(used, key=lambda entry: used[entry], reverse=True)[_KEPT:]:
            entry = find_prepared(folder)
            if time.time() - used[folder] < _UNUSED_SECONDS or (entry is not None and entry.fingerprint in kept):
                continue
            gone = folder.with_name(f".{folder.name}.{os.getpid()}")
            folder.rename(gone)  # at once for those who look for it
            shutil.rmtree(gone, ignore_errors=True)


def _write_durably(file: Path, value: object) -> None:
    with file.open("w", encoding="utf-8") as target:
        json.dump(value, target, indent=1, ensure_ascii=False)
        target.flush()
        os.fsync(target.fileno())


def _build(recipe: Recipe, tokenizer: Any, work: Path, workers: int) -> dict[str, Any]:
    """Write the entry's files; returns what prepared.json says."""
    started = time.monotonic()
    sources = (*recipe.sources, *recipe.held_out_sources)
    maker, findings, read = DocumentMaker(recipe.data, tokenizer), Findings(), []
    with DocumentWriter(work) as writer:
        for number, source in enumerate(sources):
            with told_as("data.train" if number < len(recipe.sources) else "data.held_out"):
                read.append(_read_source(source, number, recipe, maker, writer, findings, workers))
        digests = writer.digests()
    store = DocumentStore.open(work)
    mixture = mix(store.documents, recipe.sources, recipe.data)
    if recipe.data.held_out is not None and len(store.documents) and not mixture.held_out.any():
        what = ", ".join(source.path for source in recipe.held_out_sources) or recipe.data.held_out
        raise DataError(f"data.held_out={what} holds out no row that can be used. Raise it, or leave it out.")
    train, held_out = _sequences(store.documents, mixture, recipe)
    train.save(work / "train.npz")
    held_out.save(work / "held_out.npz")
    find_in_all(store, mixture, findings, tokenizer, np.concatenate([one.questions for one in read]))
    names, counts = [source.path for source in sources], [one.counts for one in read]
    names[len(recipe.sources) :] = [f"{name} (held out)" for name in names[len(recipe.sources) :]]
    accounts = settle(names, counts, store.documents, mixture)
    for account, one in zip(accounts, read, strict=True):
        account.format = one.format
    everything = total(accounts)
    space = len(train) * recipe.sequence_length
    packing = {"packs": len(train), "fill": everything.used / space if space else 0, "padding": space - everything.used}
    fingerprint = sha256("".join([*digests.values(), train.digest(), held_out.digest()]).encode()).hexdigest()
    files = sorted(file.name for file in work.iterdir())
    return {
        "fingerprint": fingerprint,
        "seconds": round(time.monotonic() - started, 2),
        "sequences": len(train),
        "held_out_sequences": len(held_out),
        "sizes": {name: (work / name).stat().st_size for name in files},
        "checksums": {name: checksum(work / name)[1] for name in files},
        "file_starts": [one.file_starts for one in read],
        "not_read": {name: ", ".join(one.unread) for name, one in zip(names, read, strict=True) if one.unread},
        "ledger": {
            "sources": [account.as_json(everything.used) for account in accounts],
            "total": everything.as_json(everything.used),
            "packing": packing if recipe.data.packing else None,
            "lengths": lengths_json(counts),
        },
        "findings": findings_json(
            findings, names, [one.file_starts for one in read], [account.rows_in for account in accounts]
        ),
    }


@dataclass(frozen=True)
class _Read:
    """What is known of a source once its rows are documents."""

    counts: Counts
    format: str
    file_starts: list[tuple[int, str]]
    unread: list[str]
    """Columns that nothing looks at."""

    questions: np.ndarray
    """Of each document, as Chunk has them."""


def _read_source(
    source: Source,
    number: int,
    recipe: Recipe,
    maker: DocumentMaker,
    writer: DocumentWriter,
    findings: Findings,
    workers: int,
) -> _Read:
    opened = open_source(source, recipe.output_dir)
    head = list(islice(opened.rows, _FIRST_ROWS))
    good = [row for _, row in head if not isinstance(row, BadRow)]
    if not good:
        reason = f": none of its first {len(head)} rows can be read ({head[0][1].reason})" if head else ""  # type: ignore[union-attr]
        where = f" in split={source.split}" if "[" in source.split else ""
        raise DataError(f"{source.path} holds no rows{where}{reason}.")
    columns = {name for row in good for name in row}
    format = row_format(common_columns(good), source, columns)
    if recipe.data.loss_on == "completion" and format not in ("prompt_completion", "alpaca"):
        raise DataError(
            f"data.loss_on=completion, and {source.path} is of the format {format}, which has no completion. Set data.loss_on to "
            "assistant, last_assistant or all."
        )
    if not source.chat and format != "prompt_completion":
        raise DataError(
            f"data.train: chat=false is for rows of prompt and completion, and {source.path} is of the format {format}."
        )
    if maker.renderer is None and source.chat and format not in ("text", "tokens"):
        raise ModelError(
            f"{recipe.model.name_or_path} has no chat template, which rows of the format {format} need ({source.path}). Set {CHOICES} "
            "Prompts and completions are trained as they stand with `chat: false`."
        )
    check_not_rendered(source, format, good, recipe, maker)
    check_tokenizer(source, number, maker.texts(source, format, head[:_COMPARED_ROWS]), maker.tokenizer, findings)
    counts, questions = Counts(), [np.zeros((0, 2), np.uint64)]
    # On a terminal a line that changes; elsewhere one now and then.
    options = {"desc": f"Preparing {source.path} ({format})", "mininterval": 0.2 if sys.stderr.isatty() else 30}
    tqdm.monitor_interval = 0  # no thread beside: processes are forked
    with tqdm(unit=" rows", **options) as progress:
        for chunk in made_chunks(maker, source, number, format, chain(head, opened.rows), workers):
            if chunk.error is not None:
                row, reason = chunk.error
                raise DataError(f"{opened.where(row)}: {reason}.")
            writer.write(chunk)
            counts.merge(chunk.counts)
            findings.merge(chunk.findings)
            questions.append(chunk.questions)
            progress.update(chunk.counts.rows_in)
    unread = unread_columns(columns, format, source)
    return _Read(counts, format, opened.file_starts, unread, np.concatenate(questions))


def _sequences(documents: np.ndarray, mixture: Mixture, recipe: Recipe) -> tuple[SequenceIndex, SequenceIndex]:
    """The sequences to train on, and the held-out ones."""
    train = np.repeat(np.arange(len(documents)), mixture.times)
    # Documents of one length go where their order puts them: drawn, so that neighbours in a file do not stay neighbours.
    np.random.default_rng(recipe.data.seed).shuffle(train)
    indices = []
    for chosen in (train, np.flatnonzero(mixture.held_out)):
        if recipe.data.packing and len(chosen):
            members, ends = pack(documents["length"][chosen], recipe.sequence_length)
            indices.append(SequenceIndex(chosen[members], ends))
        else:
            indices.append(SequenceIndex(np.sort(chosen), np.arange(1, len(chosen) + 1)))
    return indices[0], indices[1]
