"""Converts the datasets that a file names to the sources of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sft.convert.conversion import Conversion, as_number, is_true, shown


def indices(c: Conversion, prefix: str) -> list[str]:
    """The indices of a list of mappings in the file."""
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", key) for key in c.keys)
    return list(dict.fromkeys(match[1] for match in found if match))


def read_source(c: Conversion, prefix: str, names: Mapping[str, str], to: str = "data.train") -> dict[str, Any]:
    """One source.

    Args:
        c: The conversion.
        prefix: What their keys begin with, such as `datasets.0.`.
        names: Their names and ours; `epochs` is a fraction of the rows, `split` may have a percentage, `columns.x` renames a column to x.
        to: Our key, for the account.
    """
    source: dict[str, Any] = {"path": "DATA"}
    for theirs, ours in names.items():
        key, value = prefix + theirs, c.get(prefix + theirs)
        if not c.has(key):
            continue
        made, why = _read(ours, value)
        c.account(key, f"{to}: {shown(made) if made else 'as by default'}", why)
        columns = source.get("columns", {}) | made.pop("columns", {})
        source |= made | ({"columns": columns} if columns else {})
    return source


def _read(ours: str, value: Any) -> tuple[dict[str, Any], str]:
    """What a source gets from a value, and what differs."""
    if ours == "split":
        split, fraction = split_of(str(value))
        given = {} if split == "train" else {"split": split}
        return (given, "") if fraction is None else (given | {"epochs": fraction}, _FRACTION)
    if ours == "epochs":
        number = as_number(value)
        return ({}, "") if not number or number <= 0 or number == 1 else ({"epochs": number}, _FRACTION)
    if ours == "streaming":
        return {"streaming": is_true(value)}, ""
    name = ours.removeprefix("columns.")
    if name == ours:
        return {ours: str(value)}, ""
    is_known = value == name or (name in _CHATS and value in _CHATS)
    return ({} if is_known else {"columns": {name: str(value)}}), ""


_CHATS = ("messages", "conversations")
_FRACTION = "that fraction of the rows, drawn with data.seed"


def split_of(split: str) -> tuple[str, float | None]:
    """A split without its percentage, and the fraction of the rows that the percentage takes.

    >>> split_of("train[:20%]"), split_of("train[10%:]"), split_of("train[:100]")
    (('train', 0.2), ('train', 0.9), ('train[:100]', None))
    """
    match = re.fullmatch(r"(.+)\[(?:(\d+)%)?:(?:(\d+)%)?\]", split)
    if match is None or (match[2], match[3]) == (None, None):
        return split, None
    fraction = (int(match[3] or 100) - int(match[2] or 0)) / 100
    return match[1], fraction if fraction > 0 else None


def set_sources(c: Conversion, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    """Set data.train, and data.held_out where the file names datasets for it."""
    train = train or [{"path": "DATA"}]
    c.settings["data.train"] = train[0]["path"] if len(train) == 1 and set(train[0]) == {"path"} else train
    if any(source["path"] == "DATA" for source in train):
        c.comments.setdefault("data.train", []).append("DATA: write a file, a folder or an id on the hub")
    if held_out:  # an eval split is used in full
        c.settings["data.held_out"] = [
            {name: one for name, one in each.items() if name != "epochs"} for each in held_out
        ]
