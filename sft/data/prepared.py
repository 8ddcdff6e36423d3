"""Finds prepared data by its content: an entry is complete or absent.

The key of an entry is a hash of everything that its bytes depend on. A changed row, tokenizer, template, package or line of our own
code gives another key, so nothing stale can be found.
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

from sft.data.readers import suffix_of
from sft.data.sources import all_sources, source_files, under_key
from sft.data.tokenizer import find_chat_template
from sft.files import checksum
from sft.hub.data_facts import DataFacts
from sft.hub.model_facts import ModelFacts
from sft.hub.names import hub_commit
from sft.recipe.local_code import code_hashes
from sft.recipe.schema import Recipe, Source

_PACKAGES = ("transformers", "tokenizers", "jinja2", "trl", "numpy", "pyarrow", "datasets")
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "chat_templates/*.jinja")
_LIMITS = {"allow", "max_overlong_fraction", "max_dropped_fraction", "min_trained_fraction"}
"""Keys that judge the prepared data and do not change it."""


@dataclass(frozen=True)
class Prepared:
    """A complete entry."""

    folder: Path
    summary: dict[str, Any]
    """prepared.json."""

    fingerprint: str
    """SHA-256 over all documents and sequences."""

    ledger: dict[str, Any]
    """As in ledger.json."""

    findings: list[dict[str, Any]]
    """Kind, meaning, count and first rows of each."""

    sequences: int
    """Sequences to train on."""

    def altered(self) -> str | None:
        """The first file that has changed since it was written. Reads every byte: call it on one rank, once a start."""
        checksums = self.summary["checksums"]
        return next((name for name in checksums if checksum(self.folder / name)[1] != checksums[name]), None)

    def forget(self) -> None:
        """Have the next preparation write the entry again."""
        (self.folder / "prepared.json").unlink(missing_ok=True)

    def facts(self) -> DataFacts:
        """The size of the data as the plan counts it."""
        rows, tokens = self.ledger["total"]["rows"], self.ledger["total"]["tokens"]
        used = tokens["trained"] + tokens["masked"]
        documents, squares = rows["used"] + rows["repeated"], self.summary["squared_lengths"]
        return DataFacts(documents, used, tokens["trained"], self.sequences, squares, exact=True)


def find_prepared(folder: Path) -> Prepared | None:
    """The entry in a folder, or None if it is not complete."""
    try:
        summary = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in summary["sizes"]}
        values = {name: summary[name] for name in ("fingerprint", "ledger", "findings", "sequences")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Prepared(folder, summary, **values) if sizes == summary["sizes"] else None


def entry_folder(recipe: Recipe, model: ModelFacts) -> Path:
    """Where the recipe's prepared data is, or will be: <output_dir>/.prepared/<key>.

    Raises DataError where a source does not exist.
    """
    return Path(recipe.output_dir).expanduser().resolve() / ".prepared" / _key(recipe, model, hash_of)


def data_key(recipe: Recipe, model: ModelFacts) -> str:
    """What nodes compare before they train together: the key of an entry, but of data files only the size counts.

    Raises DataError where a source does not exist.
    """
    return _key(recipe, model, lambda file: str(file.stat().st_size))


def _key(recipe: Recipe, model: ModelFacts, hash_data: Callable[[Path], str]) -> str:
    folder, template = Path(model.path), recipe.model.chat_template
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}) if folder.is_dir() else []
    sources: list[Any] = []
    for key, source in all_sources(recipe):
        with under_key(key):
            sources.append([key, source.model_dump(mode="json"), _content(source, recipe.output_dir, hash_data)])
    package = Path(__file__).parents[1]
    code = sorted(file for name in ("data", "hub") for file in (package / name).glob("*.py"))
    parts = {
        # pack_length None and max_length are the same packs.
        "data": recipe.data.model_dump(mode="json", exclude=_LIMITS) | {"pack_length": recipe.sequence_length},
        "sources": sources,
        "tokenizer": {file.name: hash_of(file) for file in files if not file.name.endswith(".index.json")},
        "model": None if folder.is_dir() else [model.path, model.commit or _this_start()],
        "chat_template": find_chat_template(template) if template else None,
        "tokens": recipe.model.model_dump(
            mode="json", include={"pad_token", "eos_token", "new_tokens", "trust_remote_code"}
        ),
        "functions": code_hashes(recipe, "data"),
        "packages": {name: version(name) for name in _PACKAGES},
        "code": {str(file.relative_to(package)): hash_of(file) for file in code},
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _content(source: Source, output_dir: str, hash_data: Callable[[Path], str]) -> Any:
    files = source_files(source, output_dir)
    if files is None:
        return hub_commit(source) or _this_start()
    return [(str(file), suffix_of(file), hash_data(file)) for file in files]


def _this_start() -> str:
    """Stands for what cannot be known, such as what an unreachable hub holds: a start finds only what it prepared itself."""
    return os.environ.setdefault("SFT_START", uuid4().hex)


def hash_of(file: Path) -> str:
    """SHA-256 of a file, computed once in a process for each state of it."""
    state = file.stat()
    return _hash_once(file, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


@cache
def _hash_once(file: Path, *state: int) -> str:
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()
