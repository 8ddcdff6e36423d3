"""Prepared data and the place where it waits for the next start: found by content, complete or absent.

The key of an entry is a hash over everything that its bytes depend on. A changed row, tokenizer, template, package or line of
our own code gives another key, so that nothing stale can be found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from sft.data.facts import DataFacts
from sft.data.readers import suffix_of
from sft.data.sources import source_files, told_as
from sft.data.tokenizer import find_chat_template
from sft.files import checksum
from sft.hub.model_facts import ModelFacts
from sft.hub.names import hub_commit
from sft.recipe.schema import Recipe, Source

_PACKAGES = ("transformers", "tokenizers", "jinja2", "trl", "numpy", "pyarrow", "datasets")
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "chat_templates/*.jinja")
_END = 2**20
"""Bytes that are compared at each end of a file, where there is no time for all of it."""

_LIMITS = {"allow", "max_overlong_fraction", "max_dropped_fraction", "min_trained_fraction"}
"""Keys that judge the prepared data and do not change it."""


def _hash_of(file: Path) -> str:
    state = file.stat()
    return _hash_once(file, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


def _ends_of(file: Path) -> str:
    """A hash of a file's size and both its ends."""
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(_END)
        content.seek(max(0, size - _END))
        return sha256(str(size).encode() + start + content.read(_END)).hexdigest()


@cache
def _hash_once(file: Path, *state: int) -> str:
    """The hash of a file, once in a process for each state of it."""
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()


def _this_start() -> str:
    """Stands for what nobody can tell, such as what an unreachable hub holds now: a start finds only what it prepared itself."""
    return os.environ.setdefault("SFT_START", uuid4().hex)


def _source_key(source: Source, output_dir: str, hash_of: Callable[[Path], str]) -> Any:
    files = source_files(source, output_dir)
    if files is None:
        return [source.model_dump(mode="json"), hub_commit(source) or _this_start()]
    return [source.model_dump(mode="json"), *((str(file), suffix_of(file), hash_of(file)) for file in files)]


def data_key(recipe: Recipe, model: ModelFacts) -> str:
    """What machines compare when they meet: as the key of an entry, but of large files only the size and both ends.

    Raises:
        DataError: A source does not exist.
    """
    return entry_folder(recipe, model, _ends_of).name


def entry_folder(recipe: Recipe, model: ModelFacts, hash_of: Callable[[Path], str] = _hash_of) -> Path:
    """Where the recipe's prepared data is, or will be: <output_dir>/.prepared/<key>.

    Args:
        recipe: With its data and model sections.
        model: From inspect_model: the tokenizer's folder, or the commit on the hub.
        hash_of: Hashes a data file.

    Raises:
        DataError: A source does not exist.
    """
    folder, template = Path(model.path), recipe.model.chat_template
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}) if folder.is_dir() else []
    with told_as("data.held_out"):
        held_out = [_source_key(source, recipe.output_dir, hash_of) for source in recipe.held_out_sources]
    parts = {
        # None and max_length are the same packs.
        "data": recipe.data.model_dump(mode="json", exclude=_LIMITS) | {"pack_length": recipe.sequence_length},
        "sources": [_source_key(source, recipe.output_dir, hash_of) for source in recipe.sources],
        "held_out": held_out,
        "tokenizer": {file.name: _hash_of(file) for file in files if not file.name.endswith(".index.json")},
        "model": None if folder.is_dir() else [model.path, model.commit or _this_start()],
        "chat_template": find_chat_template(template) if template else None,
        "tokens": recipe.model.model_dump(
            mode="json", include={"pad_token", "eos_token", "new_tokens", "trust_remote_code"}
        ),
        "packages": {package: version(package) for package in _PACKAGES},
        "code": {str(file): _hash_of(Path(__file__).parents[1] / file) for file in _code()},
    }
    key = sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    return Path(recipe.output_dir).expanduser().resolve() / ".prepared" / key


def _code() -> list[Path]:
    """The modules that prepare: sft/data and what decides which files are read, from sft/."""
    root = Path(__file__).parents[1]
    return sorted(file.relative_to(root) for package in ("data", "hub") for file in (root / package).glob("*.py"))


@dataclass(frozen=True)
class Prepared:
    """A finished entry."""

    folder: Path
    summary: dict[str, Any]
    """prepared.json."""

    @property
    def fingerprint(self) -> str:
        """sha256 over all documents and sequences."""
        return str(self.summary["fingerprint"])

    @property
    def ledger(self) -> dict[str, Any]:
        """As ledger.json."""
        ledger: dict[str, Any] = self.summary["ledger"]
        return ledger

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Kind, meaning, count and the first rows of each."""
        findings: list[dict[str, Any]] = self.summary["findings"]
        return findings

    @property
    def sequences(self) -> int:
        """Sequences to train on."""
        return int(self.summary["sequences"])

    def altered(self) -> str | None:
        """The first file whose content has changed since it was written. Reads every byte: for one rank, once a start."""
        checksums = self.summary.get("checksums", {})
        return next((name for name in checksums if checksum(self.folder / name)[1] != checksums[name]), None)

    def forget(self) -> None:
        """Have the next preparation write the entry again."""
        (self.folder / "prepared.json").unlink(missing_ok=True)

    def facts(self) -> DataFacts:
        """The data as the plan counts it."""
        rows, tokens = self.ledger["total"]["rows"], self.ledger["total"]["tokens"]
        used = tokens["trained"] + tokens["masked"]
        return DataFacts(rows["used"] + rows["repeated"], used, tokens["trained"], self.sequences, exact=True)


def find_prepared(folder: Path) -> Prepared | None:
    """The entry in a folder, or None where there is none that is whole."""
    try:
        summary = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in summary["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Prepared(folder, summary) if sizes == summary["sizes"] else None
