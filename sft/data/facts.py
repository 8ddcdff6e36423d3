"""Estimates how much data a recipe trains on, from the first rows of each source. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from math import ceil
from pathlib import Path

import numpy as np

from sft.data.formats import Text, Tokens, check_format, renamed, row_format, to_example
from sft.data.mixture import wanted_rows
from sft.data.readers import BadRow, Row, count_rows
from sft.data.sources import all_sources, open_source, source_files, split_and_slice, under_key
from sft.errors import DataError, ModelError
from sft.hub.data_facts import DataFacts
from sft.hub.names import is_on_hub
from sft.recipe.local_code import RowFunction, row_function
from sft.recipe.schema import Recipe, Source

_SAMPLE = 200
"""Rows of each source that the estimate reads."""


def inspect_data(recipe: Recipe, model_folder: str) -> DataFacts | None:
    """Estimate the size of the data from the first rows of every source; None if a source to train on is on the hub.

    The tokenizer in the model's folder counts the tokens; without one, as for a hub model, four bytes of text count as one. Raises
    DataError where a source does not exist, cannot be read, or has no usable columns; ModelError where the tokenizer cannot be read.
    """
    samples: list[tuple[list[Row], str, int]] = []
    for key, source in all_sources(recipe):
        with under_key(key):
            if source_files(source, recipe.output_dir) is not None:
                samples.append(_sample(source, recipe, row_function(recipe, key, source)))
                check_format(source, samples[-1][1], recipe.data)
    if any(is_on_hub(source) for source in recipe.sources):
        return None
    count = _token_counter(Path(model_folder) / "tokenizer.json")
    kept = 1 - recipe.data.held_out if isinstance(recipe.data.held_out, float) else 1.0
    # These are guesses: that a source has fewer rows than the recipe takes is an error only once they are counted.
    trained_on = list(zip(recipe.sources, samples, strict=False))
    available = [max(round(number * kept), source.rows or 1) for source, (_, _, number) in trained_on]
    totals = np.zeros(4)
    for (source, (rows, format, _)), number in zip(trained_on, wanted_rows(recipe.sources, available), strict=True):
        lengths = list(_lengths(rows, format, source, recipe, count))
        used = [min(length, recipe.data.max_length) for length, _ in lengths]
        trained = sum(length if recipe.data.loss_on == "all" else answer for length, answer in lengths)
        totals += np.array([len(used), sum(used), trained, sum(length**2 for length in used)]) * number / len(rows)
    documents, tokens, targets, squares = totals.tolist()
    if not documents:
        return None
    sequences = None if recipe.data.packing else ceil(documents)
    return DataFacts(int(documents), int(tokens), min(int(targets), int(tokens)), sequences, squares)


def _sample(source: Source, recipe: Recipe, function: RowFunction | None) -> tuple[list[Row], str, int]:
    """The first rows of a source, their format, and about how many rows it has."""
    opened = open_source(source, recipe.output_dir)
    read = [row for _, row in islice(opened.rows, _SAMPLE)]
    rows = [row for row in read if isinstance(row, dict)]
    if not rows:
        reason = "".join(f": {row.reason}" for row in read[:1] if isinstance(row, BadRow))
        raise DataError(f"{source.path} holds no rows in split={source.split} that can be read{reason}.")
    count = len(read)
    if count == _SAMPLE:  # there may be more
        number = _count(source_files(source, recipe.output_dir) or [], rows)
        count = max(count, len(range(number)[split_and_slice(source)[1]]))
    if function is not None:
        made = list(_converted(rows, function))
        if not made:
            raise DataError(f"{source.path}: data.function makes no row of the first {len(rows)}.")
        count, rows = ceil(count * len(made) / len(rows)), made
    return rows, row_format(rows, source), count


def _count(files: list[Path], rows: list[Row]) -> int:
    """About how many rows files have: parquet says it, of others the size does."""
    counts = [count_rows(file) for file in files]
    if None not in counts:
        return sum(number or 0 for number in counts)
    texts = (json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace") for row in rows)
    row_bytes = sum(len(text) + 2 for text in texts) / len(rows)
    # Text shrinks to about a quarter under gzip or zstd.
    size = sum(file.stat().st_size * (4 if file.suffix in (".gz", ".zst") else 1) for file in files)
    return round(size / row_bytes)


def _converted(rows: list[Row], function: RowFunction) -> Iterator[Row]:
    for row in rows:
        with suppress(ValueError):  # reported with its number when the data is prepared
            yield from function(row)


def _token_counter(tokenizer_file: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"{tokenizer_file} cannot be read: {error}. Copy it again.") from None

    def count(text: str) -> int:
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is not text
        return len(tokenizer.encode(text, add_special_tokens=False).ids) if tokenizer else len(text.encode()) // 4

    return count


def _lengths(
    rows: list[Row], format: str, source: Source, recipe: Recipe, count: Callable[[str], int]
) -> Iterator[tuple[int, int]]:
    """About how many tokens each row has, and how many of them are trained."""
    for row in rows:
        try:
            example = to_example(renamed(row, source), format, recipe.data, source)
        except (ValueError, TypeError, AttributeError):
            continue  # reported with its number when the data is prepared
        if isinstance(example, Tokens):
            yield len(example.labels), sum(label >= 0 for label in example.labels)
        elif isinstance(example, Text):
            trained = count(example.completion) + 1
            yield count(example.prompt) + trained, trained
        else:
            lengths = [count(message["content"]) for message in example.messages]
            answers = [length + 1 for length, keep in zip(lengths, example.trained, strict=True) if keep]
            # Most templates add five tokens to a turn: its start, the role, two line breaks and its end.
            yield sum(length + 5 for length in lengths), sum(answers)
