"""A recipe as it may be shown to others: without places of this machine, trackers and keys. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sft.credentials import redact
from sft.recipe.schema import Recipe

_FILE = re.compile(r"\.(?:jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|jinja|py|gz|zst|bz2|xz)$|[*?\[]")
_LEFT_OUT = ("output_dir", "tracking", "debug")


def public_name(name: str) -> str:
    """A name without the folders that it stands in; an id on the hub stays whole.

    >>> public_name("/home/me/chats.jsonl"), public_name("data/chats.jsonl"), public_name("Qwen/Qwen2.5-0.5B")
    ('chats.jsonl', 'chats.jsonl', 'Qwen/Qwen2.5-0.5B')
    >>> public_name("/tmp/me and you/chats.jsonl"), public_name("/no_think Say yes/no.")
    ('chats.jsonl', '/no_think Say yes/no.')
    """
    local = name.startswith(("/", "~", "./", "../", "\\")) or (
        "/" in name and (name.count("/") > 1 or bool(_FILE.search(name)) or Path(name).exists())
    )
    return (Path(name).name or name) if local and not _is_prose(name) else name


def _is_prose(name: str) -> bool:
    """Whether words have a slash among them, as `/no_think yes/no` has, and are no path: none begins where a folder is."""
    return bool(re.search(r"\s\S*/", name)) and name[0] != "~" and not Path(*Path(name).parts[:2]).exists()


def is_hub_id(name: str) -> bool:
    """Whether a name can only be an id on the hub.

    >>> is_hub_id("Qwen/Qwen2.5-0.5B"), is_hub_id("models/mine.jsonl"), is_hub_id("builtin:demo")
    (True, False, False)
    """
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and public_name(name) == name


def public_recipe(recipe: Recipe) -> str:
    """The keys that were written or changed, as YAML."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    shown = {key: _public(value) for key, value in values.items() if key not in _LEFT_OUT}
    return redact(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    return public_name(value) if isinstance(value, str) else value
