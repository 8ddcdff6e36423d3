"""Estimates how much data a recipe trains on, from the first rows of each source. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from sft.data.formats import Example, Row, Text, Tokens, common_columns, renamed, row_format, to_example
from sft.data.mixture import wanted_rows
from sft.data.packing import pack
from sft.data.readers import count_rows
from sft.data.sources import first_look, source_files, split_and_slice, told_as
from sft.errors import ModelError
from sft.recipe.schema import Recipe, Source

_SAMPLE = 200
"""Rows of each source that the estimate reads."""

_PACKS = 16
"""Packs of which the last, which is seldom full, is a small part."""


@dataclass(frozen=True)
class DataFacts:
    """How much data one epoch holds: an estimate, or the count once the data is prepared."""

    documents: int
    tokens: int
    """Of all documents, prompts included, none longer than data.max_length."""

    trained_tokens: int
    sequences: int | None = None
    """Rows the trainer sees: packs with packing, else documents. None: as if every pack were full."""

    exact: bool = False
    """Counted on the prepared data, not estimated from the first rows."""


def _sample(files: list[Path], source: Source) -> tuple[list[Row], str, int]:
    """The first rows of a source, their format, and about how many rows it has."""
    rows, format, number = _sample_all(files, source)
    return rows, format, len(range(number)[split_and_slice(source)[1]])


def _sample_all(files: list[Path], source: Source) -> tuple[list[Row], str, int]:
    """The first rows of the first file, their format, and how many rows all files hold at that density."""
    rows = first_look(files, _SAMPLE)
    format = row_format(common_columns(rows), source, {name for row in rows for name in row})
    counts = [count_rows(file) for file in files]
    if None not in counts:
        return rows, format, sum(count or 0 for count in counts)
    bytes_a_row = sum(
        len(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace")) + 2 for row in rows
    ) / len(rows)
    # Text shrinks to about a quarter under gzip or zstd.
    size = sum(file.stat().st_size * (4 if file.suffix in (".gz", ".zst") else 1) for file in files)
    return rows, format, len(rows) if len(rows) < _SAMPLE and len(files) == 1 else round(size / bytes_a_row)


def inspect_data(recipe: Recipe, model_folder: str) -> DataFacts | None:
    """Estimate the size of the data from the first rows of every source.

    Args:
        recipe: Names the sources.
        model_folder: The model's folder, whose tokenizer counts the tokens. Without a tokenizer.json there, as for a hub model, four
            bytes of text count as one token.

    Returns:
        An estimate; None where a source is on the hub, which is not asked before the data is prepared.

    Raises:
        DataError: A source that does not exist, cannot be read, or has no usable columns.
    """
    from tokenizers import Tokenizer

    tokenizer_file = Path(model_folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"{tokenizer_file} cannot be read: {error}. Copy it again.") from None

    def count(text: str) -> int:
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        return len(tokenizer.encode(text, add_special_tokens=False).ids) if tokenizer else len(text.encode()) // 4

    for source in recipe.held_out_sources:
        with told_as("data.held_out"):
            files = source_files(source, recipe.output_dir)
            if files is not None:
                _sample(files, source)
    samples = []
    for source in recipe.sources:
        files = source_files(source, recipe.output_dir)
        if files is None:
            return None
        samples.append(_sample(files, source))
    kept = 1 - recipe.data.held_out if isinstance(recipe.data.held_out, float) else 1.0
    # The numbers are guesses: that a source has fewer rows than the recipe takes is said when they are counted.
    available = [
        max(round(number * kept), source.rows or 1)
        for (_, _, number), source in zip(samples, recipe.sources, strict=True)
    ]
    taken = wanted_rows(recipe.sources, available)
    documents = tokens = trained = sequences = 0.0
    for source, (rows, format, _), number in zip(recipe.sources, samples, taken, strict=True):
        sampled: list[int] = []
        for row in rows:
            try:
                example = to_example(renamed(row, source), format, recipe.data, source)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # reported with its number when the data is prepared
            length, answered = _lengths(example, count)
            share = number / len(rows)
            documents += share
            sampled.append(min(length, recipe.data.max_length))
            tokens += share * sampled[-1]
            trained += share * (length if recipe.data.loss_on == "all" else answered)
        sequences += (
            number
            / len(rows)
            * (_packs(sampled, number / len(rows), recipe.sequence_length) if recipe.data.packing else len(sampled))
        )
    if not documents:
        return None
    return DataFacts(int(documents), int(tokens), min(int(trained), int(tokens)), ceil(sequences))


def _packs(sampled: list[int], rows_for_each: float, capacity: int) -> float:
    """Packs that the documents of a sample need, where each stands for several: enough of them to fill some packs."""
    copies = min(ceil(rows_for_each), ceil(_PACKS * capacity / max(1, sum(sampled))))
    return len(pack(np.tile(sampled, max(1, copies)), capacity)[1]) / max(1, copies)


def _lengths(example: Example, count: Callable[[str], int]) -> tuple[int, int]:
    """About how many tokens a row has, and how many of them are trained."""
    if isinstance(example, Tokens):
        labels = example.labels or example.input_ids
        return len(labels), sum(label >= 0 for label in labels)
    if isinstance(example, Text):
        trained = count(example.completion) + 1
        return count(example.prompt) + trained, trained
    lengths = [count(turn["content"]) for turn in example.messages]
    # Most templates add five tokens to a turn: its start, the role, two line breaks and its end.
    return sum(length + 5 for length in lengths), sum(
        length + 1 for length, keep in zip(lengths, example.trained, strict=True) if keep
    )
