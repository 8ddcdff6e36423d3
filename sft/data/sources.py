"""Finds the rows of a recipe's sources: local files and folders, or a dataset on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sft.data.readers import BadRow, Row, read_rows, suffix_of, without_nulls
from sft.data.store import ROWS
from sft.errors import DataError
from sft.hub.demo import make_demo
from sft.hub.names import BUILTIN, SUFFIXES, hub_answers, hub_commit, hub_id_problem, is_on_hub, is_pattern
from sft.recipe.load import find_file
from sft.recipe.local_code import RowFunction
from sft.recipe.schema import Recipe, Source

_METADATA = ("dataset_info.json", "state.json", "dataset_infos.json", "dataset_dict.json")
"""What `save_to_disk` writes beside its data."""

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "development", "dev", "evaluation", "eval"), "validation"
)
"""Words for a split in file names, and its name on the hub."""


@contextmanager
def under_key(key: str) -> Iterator[None]:
    """Name the recipe's key in the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {error}") from None


def all_sources(recipe: Recipe) -> list[tuple[str, Source]]:
    """The sources to train on and those that are held out, each with its key in the recipe."""
    train = [("data.train", source) for source in recipe.sources]
    return train + [("data.held_out", source) for source in recipe.held_out_sources]


# Files


def source_files(source: Source, output_dir: str) -> list[Path] | None:
    """The local files of a source, or None for a dataset on the hub.

    Raises DataError where the path does not exist, or holds nothing that can be read.
    """
    if source.path == BUILTIN:
        return [make_demo(Path(output_dir)).train]
    if is_on_hub(source):
        if problem := hub_id_problem(source.path):
            raise DataError(f"{source.path}: {problem}.")
        return None
    path = find_file(source.path)
    if source.name is not None or source.revision is not None or source.streaming:
        raise DataError(
            f"{source.path} is a local path: `name`, `revision` and `streaming` are for datasets on the hub. Remove them."
        )
    split, _ = split_and_slice(source)
    if split != "train" and not path.is_dir():
        raise DataError(f"split={source.split} of {source.path}: a file has no splits. Use train, or train[:1000].")
    return local_files(path, split)


def split_and_slice(source: Source) -> tuple[str, slice]:
    """The two parts of a split such as `train[10:20]`.

    Raises DataError where it is of another form, such as a percentage, which would need the number of rows first.
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", source.split)
    if match is None:
        raise DataError(f"split={source.split} of {source.path} is not understood. Write train, or train[10:20].")
    start, stop = (int(number) if number else None for number in match.groups()[1:])
    return match[1], slice(start, stop)


def local_files(path: Path, split: str = "train") -> list[Path]:
    """The data files that a path stands for, in the order they are read: a file, a folder, a pattern, or a `save_to_disk` folder.

    `split` is that of a saved DatasetDict, or of a folder whose file names say their split. Raises DataError where nothing is there, it
    is not a data file, or the folder holds several splits.
    """
    try:
        if path.is_dir():
            return _saved_dataset(path, split) or _folder(path, split)
        if path.exists():
            if not suffix_of(path):
                raise DataError(f"{path} is not a data file. Use one of {', '.join(SUFFIXES)}.")
            return [path]
        return _matches(path)
    except (OSError, ValueError) as error:  # no permission; `**` beside other characters
        raise DataError(f"{path} cannot be opened: {error}.") from None


def _data_files(folder: Path, pattern: str) -> list[Path]:
    # A set: pathlib finds a file twice if two `**` lead to it.
    found = {file for file in folder.glob(pattern) if suffix_of(file) and file.name not in _METADATA and file.is_file()}
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _matches(path: Path) -> list[Path]:
    first = next((index for index, part in enumerate(path.parts) if is_pattern(part)), None)
    if first is None:
        raise DataError(f"there is no file or folder {path} (looked in {Path.cwd()}).")
    files = _data_files(Path(*path.parts[:first]), str(Path(*path.parts[first:])))
    if not files:
        raise DataError(f"no data file matches {path}. Use one of {', '.join(SUFFIXES)}.")
    return files


def _folder(path: Path, split: str) -> list[Path]:
    """The files of one split in a folder, or, as in downloaded datasets, in one folder below it."""
    files = _data_files(path, "**/*")
    if not files:
        raise DataError(f"the folder {path} holds no data file. Use one of {', '.join(SUFFIXES)}.")
    inside = {file: file.relative_to(path) for file in files}
    folders = {at.parent.parent if _split_named(at.parent.name) else at.parent for at in inside.values()}
    if len(folders) > 1:
        found = ", ".join(sorted(map(str, folders))[:9])
        raise DataError(f"{path} holds data in several folders ({found}). Name one, or a pattern ({path}/**/*.jsonl).")
    splits = {file: _split_named(at.parent.name) or _split_named(at.name.split(".")[0]) for file, at in inside.items()}
    names = {name for name in splits.values() if name}
    if split == "train" and names <= {"train"}:
        return files
    if None in splits.values():
        others = ", ".join(file.name for file, name in splits.items() if name not in (None, "train")) or "train"
        raise DataError(
            f"the folder {path} holds files of several splits ({others} among them) and files of none. Name the file to train on, or a "
            f"pattern such as {path}/train*."
        )
    chosen = [file for file, name in splits.items() if name == _SPLITS.get(split, split)]
    if not chosen:
        raise DataError(
            f"the folder {path} has no split `{split}`. It has: {', '.join(sorted(names))}. Set `split` to one."
        )
    return chosen


def _split_named(name: str) -> str | None:
    """The split that a file or folder name says.

    >>> _split_named("train_sft-00000-of-00003"), _split_named("my-dev"), _split_named("attestation")
    ('train_sft', 'validation', None)
    """
    if shard := re.fullmatch(r"(.+)-\d{5}-of-\d{5}(-\w+)?", name):
        # `save_to_disk` names the shards of every split `data`.
        return None if shard[1] == "data" else _SPLITS.get(shard[1], shard[1])
    word = re.search(rf"(?<![a-z])({'|'.join(_SPLITS)})(?![a-z])", name.lower())
    return _SPLITS[word[1]] if word else None


def _saved_dataset(path: Path, split: str) -> list[Path]:
    """The files of a folder that `save_to_disk` wrote; none of another folder."""
    if not (path / "dataset_dict.json").is_file() and not (path / "state.json").is_file():
        return []
    import datasets

    saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if split not in splits:
        raise DataError(f"{path} has no split `{split}`. It has: {', '.join(splits)}.")
    return [Path(file["filename"]) for file in splits[split].cache_files]


# Rows


Numbered = tuple[int, Row | BadRow | None]
"""A row with its number in its source, from 1; None: data.function leaves it out."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source."""

    rows: Iterator[Numbered]
    file_starts: list[tuple[int, str]]
    """For each file opened so far: the number of rows before it, and its name."""


def place(path: str, file_starts: list[tuple[int, str]], row: int) -> str:
    """The file of a row, and its number there.

    >>> place("data", [(0, "a.jsonl"), (10, "b.jsonl")], 12)
    'b.jsonl, row 2'
    """
    row %= ROWS
    # Of an empty file and the one after it, the later.
    before, name = next(((start, name) for start, name in reversed(file_starts) if start < row), (0, path))
    return f"{name}, row {row - before}"


def open_source(source: Source, output_dir: str, function: RowFunction | None = None) -> SourceRows:
    """Open a source, whose rows go through a function. Raises DataError where it cannot be read; also while its rows are taken."""
    files = source_files(source, output_dir)
    if files is None:
        return SourceRows(_converted(enumerate(_hub_rows(source), start=1), function), [])
    starts: list[tuple[int, str]] = []

    def rows() -> Iterator[tuple[int, Row | BadRow]]:
        number = 0
        for file in files:
            starts.append((number, str(file)))
            for row in read_rows(file):
                number += 1
                yield number, row

    wanted = split_and_slice(source)[1]
    return SourceRows(_converted(islice(rows(), wanted.start, wanted.stop), function), starts)


def _converted(rows: Iterator[tuple[int, Row | BadRow]], function: RowFunction | None) -> Iterator[Numbered]:
    """What a function makes of each row: one, several or none."""
    for number, row in rows:
        made: list[Row | BadRow | None] = [row]
        if function is not None and not isinstance(row, BadRow):
            try:
                made = [*function(row)] or [None]
            except ValueError as error:
                made = [BadRow(str(error))]
        yield from ((number + ROWS * place, one) for place, one in enumerate(made))


def _hub_rows(source: Source) -> Iterator[Row]:
    import datasets

    revision = source.revision
    if hub_answers():
        revision = hub_commit(source) or revision
    else:
        # What is cached is found at once, and what is not fails without a minute of retries.
        import huggingface_hub

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    options: dict[str, Any] = {"revision": revision, "streaming": source.streaming}
    try:
        # A streamed split takes no slice in its name.
        split, wanted = split_and_slice(source) if source.streaming else (source.split, slice(None))
        dataset = datasets.load_dataset(source.path, source.name, split=split, **options)
        yield from map(without_nulls, islice(iter(dataset), wanted.start, wanted.stop))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"{source.path} is not a local path, and the dataset cannot be loaded from the hub: {first.rstrip('.')}. Download it where "
            "there is a network (hf download --repo-type dataset), or name a local file."
        ) from None
