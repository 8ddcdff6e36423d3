"""Holds a conversion: what the recipe gets, and in which of three lists each key of the file is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from pydantic import ValidationError

from sft.errors import UserError
from sft.recipe.schema import Recipe
from sft.recipe.section import Section, sections_in


class ConversionError(UserError):
    """A file that cannot become a recipe: another kind of training, an unknown tool, or something to add to the command."""


_TOGETHER = (
    "data.train data.held_out model.chat_template model.lora train.deepspeed train.fsdp train.global_batch_size "
    "train.load_best_model_at_end train.early_stopping_patience train.metric_for_best_model train.greater_is_better"
).split()
"""Keys that several of a tool's keys decide together, in a function of its module: a row alone does not."""


@dataclass(frozen=True)
class Row:
    """What becomes of one key of another tool. The pages of docs/ show these rows."""

    to: str = ""
    """Our key; empty where nothing here corresponds."""

    note: str = ""
    """What differs; without `to`, why it is not carried over."""

    default: Any = None
    """What the tool does where its file does not say, if our default is another: the recipe then says it."""

    values: Mapping[str, Any] | None = None
    """Their values, as text in lower case, and ours; None: the value stays."""


def table(text: str, values: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Row]:
    """Read a table of keys: a line for one key or several with the same meaning, separated by blanks; their names may take several lines.

    `theirs -> ours`, `theirs -> ours (their default) -- what differs`, or `theirs -- why it is not carried over`. A `*` at the end of
    theirs stands for any key below it; one at the end of ours for the same name.

    >>> table("lr -> train.learning_rate (2e-5)")["lr"]
    Row(to='train.learning_rate', note='', default=2e-05, values=None)
    """
    rows = {}
    for line in re.findall(r"[^\n](?:(?! -> | -- )(?:.|\n))*(?: -> | -- ).*", text):
        left, _, note = line.partition(" -- ")
        keys, _, target = left.partition(" -> ")
        match = re.fullmatch(r"([^(]*?)(?: \((.*)\))?", target)
        assert match, line
        for key in keys.split():
            to = match[1].removesuffix("*") + key if match[1].endswith("*") else match[1]
            rows[key] = Row(to, note, json.loads(match[2]) if match[2] else None, (values or {}).get(key))
    return rows


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a config with its value, dotted; of lists of mappings too, by their index.

    >>> flatten({"a": {"b": 1}, "c": [{"d": 2}], "e": [3], "f": {}})
    {'a.b': 1, 'c.0.d': 2, 'e': [3], 'f': {}}
    """
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        inner = {str(index): one for index, one in enumerate(value)}
    elif isinstance(value, Mapping) and value:
        inner = {str(key): one for key, one in value.items()}
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, one in inner.items():
        flat |= flatten(one, f"{prefix}.{key}" if prefix else key)
    return flat


def refusal(key: str, value: Any) -> str:
    """Why a recipe does not take this value for this key; empty if it does."""
    if isinstance(value, float) and not isfinite(value):
        return f"{key} does not take {value}: it should be a finite number"
    schema: type[Section] = Recipe
    *parents, name = key.split(".")
    for part in parents:
        inner = list(sections_in(schema.model_fields[part].annotation)) if part in schema.model_fields else []
        if not inner:
            return "" if part in schema.model_fields else f"a recipe has no key {key}"
        schema = inner[0]
    if name not in schema.model_fields:
        return f"a recipe has no key {key}"
    try:
        schema.model_validate_json(json.dumps({name: value}, default=str))
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            if problem["loc"][:1] == (name,):  # not of the keys that are missing here
                said = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
                return f"{key} does not take {shown(value)}: {said}"
    return ""


def fitted(key: str, value: Any) -> Any:
    """The value in the type that a recipe takes for the key, where it says the same: "2e-5" is a number, and 3.0 a whole one."""
    if not refusal(key, value):
        return value
    others: list[Any] = [int(value)] if isinstance(value, float) and value.is_integer() else []
    if isinstance(value, str):
        others += [flag for word, flag in (("true", True), ("false", False)) if value.lower() == word]
        number = as_number(value)
        others += [] if number is None else [number, *([int(number)] if number.is_integer() else [])]
        others += [[value]]
    return next((other for other in others if not refusal(key, other)), value)


def as_list(value: Any) -> list[str]:
    """The names in a list, or in a text with commas."""
    given = value if isinstance(value, list) else str(value).split(",")
    return [str(one).strip() for one in given if str(one).strip()]


def is_true(value: Any) -> bool:
    """Whether a flag is set; YAML may hold it as text."""
    return value is True or str(value).lower() in ("true", "1", "yes", "auto")


def as_whole(value: Any) -> int | None:
    """A whole number above 0; None for -1 (no limit), fractions, and what is no number."""
    number = as_number(value)
    return int(number) if number is not None and number > 0 and number == int(number) else None


def as_number(value: Any) -> float | None:
    """A number that YAML may have read as text, such as 2e-5; None for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if isfinite(number) else None


@dataclass
class Conversion:
    """The recipe that a file becomes, and the account of the file's keys."""

    tool: str
    file: str
    """The file's name, for messages."""

    keys: dict[str, Any]
    """The file, flat: dotted keys and their values."""

    gpus: int | None
    """GPUs that the file was used on."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Values of the recipe by dotted key."""

    comments: dict[str, list[str]] = field(default_factory=dict)
    """Comments of the recipe by dotted key."""

    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates to write beside the recipe, by file name."""

    inapplicable: set[str] = field(default_factory=set)
    """Keys whose defaults have no effect."""

    carried: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the file; the default where it is missing or empty."""
        value = self.keys.get(key)
        return default if value is None or value == "" else value

    def has(self, key: str) -> bool:
        """Whether the file gives a key a value, and no list has it yet."""
        return self.get(key) is not None and key not in self.carried | self.changed | self.dropped

    def carry(self, key: str, to: str, value: Any) -> None:
        """Carry a key over with the same meaning; drop it where recipes do not take it."""
        value = fitted(to, value)
        if reason := refusal(to, value):
            self.drop(key, reason)
        else:
            self.account(self.carried, key, f"{to}: {shown(value)}")
            self.settings[to] = value

    def change(self, key: str, to: str, value: Any, why: str) -> None:
        """Carry a key over with another meaning; drop it where recipes do not take it."""
        value = fitted(to, value)
        if reason := refusal(to, value):
            self.drop(key, reason)
        else:
            self.account(self.changed, key, f"{to}: {shown(value)} ({why})")
            self.settings[to] = value
            self.comments.setdefault(to, []).append(f"{key}: {why}")

    def set(self, to: str, value: Any) -> None:
        """Set a key of the recipe that no single key of the file stands for, where recipes have it."""
        if not refusal(to, value):
            self.settings[to] = value

    def note(self, key: str, to: str, why: str) -> None:
        """A key has another meaning here, and the recipe gets no value from it alone."""
        self.account(self.changed, key, f"{to}: {why}")
        self.comments.setdefault(to, []).append(f"{key}: {why}")

    def keep(self, key: str, why: str) -> None:
        """A key says what holds here anyway."""
        self.account(self.carried, key, why)

    def drop(self, key: str, why: str) -> None:
        """A key is not carried over."""
        self.account(self.dropped, key, why)

    def default(self, key: str, to: str, value: Any, why: str = "") -> None:
        """Write what the tool does where its file does not say, since our default is another."""
        if not refusal(to, value):
            self.dropped.pop(key, None)  # an empty value
            said = f"{self.tool}'s default{why}"
            self.changed[key] = f"{to}: {shown(value)} (not in the file: {said})"
            self.settings[to] = value
            self.comments.setdefault(to, []).append(said)

    def account(self, which: dict[str, str], key: str, text: str) -> None:
        """Put a key of the file into one of the three lists."""
        assert key in self.keys, f"{key} is no key of the file"
        assert key not in self.carried | self.changed | self.dropped, f"{key} is in a list already"
        which[key] = text

    def apply(self, rows: Mapping[str, Row]) -> None:
        """Put every key that no list has yet into one, by the tool's table, and write the tool's defaults that are not ours."""
        for key, value in self.keys.items():
            if key in self.carried or key in self.changed or key in self.dropped:
                continue
            row = _row(rows, key)
            if value is None or value in ("", [], {}):
                self.drop(key, "no value")
            elif row is None:
                self.drop(key, f"no key of {self.tool} that this converter knows")
            elif not row.to:
                self.drop(key, row.note)
            elif (
                row.to.startswith("train.trainer_args.")
                and value in (0, "False", "false")
                and key != "dataloader_pin_memory"
            ):
                self.keep(key, "the default of transformers, and here")
            elif row.to in _TOGETHER:
                self.drop(key, f"{shown(value)} says nothing for {row.to}")
            elif missing := self._missing_section(row.to):
                self.drop(key, missing)
            elif row.values is not None and str(value).lower() not in row.values:
                self.drop(key, f"{row.to} has nothing like {shown(value)}")
            else:
                ours = value if row.values is None else row.values[str(value).lower()]
                self.change(key, row.to, ours, row.note) if row.note else self.carry(key, row.to, ours)
        for key, row in rows.items():
            applies = key not in self.inapplicable and not self._missing_section(row.to)
            if row.default is not None and self.get(key) is None and row.to not in self.settings and applies:
                self.default(key, row.to, row.default)

    def _missing_section(self, to: str) -> str:
        """Why a key of a section that the recipe does not have has no effect."""
        needed = {
            "model.lora.": ("model.lora", "no adapters are trained"),
            "model.bnb_4bit": ("model.quantization", "nothing is quantized"),
            "train.fsdp.": ("train.fsdp", "FSDP is not used"),
            "data.train.": ("", "it belongs to no dataset of data.train"),
            "data.held_out.": ("", "it belongs to no dataset of data.held_out"),
        }
        found = next((said for prefix, said in needed.items() if to.startswith(prefix)), None)
        return found[1] if found and found[0] not in self.settings else ""


def _row(rows: Mapping[str, Row], key: str) -> Row | None:
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    above = [".".join([*parts[:count], "*"]) for count in range(len(parts) - 1, 0, -1)]
    return next((rows[pattern] for pattern in [key, ".".join(parts), *above] if pattern in rows), None)


def shown(value: Any) -> str:
    """A value on one line, shortened."""
    is_plain = isinstance(value, str) and value.isprintable()
    text = value if is_plain else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
