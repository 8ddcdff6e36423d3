"""Verifies that a checkpoint is complete: its manifest says what it must hold, and is compared with it before anything is loaded.

manifest.json, written last:

    format, step, ranks, recipe, writer     of the state that was saved
    files       of each file its size and checksum (xxh3_128)
    checksum    of all of the above

The checksum detects damage, not malice: whoever can write a checkpoint can write its manifest. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from sft.files import checksum

NAME = "manifest.json"
FORMAT = 1
_THREADS = 4
_LEFT_BY_SYSTEMS = re.compile(r"\.nfs[0-9a-f]+|\.DS_Store")
_OF_A_RANK = re.compile(r"(?:pp_rank_|rng_state_|^optimizer_|^__)(\d+)(?:_|\.)")
"""DeepSpeed's, transformers', torch's and our own names of what each rank writes for itself."""

Entry = dict[str, Any]


def files_in(folder: Path) -> dict[str, Path]:
    """Everything in a checkpoint but directories and the manifest, by path in it. Links to directories are not followed."""
    found = {}
    for parent, directories, names in os.walk(folder):
        links = [name for name in directories if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in [*names, *links]):
            if not _LEFT_BY_SYSTEMS.fullmatch(path.name):
                found[path.relative_to(folder).as_posix()] = path
    found.pop(NAME, None)
    return found


def files_of_rank(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """The files that a rank syncs and sums: those with its number in their name; rank 0 also those without."""

    def writer(name: str) -> int:
        found = _OF_A_RANK.search(name.rsplit("/", maxsplit=1)[-1])
        number = int(found[1]) if found else 0
        return number if number < ranks else 0

    return [name for name in names if writer(name) == rank]


def entries(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """What the manifest says of these files, each synced to the disk and read back."""

    def entry(name: str) -> tuple[str, Entry]:
        sync(folder / name)
        size, found = checksum(folder / name)
        return name, {"bytes": size, "xxh3_128": found}

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(threads.map(entry, names))


def write_manifest(
    folder: Path, facts: Mapping[str, Any] | None = None, files: Mapping[str, Entry] | None = None
) -> None:
    """Write the manifest of a checkpoint that is complete, and sync it and the directories.

    `facts` are plain values of JSON. `files` come from `entries`, of all files; None: they are summed here.

    Raises:
        OSError: Something cannot be written or read.
    """
    files = entries(folder, files_in(folder)) if files is None else files
    content = {"format": FORMAT, **(facts or {}), "files": dict(sorted(files.items()))}
    path = folder / NAME
    path.write_text(json.dumps(content | {"checksum": _checksum(content)}, indent=1) + "\n", encoding="utf-8")
    sync(path)
    for parent, _, _ in os.walk(folder):
        sync(Path(parent))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's content; a ValueError says how it is missing, damaged or of another format."""
    try:
        content: dict[str, Any] = json.loads((folder / NAME).read_bytes())
        intact = content.pop("checksum") == _checksum(content)
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise ValueError(f"{NAME} is damaged")
    if content.get("format") != FORMAT:
        raise ValueError(f"{NAME} has format {content.get('format')}, and this version reads {FORMAT}")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, as a phrase without a full stop; None where it is byte for byte what was written.

    No other file may be there: what a library looks for by name or pattern and would load was then written by the run itself.
    """
    try:
        wanted: dict[str, Entry] = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    found = files_in(folder)
    for name, entry in wanted.items():
        if name not in found:
            return f"{name} is missing"
        count = found[name].stat().st_size
        if count != entry["bytes"]:
            return f"{name} has {count:,} bytes and should have {entry['bytes']:,}"
    for name in found:
        if name not in wanted:
            return f"{name} is in it, and was not when it was written"

    def changed(name: str) -> str | None:
        try:
            _, now = checksum(found[name])
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        same = now == wanted[name]["xxh3_128"]
        return None if same else f"{name} has changed since it was written: its checksum differs"

    with ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(changed, wanted)), None)


def size(folder: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a directory's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
