"""Converts the datasets that a file names to the sources of a recipe, and its eval split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sft.convert.conversion import Conversion, as_number, shown

NO_DATASET = "the file names no dataset: write a file, a folder or an id on the hub"


def indices(c: Conversion, prefix: str) -> range:
    """The indices of a list of mappings in the file."""
    depth = prefix.count(".") + 1
    found = {key.split(".")[depth] for key in c.keys if key.startswith(f"{prefix}.")}
    return range(len({one for one in found if one.isdigit()}))


def read_source(c: Conversion, prefix: str, place: str, names: Mapping[str, str]) -> dict[str, Any]:
    """One source.

    Args:
        c: The conversion.
        prefix: What their keys begin with, such as `datasets.0.`.
        place: What ours begin with, such as `data.train.0`.
        names: Their names and ours; `epochs` is a fraction of the rows, `split` may have a percentage.
    """
    source: dict[str, Any] = {"path": "DATA"}
    for theirs, ours in names.items():
        key = prefix + theirs
        if not c.has(key):
            continue
        value: Any = c.get(key) if ours in ("epochs", "weight", "streaming") else str(c.get(key))
        if ours == "split":
            source |= _split(c, key, place)
            continue
        number = as_number(value)
        if ours in ("epochs", "weight") and (number is None or number <= 0):
            c.drop(key, f"{shown(value)} is no number above 0")
        elif ours == "epochs" and number == 1:
            c.keep(key, "all rows")
        elif ours == "epochs":
            source[ours] = number
            c.account(c.changed, key, f"{place}.epochs: {number:g} (that fraction of its rows, drawn with data.seed)")
        else:
            source[ours] = (
                number if ours == "weight" else str(value).lower() == "true" if ours == "streaming" else value
            )
            c.account(c.carried, key, f"{place}.{ours}: {shown(source[ours])}")
    return source


def _split(c: Conversion, key: str, place: str) -> dict[str, Any]:
    split, fraction = split_of(str(c.get(key)))
    source: dict[str, Any] = {} if split == "train" else {"split": split}
    if fraction is None:
        c.account(c.carried, key, f"{place}.split: {split}")
        return source
    why = f"of {c.get(key)}: that fraction of the rows, drawn with data.seed"
    c.account(c.changed, key, f"{place}.epochs: {fraction:g} ({why})")
    return source | {"epochs": fraction}


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


def column(c: Conversion, key: str, place: str, ours: str, source: dict[str, Any]) -> None:
    """Rename a column of a source where its name is not one that is recognized."""
    if not c.has(key):
        return
    theirs = str(c.get(key))
    if theirs == ours or {theirs, ours} <= {"messages", "conversations"}:
        c.keep(key, f"{theirs} is recognized")
    else:
        source["columns"] = source.get("columns", {}) | {ours: theirs}
        c.account(c.carried, key, f"{place}.columns: {ours} is {theirs}")


def set_sources(c: Conversion, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    """Set data.train, and data.held_out where the file names datasets for it."""
    if any("weight" in source for source in train) and not all("weight" in source for source in train):
        c.comments["data.train"] = ["some sources had a weight and others none, and here all do or none"]
        train = [{key: value for key, value in source.items() if key != "weight"} for source in train]
    if not train:
        train = [{"path": "DATA"}]
        c.comments["data.train"] = [NO_DATASET]
    # An eval split is used in full.
    held_out = [{key: value for key, value in one.items() if key not in ("epochs", "weight")} for one in held_out]
    c.settings["data.train"] = train[0]["path"] if len(train) == 1 and set(train[0]) == {"path"} else train
    if held_out:
        c.settings["data.held_out"] = held_out


def held_out_size(c: Conversion, key: str) -> None:
    """Convert the size of an eval split: a fraction, or a number of rows."""
    size = as_number(c.get(key))
    if not c.has(key) or size is None:
        return
    if "data.held_out" in c.settings:
        c.drop(key, "datasets of their own are the eval split")
    elif 0 < size < 1:
        c.carry(key, "data.held_out", size)
    elif size > 0:
        c.change(key, "data.held_out", 0.01, f"{size:g} rows there, and a fraction of the rows here")
    else:
        c.keep(key, "no eval split")
