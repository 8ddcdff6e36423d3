"""Writes files so that a reader never sees half of one, reads JSON, removes folders, and computes checksums."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from sft.credentials import redact
from sft.errors import RunError

_BLOCK = 1 << 20
"""Bytes read at once: a block that stays in a core's cache is summed at the cache's speed."""


def write_text(path: Path, text: str) -> None:
    """Write a text file; a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Half a surrogate pair, which a model's answer may hold, becomes \udXXX, which JSON reads back.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file as `write_text` does, without credentials."""
    write_text(path, redact(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run. Raises RunError if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing: {path.parent} is not the folder of a run of this project.") from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read: {error}. Restore it from a copy, or start a new run with train.resume=never."
        ) from None


def cache_folder() -> Path:
    """The user's cache: $XDG_CACHE_HOME or ~/.cache; of a user without a home, the folder of temporary files."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return Path(tempfile.gettempdir())


_made: dict[Path, Any] = {}


def cached(kind: str, follows_from: object, code: Iterable[Path], make: Callable[[], Any]) -> Any:
    """A JSON value from the user's cache; made where it is not there, and kept unless it is None.

    Args:
        kind: The folder in the cache.
        follows_from: All that decides the value, beside the code of these files and the versions of torch, transformers and peft.
    """
    versions = [version(name) for name in ("torch", "transformers", "peft")]
    parts = [follows_from, versions, *(file.read_text(encoding="utf-8") for file in code)]
    key = sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    file = cache_folder() / "sft" / kind / f"{key}.json"
    if file not in _made:
        with suppress(OSError, ValueError):
            _made[file] = json.loads(file.read_text(encoding="utf-8"))
    if file not in _made:
        _made[file] = make()
        with suppress(OSError):
            if _made[file] is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, _made[file])
    return _made[file]


def remove(path: Path) -> None:
    """Remove a folder with its content; of a link, only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def checksum(path: Path) -> tuple[int, str]:
    """A file's size in bytes and the xxh3_128 checksum of its content."""
    block, content, size = memoryview(bytearray(_BLOCK)), xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            content.update(block[:read])
            size += read
    return size, content.hexdigest()


def disk_was_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, means that a disk or a quota is full."""
    # safetensors, torch and pyarrow each raise their own error, sometimes while handling the one that says so.
    while error is not None:
        message = str(error)
        if "No space left on device" in message or "Disk quota exceeded" in message:
            return True
        # torch's zip writer reports only that its position in the file is not where it wrote to.
        if "inline_container" in message and "unexpected pos" in message:
            return True
        error = error.__cause__ or error.__context__
    return False


def in_words(count: float) -> str:
    """Bytes, for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
