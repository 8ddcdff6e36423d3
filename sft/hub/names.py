"""Says what a model or data name means: a local path, the built-in demo, or a repository on the hub at one commit."""

from __future__ import annotations

import os
import re
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from sft.errors import ModelError
from sft.hub.demo import make_demo
from sft.recipe.load import find_file
from sft.recipe.schema import Recipe, Source

BUILTIN = "builtin:demo"

_TEXTS = (".json", ".jsonl", ".csv")
SUFFIXES = (*_TEXTS, ".parquet", ".arrow", *(text + ending for text in _TEXTS for ending in (".gz", ".zst")))
"""How the names of data files end that can be read."""

_COMMIT = re.compile(r"[0-9a-f]{40}")

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.txt", "merges.txt")
"""Wherever a whole vocabulary is, one of these is. Without it transformers makes up an empty tokenizer, and says nothing."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's vocabulary."""
    return any(file.is_file() for pattern in _TOKENIZER_FILES for file in folder.glob(pattern))


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit hash, which always stands for the same files.

    >>> is_commit("main"), is_commit("3aab1f1"), is_commit("3aab1f1954e9cc14eb9509a215f9e5ca08227a9b")
    (False, False, True)
    """
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def looks_local(name: str) -> bool:
    """Whether a name is meant as a path: it is one, or could not be a hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or find_file(name).exists()


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files (`data/*.jsonl`)."""
    return any(character in path for character in "*?[")


def is_on_hub(source: Source) -> bool:
    """Whether a source's name can only be an id on the hub."""
    local = source.path == BUILTIN or looks_local(source.path) or source.path.endswith(SUFFIXES)
    return not local and not is_pattern(source.path)


def hub_id_problem(name: str) -> str | None:
    """Why a name that is no path here can be no id on the hub either; None where it can."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        what = f"`{BUILTIN}` is the only built-in" if name.startswith("builtin:") else "it is no hub id (owner/name)"
        return f"there is no such file or folder, and {what}"
    return None


def hub_answers() -> bool:
    """Whether the hub can be reached: one connection, at most three seconds. Upstream's own calls retry for a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the proxy can tell
    url = urlsplit(constants.ENDPOINT)
    return _reaches(url.hostname or "", url.port or (80 if url.scheme == "http" else 443))


@cache
def _reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True


def hub_commit(source: Source) -> str | None:
    """The commit that a hub dataset's revision stands for now; None where nobody can tell."""
    from huggingface_hub import constants

    if hub_answers():
        return _commit_now(source.path, source.revision)
    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{source.path.replace('/', '--')}" / "refs"
    reference = folder / (source.revision or "main")
    return reference.read_text().strip() if reference.is_file() else source.revision


@cache
def _commit_now(path: str, revision: str | None) -> str | None:
    """Asked once, so that what is loaded is what the prepared data is known by."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().dataset_info(path, revision=revision).sha
    except (HfHubHTTPError, OSError, ValueError):
        return None  # loading it says why


def model_path(recipe: Recipe) -> str:
    """The model's local folder or hub id. Raises ModelError where a path does not exist."""
    name = recipe.model.name_or_path
    if name == BUILTIN:
        return str(make_demo(Path(recipe.output_dir)).model)
    if not looks_local(name):
        if problem := hub_id_problem(name):
            raise ModelError(f"model.name_or_path={name}: {problem}.")
        return name
    folder = find_file(name)
    if (folder / "adapter_config.json").is_file():
        # transformers would load the model that this file names, and not the weights beside it.
        raise ModelError(
            f"model.name_or_path={name}: the folder holds adapter_config.json: adapters for another model. Merge them into that model "
            "(peft's merge_and_unload), or move the file away if the folder holds the whole model."
        )
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(
            f"model.name_or_path={name}: the folder {problem}. Give a folder of a Hugging Face model or a hub id."
        )
    if not has_tokenizer(folder):
        raise ModelError(
            f"model.name_or_path={name}: the folder holds no tokenizer ({', '.join(_TOKENIZER_FILES)}). Copy the tokenizer's files there."
        )
    return str(folder.resolve())


def model_file(path: str, revision: str | None, file: str) -> Path | None:
    """A file of a model; of a hub model's branch the newest where the hub answers, since the cache may hold an older commit."""
    if Path(path).is_dir():
        return Path(path) / file
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        cached = try_to_load_from_cache(path, file, revision=revision)
        known = Path(cached) if isinstance(cached, str) else None
        if known and is_commit(revision):
            return known
        if not hub_answers():
            # What loads from here on takes the cache at once: upstream's own calls retry for a minute.
            constants.HF_HUB_OFFLINE = True
            return known
        return Path(hf_hub_download(path, file, revision=revision))
    except RepositoryNotFoundError:
        raise ModelError(
            f"model.name_or_path={path}: the hub has no such model, or it needs a login (hf auth login)."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"model.revision={revision}: the hub's {path} has no such revision.") from None
    except (OSError, ValueError):
        return None
