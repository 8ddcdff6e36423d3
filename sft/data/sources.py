"""The rows of a recipe's sources, wherever they are: files, or a dataset on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sft.data.formats import Row
from sft.data.readers import BadRow, first_rows, local_files, read_rows, without_nulls
from sft.errors import DataError
from sft.hub.demo import make_demo
from sft.hub.names import BUILTIN, hub_answers, hub_commit, is_on_hub, is_pattern
from sft.recipe.load import find_file
from sft.recipe.schema import Source


@contextmanager
def told_as(key: str) -> Iterator[None]:
    """Have messages about a source name the key that it stands under."""
    try:
        yield
    except DataError as error:
        # At its start alone: a path in the message may hold the same words.
        raise DataError(re.sub(r"^data\.train\b", key, str(error))) from None


def source_files(source: Source, output_dir: str) -> list[Path] | None:
    """The local files of a source, or None where it is a hub id.

    Raises:
        DataError: A path that does not exist, or holds nothing that is read.
    """
    if source.path == BUILTIN:
        return [make_demo(Path(output_dir)).train]
    if is_on_hub(source):
        return None
    pattern = is_pattern(source.path)
    path = find_file(source.path)
    if source.name is not None or source.revision is not None or source.streaming:
        raise DataError(
            f"data.train: {source.path} is a local path, which has no `name`, no `revision` and nothing to stream. Remove them."
        )
    if not path.exists() and not pattern:
        raise DataError(f"data.train: there is no file or folder {source.path} (looked in {Path.cwd()}).")
    split, wanted = split_and_slice(source)
    if split != "train" and not path.is_dir():
        raise DataError(
            f"data.train: split={source.split} of the local path {source.path}: files have no splits. Name the file, or take "
            "rows of it with train[:1000]."
        )
    assert wanted.step is None
    return local_files(path, split)


def split_and_slice(source: Source) -> tuple[str, slice]:
    """`train[10:20]` as its two parts, of a local path.

    Raises:
        DataError: Another form, such as per cent, which would need the number of rows first.
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", source.split)
    if match is None:
        raise DataError(
            f"data.train: split={source.split} of the local path {source.path} is not understood. Write train, or train[10:20] for some "
            "of its rows."
        )
    start, stop = (int(number) if number else None for number in match.groups()[1:])
    return match[1], slice(start, stop)


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source, numbered from 1, and where each stands for a person."""

    rows: Iterator[tuple[int, Row | BadRow]]
    path: str
    file_starts: list[tuple[int, str]]
    """For each file begun so far: the number of rows before it, and its name."""

    def where(self, row: int) -> str:
        """`file, row N`."""
        return place(self.path, self.file_starts, row)


def place(path: str, file_starts: list[tuple[int, str]], row: int) -> str:
    """Where a row of a source stands: its file, and its number there.

    >>> place("data", [(0, "a.jsonl"), (10, "b.jsonl")], 12)
    'b.jsonl, row 2'
    """
    # Of an empty file and the one behind it, the later.
    before, name = next(((start, name) for start, name in reversed(file_starts) if start < row), (0, path))
    return f"{name}, row {row - before}"


def open_source(source: Source, output_dir: str) -> SourceRows:
    """Open a source.

    Raises:
        DataError: It does not exist or cannot be read; also while its rows are taken.
    """
    files = source_files(source, output_dir)
    if files is None:
        return SourceRows(enumerate(_hub_rows(source), start=1), source.path, [])
    starts: list[tuple[int, str]] = []

    def rows() -> Iterator[tuple[int, Row | BadRow]]:
        number = 0
        for file in files:
            starts.append((number, str(file)))
            for row in read_rows(file):
                number += 1
                yield number, row

    wanted = split_and_slice(source)[1]
    return SourceRows(islice(rows(), wanted.start, wanted.stop), source.path, starts)


def first_look(files: list[Path], count: int) -> list[Row]:
    """The first good rows of the first file that has any.

    Raises:
        DataError: There is none.
    """
    for file in files:
        rows = first_rows(file, count)
        good = [row for row in rows if not isinstance(row, BadRow)]
        if good:
            return good
        if rows and isinstance(rows[0], BadRow):
            raise DataError(f"{file}: none of its first rows can be read: {rows[0].reason}. Correct the file.")
    names = ", ".join(map(str, files[:3]))
    raise DataError(f"{names} hold{'s' if len(files) == 1 else ''} no rows.")


def _hub_rows(source: Source) -> Iterator[Row]:
    import datasets

    revision = source.revision
    if hub_answers():
        revision = hub_commit(source) or revision
    else:
        # So that what is cached is found at once, and what is not is told without a minute of retries.
        import huggingface_hub

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    options: dict[str, Any] = {"revision": revision, "streaming": source.streaming}
    try:
        # A streamed split takes no slice in its name.
        split, wanted = split_and_slice(source) if source.streaming else (source.split, slice(None))
        dataset = datasets.load_dataset(source.path, source.name, split=split, **options)
        # Columnar: a key that one row has is null in all others.
        yield from map(without_nulls, islice(iter(dataset), wanted.start, wanted.stop))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"data.train: {source.path} is no local path, and the hub's dataset cannot be loaded: {first.rstrip('.')}. "
            "Download it where there is a network (hf download --repo-type dataset), or give a local file."
        ) from None
