"""A recipe as it may be shown to others: without places of this machine, trackers and keys. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sft.credentials import redact
from sft.recipe.schema import Recipe

_FILE = re.compile(r"\.(?:jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|jinja|py|gz|zst|bz2|xz)$|[*?\[]")
_LEFT_OUT = ("output_dir", "tracking", "debug", "server")
_OF_OTHERS = ("arguments", "trainer_args")
"""Keys of a recipe below which the names are not ours: any of them may name a file or folder."""
_PLACES = (
    "name_or_path chat_template train held_out path function callbacks deepspeed tasks every_tasks include_path".split()
)
"""Keys of a recipe that may name a file or folder."""


def public_name(name: str) -> str:
    """The name of a file or folder without the folders that it stands in; an id on the hub stays whole.

    >>> public_name("/home/me/chats.jsonl"), public_name("data/chats.jsonl"), public_name("Qwen/Qwen2.5-0.5B")
    ('chats.jsonl', 'chats.jsonl', 'Qwen/Qwen2.5-0.5B')
    """
    local = name.startswith(("/", "~", "./", "../", "\\")) or (
        "/" in name and (name.count("/") > 1 or bool(_FILE.search(name)) or Path(name).exists())
    )
    return (Path(name).name or name) if local else name


def is_hub_id(name: str) -> bool:
    """Whether a name can only be an id on the hub.

    >>> is_hub_id("Qwen/Qwen2.5-0.5B"), is_hub_id("models/mine.jsonl"), is_hub_id("builtin:demo")
    (True, False, False)
    """
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and public_name(name) == name


def public_recipe(recipe: Recipe) -> str:
    """The keys that were written or changed, as YAML."""
    values = _public(recipe.model_dump(mode="json", exclude_unset=True))
    return redact(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {
            name: _public(one, key if key in _OF_OTHERS else name)
            for name, one in value.items()
            if name not in _LEFT_OUT
        }
    if isinstance(value, list):
        return [_public(one, key) for one in value]
    is_place = isinstance(value, str) and (key in (*_PLACES, *_OF_OTHERS) or re.fullmatch(r"[/~]\S+", value))
    return public_name(value) if is_place else value
