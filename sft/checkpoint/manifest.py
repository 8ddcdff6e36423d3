"""Whether a checkpoint is whole: its manifest says what it must hold, and is compared with it before anything is loaded.

manifest.json, written last:

    format, step, ranks, engine, recipe     of the state that was saved
    files       of each file its size and checksum (xxh3_128), and of safetensors each tensor's dtype and shape
    checksum    of all of the above

The checksum tells damage, not malice: whoever can write a checkpoint can write its manifest. Imports no torch.
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
_OF_A_RANK = re.compile(r"(?:pp_rank_|rng_state_|^__)(\d+)(?:_|\.)")
"""DeepSpeed's, transformers' and torch's names of what each rank writes for itself."""

Entry = dict[str, Any]


def files_in(folder: Path) -> dict[str, Path]:
    """Everything in a checkpoint but directories and the manifest, by path in it. Links to directories are not followed."""
    found = {}
    for place, directories, names in os.walk(folder):
        links = [name for name in directories if Path(place, name).is_symlink()]
        for path in (Path(place, name) for name in [*names, *links]):
            if not _LEFT_BY_SYSTEMS.fullmatch(path.name):
                found[path.relative_to(folder).as_posix()] = path
    found.pop(NAME, None)
    return found


def share(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """The files that a rank syncs and sums: those with its number in their name; the first rank also those without.

    >>> share(["config.json", "rng_state_1.pth", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"], 1, 2)
    ['rng_state_1.pth']
    """

    def writer(name: str) -> int:
        found = _OF_A_RANK.search(name.rsplit("/", maxsplit=1)[-1])
        number = int(found[1]) if found else 0
        return number if number < ranks else 0

    return [name for name in names if writer(name) == rank]


def entries(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """What the manifest says of these files, each synced to the disk and read back.

    Args:
        folder: The checkpoint.
        names: Paths in it.

    Raises:
        OSError: One cannot be synced or read.
        ValueError: A safetensors file is not whole.
    """
    names = list(names)
    # The disk is waited for while others are summed.
    with ThreadPoolExecutor(_THREADS) as syncing, ThreadPoolExecutor(_THREADS) as summing:
        synced = [syncing.submit(sync, folder / name) for name in names]
        described = list(summing.map(lambda name: _entry(folder / name), names))
        for one in synced:
            one.result()
    return dict(zip(names, described, strict=True))


def write_manifest(
    folder: Path, facts: Mapping[str, Any] | None = None, files: Mapping[str, Entry] | None = None
) -> None:
    """Write the manifest of a checkpoint that is complete, and sync it and the directories.

    Args:
        folder: The checkpoint.
        facts: `step`, `ranks`, `engine`, `recipe`: plain values of JSON.
        files: From `entries`, of all files; None: they are summed here.

    Raises:
        OSError: Something cannot be written or read.
    """
    files = entries(folder, files_in(folder)) if files is None else files
    content = {"format": FORMAT, **(facts or {}), "files": dict(sorted(files.items()))}
    path = folder / NAME
    path.write_bytes(_rendered(json.loads(json.dumps(content))))
    sync(path)
    for place, _, _ in os.walk(folder):
        sync(Path(place))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's content.

    Raises:
        ValueError: It is missing or damaged, or of another format; the message says so.
    """
    try:
        written = (folder / NAME).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"it has no {NAME}") from None
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read: {error.strerror}") from None
    try:
        content = json.loads(written)
        content.pop("checksum")
        whole = _rendered(content) == written
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{NAME} is damaged")
    if content.get("format") != FORMAT:
        raise ValueError(f"{NAME} has format {content.get('format')}, and this version reads {FORMAT}")
    found: dict[str, Any] = content
    return found


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, as a phrase without a full stop; None where all of it is what was written.

    Every file must be there with its size and checksum, and no other: what a library looks for by name or pattern and would load was
    then written by the run itself. Only what file systems leave (.nfs*, .DS_Store) is passed over.

    Args:
        folder: The checkpoint.
    """
    try:
        wanted: dict[str, Entry] = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    found = files_in(folder)
    for name, entry in wanted.items():
        if name not in found:
            return f"{name} is missing"
        size = found[name].stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes and should have {entry['bytes']:,}"
    for name in found:
        if name not in wanted:
            return f"{name} is in it, and was not when it was written"
    with ThreadPoolExecutor(_THREADS) as summing:
        reasons = summing.map(lambda name: _changed(found[name], name, wanted[name]), wanted)
        return next(filter(None, reasons), None)


def is_damaged(folder: Path, name: str) -> bool:
    """Whether one file of a checkpoint is not what was written; False where its manifest does not tell."""
    try:
        entry = read_manifest(folder)["files"].get(name)
    except ValueError:
        return False
    return entry is not None and _changed(folder / name, name, entry) is not None


def size(folder: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a directory's names.

    Raises:
        OSError: It cannot.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed(path: Path, name: str, entry: Entry) -> str | None:
    try:
        _, found = checksum(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == entry["xxh3_128"] else f"{name} has changed since it was written: its checksum differs"


def _entry(path: Path) -> Entry:
    count, found = checksum(path)
    entry = {"bytes": count, "xxh3_128": found}
    return entry | {"tensors": _tensors(path, count)} if path.suffix == ".safetensors" else entry


def _tensors(path: Path, count: int) -> dict[str, Any]:
    """Of each tensor its dtype and shape, from the file's header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length < count else {}
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end != count:
        raise ValueError(f"{path} is not whole: it has {count:,} bytes, and its header says {8 + length + end:,}.")
    return {name: [tensor["dtype"], tensor["shape"]] for name, tensor in sorted(header.items())}


def _rendered(content: dict[str, Any]) -> bytes:
    """The file: a line a file, so that a person can read it, and one way to write it, so that any changed byte shows."""
    heads = {name: value for name, value in content.items() if name != "files"}
    files = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["files"].items())
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in heads.items()]
    return "\n".join(["{", *lines, '"files": {', files, "},", f'"checksum": "{checksum}"', "}", ""]).encode()
