"""Every row of a local data source, streaming: the files that a path stands for, and the rows of each.

| suffix          | what is read                                                               |
|-----------------|----------------------------------------------------------------------------|
| .jsonl          | a line of JSON for each row; also an array                                 |
| .json           | an array of objects, or objects one after another, such as lines of JSON   |
| .csv            | a header, then a row of strings for each record                            |
| .parquet .arrow | columns; of Arrow both the stream form and the file form                   |

The text formats may be compressed, with .gz or .zst behind the suffix. No torch: the launcher looks into files here.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from sft.data.columnar_rows import columnar_count, columnar_rows, without_nulls
from sft.data.csv_rows import csv_rows
from sft.data.json_rows import BOM, BadRow, Row, json_rows
from sft.errors import DataError
from sft.hub.names import SUFFIXES

__all__ = [
    "BadRow",
    "Row",
    "count_rows",
    "first_rows",
    "local_files",
    "read_rows",
    "suffix_of",
    "without_nulls",
]

_TEXTS = (".json", ".jsonl", ".csv")
_COMPRESSIONS = {".gz": "gzip-compressed", ".zst": "zstd-compressed"}

_NO_ROWS = ("dataset_info.json", "state.json", "dataset_infos.json", "dataset_dict.json")
"""What `save_to_disk` writes beside its data."""

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "development", "dev", "evaluation", "eval"), "validation"
)
"""What names of files call a split, and its name on the hub."""

_BUFFER = 2**20
"""Bytes that are read from a file at once."""

_SIGNATURES = {
    b"\x1f\x8b": ("gzip-compressed", ".gz"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", ".zst"),
    b"PAR1": ("a parquet file", ".parquet"),
    b"ARROW1": ("an Arrow file", ".arrow"),
    b"\xff\xff\xff\xff": ("an Arrow file", ".arrow"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
    b"version https://git-lfs": ("only a pointer of Git LFS", "fetch the file itself with `git lfs pull`"),
}
"""How a file that is no text starts: what it is, and the suffix it should have or what to do."""

_EXPECTED = {**_COMPRESSIONS, ".parquet": "a parquet file", ".arrow": "an Arrow file"}


def suffix_of(file: Path) -> str:
    """The suffix with compression removed, "" where the kind of file is not read.

    >>> suffix_of(Path("rows.jsonl.gz")), suffix_of(Path("rows.txt"))
    ('.jsonl', '')
    """
    name = file.name.lower()
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return suffix.removesuffix(".gz").removesuffix(".zst")


def local_files(path: Path, split: str = "train") -> list[Path]:
    """The data files a path stands for, in the order they are read.

    Args:
        path: A file; a folder of files; a pattern such as `data/**/*.parquet`; a folder of `save_to_disk`.
        split: Which split of a saved DatasetDict, or of a folder whose files say in their names of which they are.

    Raises:
        DataError: A kind of file that is not read, nothing there, or files of several splits.
    """
    try:
        if path.is_dir():
            return _saved(path, split) or _folder(path, split)
        if not path.exists():
            return _matches(path)
    except (OSError, ValueError) as error:  # no permission; `**` beside other characters
        raise DataError(f"{path} cannot be looked into: {error}.") from None
    if not suffix_of(path):
        raise DataError(f"{path} is not a file that is read: use {', '.join(SUFFIXES)}.")
    return [path]


def _has_rows(file: Path, folder: Path) -> bool:
    """Whether a file in a folder, or below it, is one to read."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and bool(suffix_of(file)) and file.name not in _NO_ROWS and file.is_file()


def _matches(path: Path) -> list[Path]:
    magic = next((index for index, part in enumerate(path.parts) if re.search(r"[*?[]", part)), None)
    if magic is None:
        raise DataError(f"There is no file or folder {path}.")
    folder, pattern = Path(*path.parts[:magic]), str(Path(*path.parts[magic:]))
    # A set: pathlib finds a file twice where two `**` lead to it.
    files = sorted({file for file in folder.glob(pattern) if _has_rows(file, folder)})
    if not files:
        raise DataError(f"No file matches {path}. Files that are read: {', '.join(SUFFIXES)}.")
    return files


def _folder(path: Path, split: str) -> list[Path]:
    """The files of one split in a folder; where it holds none, in a folder below it, as downloaded datasets have them."""
    files = [file for file in path.iterdir() if _has_rows(file, path)]
    if not files:
        files = [file for pattern in ("*/*", "*/*/*") for file in path.glob(pattern) if _has_rows(file, path)]
        folders = {file.parent.parent if _split_named(file.parent.name) else file.parent for file in files}
        if len(folders) > 1:
            raise DataError(
                f"The folder {path} holds data in several folders ({', '.join(sorted(_below(folder, path) for folder in folders)[:9])}). "
                f"Name one of them, or a pattern such as {path}/**/*.jsonl."
            )
    if not files:
        raise DataError(
            f"The folder {path} holds no {', '.join(SUFFIXES)} file. For files in folders below it, "
            f"name a pattern such as {path}/**/*.jsonl."
        )
    splits = {file: split_of(file, path) for file in sorted(files)}
    named = sorted({name for name in splits.values() if name})
    if split == "train" and named in ([], ["train"]):
        return list(splits)
    if None in splits.values():
        others = ", ".join(file.name for file, name in splits.items() if name not in (None, "train"))
        raise DataError(
            f"The folder {path} holds files of several splits ({others or 'train'} among them), and files of none. "
            f"Name the file to train on, or a pattern such as {path}/train*."
        )
    chosen = [file for file, name in splits.items() if name == _SPLITS.get(split, split)]
    if not chosen:
        raise DataError(
            f"The folder {path} has no split `{split}`. It has: {', '.join(named)}. Set `split` of the source to one of them."
        )
    return chosen


def _below(folder: Path, path: Path) -> str:
    return str(folder.relative_to(path))


def split_of(file: Path, folder: Path) -> str | None:
    """Which split a file in or below a folder is of, by the names; None where they do not say."""
    *folders, name = file.relative_to(folder).parts
    return next((split for part in (*folders, name.split(".")[0]) if (split := _split_named(part))), None)


def _split_named(name: str) -> str | None:
    """The split that a name says.

    >>> _split_named("train_sft-00000-of-00003"), _split_named("my-dev"), _split_named("attestation")
    ('train_sft', 'validation', None)
    """
    if shard := re.fullmatch(r"(.+)-\d{5}-of-\d{5}(-\w+)?", name):
        # `save_to_disk` names every shard so, of whatever split.
        return None if shard[1] == "data" else _SPLITS.get(shard[1], shard[1])
    word = f"({'|'.join(_SPLITS)})([-_ ]?(set|data))?"
    found = re.match(rf"{word}(?![a-z])", name.lower()) or re.search(rf"(?<![a-z]){word}$", name.lower())
    return _SPLITS[found[1]] if found else None


def _saved(path: Path, split: str) -> list[Path]:
    """The files of a folder that `save_to_disk` wrote, none where it is another folder."""

    def listed(name: str, key: str) -> list[Any]:
        try:
            return list(json.loads((path / name).read_text(encoding="utf-8")).get(key) or [])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise DataError(f"{path / name} cannot be read as json: {error}. Save the dataset again.") from None

    if splits := listed("dataset_dict.json", "splits"):
        if split not in splits:
            raise DataError(f"{path} has no split `{split}`. It has: {', '.join(map(str, splits))}.")
        return local_files(path / split)
    files = [path / part["filename"] for part in listed("state.json", "_data_files")]
    if files and split != "train":
        raise DataError(f"{path} is one saved dataset and has no split `{split}`. Leave `split` out.")
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{path} lacks {', '.join(missing)}, which its state.json lists. Copy the folder again.")
    return files


def read_rows(file: Path) -> Iterator[Row | BadRow]:
    """Every row of a local file, in order; none of a file without bytes.

    Raises:
        DataError: The file cannot be read, or not further.
    """
    suffix = suffix_of(file)
    try:
        if file.is_dir():
            raise DataError(f"{file} is a folder. Name a file in it.")
        if not suffix:
            raise DataError(f"{file} is not a file that is read: use {', '.join(SUFFIXES)}.")
        with file.open("rb") as start:
            head = start.read(64)
        if not head:
            return
        _refuse_other_content(file, head, _EXPECTED.get(file.suffix.lower(), "text"))
        if suffix in _TEXTS:
            with _opened(file) as stream:
                yield from csv_rows(stream, file) if suffix == ".csv" else json_rows(stream, file, suffix == ".jsonl")
        else:
            yield from columnar_rows(file)
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        if isinstance(error, EOFError) or "Truncated compressed" in str(error):
            raise DataError(f"{file} is truncated: the compressed data ends too early. Copy it again.") from None
        raise DataError(f"{file} cannot be read as {suffix[1:]}: {error}.") from None


def first_rows(file: Path, count: int) -> list[Row | BadRow]:
    """A first look at a file of any size: up to `count` rows from its start, read no further.

    Raises:
        DataError: As read_rows.
    """
    return list(islice(read_rows(file), count))


def count_rows(file: Path) -> int | None:
    """How many rows read_rows gives, where the file says so without being read: parquet, and Arrow's file form.

    Raises:
        DataError: The file cannot be read.
    """
    suffix = suffix_of(file)
    if suffix not in (".parquet", ".arrow"):
        return None
    try:
        return columnar_count(file) if file.stat().st_size else 0
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as {suffix[1:]}: {error}.") from None


def _refuse_other_content(file: Path, head: bytes, expected: str = "text") -> None:
    """Tell what a file is whose name says otherwise, before each of its lines is told.

    Args:
        file: What messages name.
        head: How it starts, decompressed where text is expected.
        expected: What it should be, in the words of _SIGNATURES.

    Raises:
        DataError: It is something else.
    """
    what, remedy = next((told for start, told in _SIGNATURES.items() if head.startswith(start)), ("text", ""))
    # No text has control characters, but for white space.
    binary = re.search(rb"[\x00-\x08\x0e-\x1f]", head[:64]) if what == "text" else None
    if expected == "text" and binary:
        raise DataError(f"{file} is not text: it holds the byte 0x{binary.group()[0]:02x}. Name it for what it is.")
    if what == expected or (what == "text" and (binary or expected not in _COMPRESSIONS.values())):
        return
    if what == "text":
        remedy = f"name it {file.stem}"
    elif remedy.startswith("."):
        behind = remedy in _COMPRESSIONS and expected == "text"
        remedy = f"name it {file.name + remedy if behind else file.with_suffix(remedy).name}"
    raise DataError(f"{file} is {what}, not {expected}; {remedy}.")


@contextmanager
def _opened(file: Path) -> Iterator[BufferedReader]:
    """The bytes of a text file, decompressed, from behind the byte order mark."""
    with ExitStack() as stack:
        stream: BufferedReader[Any] = stack.enter_context(BufferedReader(file.open("rb", buffering=0), _BUFFER))
        compression = file.suffix.lower()
        if compression == ".gz":
            stream = stack.enter_context(BufferedReader(gzip.GzipFile(fileobj=stream), _BUFFER))
        elif compression == ".zst":
            import pyarrow as pa

            stream = stack.enter_context(BufferedReader(pa.CompressedInputStream(stream, "zstd"), _BUFFER))
        _refuse_other_content(file, stream.peek(64))
        if stream.peek(len(BOM)).startswith(BOM):
            stream.read(len(BOM))
        yield stream
