"""Holds a conversion: the tables of keys, what the recipe gets, and in which of three lists each key of the file is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, NamedTuple

from pydantic import ValidationError

from sft.errors import UserError
from sft.recipe.schema import Recipe
from sft.recipe.section import section_at


class ConversionError(UserError):
    """A file that cannot become a recipe: another kind of training, an unknown tool, or something to add to the command."""


class NotCarried(Exception):
    """Raised by a translation: the reason why the value is not carried over."""


class HoldsAnyway(Exception):
    """Raised by a translation: why the recipe need not say it."""


class Changed(NamedTuple):
    """Returned by a translation whose value has another meaning here."""

    value: Any
    why: str
    to: str = ""
    """Our key, where it is not the row's."""


Translate = Callable[["Conversion", str, Any], Any]
"""A function of the file, the key and its value; what it returns has the same meaning unless it is Changed."""

Translation = Mapping[str, Any] | Translate
"""Their values, as text in lower case, and ours; or a function."""


class Row(NamedTuple):
    """What becomes of one key of another tool. The pages of docs/ show these rows."""

    to: str = ""
    """Our key; empty where nothing here corresponds."""

    note: str = ""
    """What differs; without `to`, why it is not carried over."""

    default: Any = None
    """What the tool does where its file does not say, if our default is another: the recipe then says it."""

    translation: Translation | None = None
    """None: the value stays."""


def table(text: str, translations: Mapping[str, Translation] | None = None) -> dict[str, Row]:
    """Read a table of keys: a line for one key or several with the same meaning, separated by blanks; their names may take several lines.

    `theirs -> ours`, `theirs -> ours (their default) -- what differs`, or `theirs -- why it is not carried over`. A `*` in theirs stands
    for any text; one at the end of ours for the same name. A translation is found by their key, or else by ours.

    >>> table("lr -> train.learning_rate (2e-5)")["lr"]
    Row(to='train.learning_rate', note='', default=2e-05, translation=None)
    """
    rows = {}
    for line in re.findall(r"[^\n](?:(?! -> | -- )(?:.|\n))*(?: -> | -- ).*", text):
        left, _, note = line.partition(" -- ")
        keys, _, target = left.partition(" -> ")
        match = re.fullmatch(r"([^(]*?)(?: \((.*)\))?", target)
        assert match, line
        for key in keys.split():
            to = match[1].removesuffix("*") + key if match[1].endswith("*") else match[1]
            translation = (translations or {}).get(key, (translations or {}).get(to))
            rows[key] = Row(to, note, json.loads(match[2]) if match[2] else None, translation)
    return rows


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a config with its value, dotted; of lists of mappings too, by their index.

    >>> flatten({"a": {"b": 1}, "c": [{"d": 2}], "e": [3], "f": {}})
    {'a.b': 1, 'c.0.d': 2, 'e': [3], 'f': {}}
    """
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, one in value.items():
        flat |= flatten(one, f"{prefix}.{key}" if prefix else str(key))
    return flat


def refusal(key: str, value: Any) -> str:
    """Why a recipe does not take this value for this key; empty if it does."""
    if isinstance(value, float) and not isfinite(value):
        return f"{key} does not take {value}: it should be a finite number"
    *parents, name = key.split(".")
    schema, above = section_at(Recipe, parents), section_at(Recipe, parents[:-1])
    if schema is None and above is not None and parents[-1] in above.model_fields:
        return ""  # a key of a mapping, such as train.trainer_args
    if schema is None or name not in schema.model_fields:
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
    options = [value]
    if isinstance(value, str):
        with suppress(ValueError):
            options.append(json.loads(value.lower()))
        options.append([value])
    options += [int(one) for one in options if isinstance(one, float) and one.is_integer()]
    return next((one for one in options if not refusal(key, one)), value)


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


_FIRST = {
    "model.lora": 0,
    "model.quantization": 1,
    "train.deepspeed": 2,
    "train.fsdp": 3,
    "data.held_out": 4,
    "train.learning_rate": 5,
}
"""Our keys on which translations of others depend."""

_SECTIONS = {
    "model.lora.": ("model.lora", "no adapters are trained"),
    "model.bnb_4bit": ("model.quantization", "nothing is quantized"),
    "train.fsdp.": ("train.fsdp", "FSDP is not used"),
    "data.train": ("", "it belongs to no dataset that converts"),
}
"""Keys that have no effect unless the recipe has another key."""


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

    carried: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the file; the default where it is missing or empty."""
        value = self.keys.get(key)
        return default if value is None or value in ("", [], {}) else value

    def has(self, key: str) -> bool:
        """Whether the file gives a key a value, and no list has it yet."""
        return self.get(key) is not None and key not in self.carried | self.changed | self.dropped

    def carry(self, key: str, to: str, value: Any, why: str = "") -> None:
        """Carry a key over, with another meaning if there is a `why`; drop it where recipes do not take the value."""
        value = fitted(to, value)
        if reason := refusal(to, value):
            self.dropped[key] = reason
            return
        if why and to not in self.settings:
            self.comments.setdefault(to, []).append(f"{key}: {why}")
        self.settings[to] = value
        self.account(key, f"{to}: {shown(value)}", why)

    def account(self, key: str, text: str, why: str = "") -> None:
        """Put a key into the list of those carried over, with another meaning if there is a `why`."""
        (self.changed if why else self.carried)[key] = text + (f" ({why})" if why else "")

    def apply(self, rows: Mapping[str, Row]) -> None:
        """Put every key that no list has yet into one, by the tool's table, and write the tool's defaults that are not ours."""
        unknown = Row(note="nothing here that this converter knows corresponds to it")
        given = [(key, _row(rows, key) or unknown) for key in self.keys]
        for key, row in sorted(given + list(rows.items()), key=lambda one: _FIRST.get(one[1].to, len(_FIRST))):
            if self.has(key):
                self._convert(key, row)
            elif self.get(key) is None and row.default is not None and row.to not in self.settings:
                self._default(key, row)
            if key in self.keys and self.get(key) is None and key not in self.changed:
                self.dropped[key] = "no value"

    def _default(self, key: str, row: Row) -> None:
        """Write what the tool does where its file does not say, since our default is another."""
        with suppress(NotCarried, HoldsAnyway):
            value = self._translated(key, row, row.default)
            changed = value if isinstance(value, Changed) else Changed(value, "")
            to, said = changed.to or row.to, f"{self.tool}'s default{changed.why and '; '}{changed.why}"
            self.changed[key] = f"{to}: {shown(changed.value)} (not in the file: {said})"
            self.settings[to] = changed.value
            self.comments.setdefault(to, []).append(said)
            self.dropped.pop(key, None)  # an empty value

    def _convert(self, key: str, row: Row) -> None:
        try:
            value = self._translated(key, row, self.keys[key])
        except NotCarried as reason:
            self.dropped[key] = str(reason)
        except HoldsAnyway as reason:
            self.carried[key] = str(reason)
        else:
            note = "" if callable(row.translation) else row.note
            changed = value if isinstance(value, Changed) else Changed(value, note)
            self.carry(key, changed.to or row.to, changed.value, changed.why)

    def _translated(self, key: str, row: Row, value: Any) -> Any:
        if not row.to:
            raise NotCarried(row.note)
        for prefix, (needed, why) in _SECTIONS.items():
            if row.to.startswith(prefix) and needed not in self.settings:
                raise NotCarried(why)
        if callable(row.translation):
            return row.translation(self, key, value)
        if row.translation is None:
            return value
        if str(value).lower() not in row.translation:
            raise NotCarried(f"{row.to} has nothing like {shown(value)}")
        return row.translation[str(value).lower()]


def _row(rows: Mapping[str, Row], key: str) -> Row | None:
    """The row of a key: its own, else the first whose pattern it matches."""
    matching = (row for pattern, row in rows.items() if "*" in pattern and fnmatchcase(key, pattern))
    return rows.get(key) or next(matching, None)


def shown(value: Any) -> str:
    """A value on one line, shortened."""
    is_plain = isinstance(value, str) and value.isprintable()
    text = value if is_plain else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
