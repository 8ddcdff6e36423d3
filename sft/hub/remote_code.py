"""Code that a model ships: run only where the recipe says so, and then only code that cannot change behind its back.

`auto_map` in a model's config.json or tokenizer_config.json names Python files beside it, or in another repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from sft.errors import ModelError
from sft.hub.names import is_commit
from sft.recipe.schema import Model

HOW_TO_ALLOW = (
    "To run it, read it first; then set model.trust_remote_code=true and, of a hub model, model.revision to the full hash of the commit "
    "that you have read."
)


def named_code(settings: Mapping[str, Any]) -> dict[str, str]:
    """The classes that a config.json or tokenizer_config.json has of its own, by transformers' name for their kind.

    >>> named_code({"auto_map": {"AutoConfig": "mine.Config"}}), named_code({"auto_map": ["mine.Tokenizer", None]})
    ({'AutoConfig': 'mine.Config'}, {'AutoTokenizer': 'mine.Tokenizer'})
    """
    found = settings.get("auto_map") or {}
    named = found if isinstance(found, dict) else {"AutoTokenizer": found}
    # A tokenizer has two: slow and fast.
    classes = {kind: value if isinstance(value, list | tuple) else [value] for kind, value in named.items()}
    return {str(kind): ", ".join(str(one) for one in value if one) for kind, value in classes.items()}


def _is_known(model_type: Any) -> bool:
    """Whether transformers has a class for such a model itself, which then runs instead of the model's own code."""
    # Seconds, and only for a model that names code.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def check_remote_code(
    model: Model, path: str, commit: str | None, config: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> None:
    """Raise ModelError for code that the recipe does not allow, and for code that is not pinned.

    `commit` is what the revision of a hub model stands for today, where that is known; `config` and `tokenizer` are the model's
    config.json and tokenizer_config.json.
    """
    named, local = named_code(config), Path(path).is_dir()
    if not model.trust_remote_code:
        if named and not _is_known(config.get("model_type")):
            raise ModelError(
                f"model.name_or_path={model.name_or_path}: its config.json names code of its own "
                f"({', '.join(sorted(set(named.values())))}), and transformers has no model of type {config.get('model_type')}. Code of a "
                f"model is not run unless the recipe says so. {HOW_TO_ALLOW}"
            )
        return
    if not local and not is_commit(model.revision):
        today = f"; today it is {commit}" if commit else ""
        raise ModelError(
            f"model.trust_remote_code=true with model.revision={model.revision or 'null'}: who can write to {path} decides what runs on "
            f"this machine. Set model.revision to the full hash (40 digits) of the commit whose code you have read{today}."
        )
    for reference in [*named.values(), *named_code(tokenizer).values()]:
        repository, separate, _ = reference.partition("--")
        if separate and repository != path:
            raise ModelError(
                f"model.trust_remote_code=true, and {model.name_or_path} names code of another repository, {repository}, which "
                "model.revision does not pin. Copy its Python files into a folder with the model, name them there in auto_map without "
                f"`{repository}--`, and give that folder."
            )


def code_hash(model: Model, path: str) -> str | None:
    """SHA-256 over the Python files of a local model whose code is run; None where there are none, or none is run."""
    folder = Path(path)
    if not model.trust_remote_code or not folder.is_dir():
        return None
    files = sorted(folder.rglob("*.py"))
    parts = [f"{file.relative_to(folder)} {sha256(file.read_bytes()).hexdigest()}" for file in files]
    return sha256("\n".join(parts).encode()).hexdigest() if parts else None


def is_refusal(error: BaseException) -> bool:
    """Whether transformers refused to run a model's code."""
    return isinstance(error, ValueError) and "trust_remote_code=True" in str(error)
