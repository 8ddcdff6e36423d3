"""Reads a recipe: YAML and overrides in, a validated Recipe out, or all mistakes in one message."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sft.credentials import secrets_in
from sft.errors import RecipeError, did_you_mean
from sft.recipe.other_tools import other_tool
from sft.recipe.schema import SCHEMA_VERSION, SHIPPED, Recipe, Source
from sft.recipe.section import section_at, sections_in

_REMOVED_FINDINGS = {"answer_in_question", "repeated_system", "base64", "carriage_return", "held_out_near"}
"""Values that `data.refuse` and `data.allow` once took. Recipes that name them still load, and a line says so."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe file.

    Raises:
        RecipeError: The file is missing or unreadable, or all its mistakes in one message.
    """
    try:
        if path.is_fifo():
            raise RecipeError(f"{path} is a pipe, and each process of the run reads the recipe: write it to a file.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = [str(p.relative_to(SHIPPED)) for p in sorted((SHIPPED / "recipes").glob("*.yaml"))]
        raise RecipeError(f"There is no recipe {path}. Shipped: {', '.join(known)}.") from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder, not a recipe file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}.") from None
    return parse_recipe(text, overrides, origin=str(path)).placed(path.parent)


def parse_recipe(text: str, overrides: Sequence[str] = (), origin: str = "recipe") -> Recipe:
    """Validate a recipe's text.

    Args:
        text: YAML.
        overrides: `key=value` with dots, as on the command line; values are YAML.
        origin: What messages call it: the path.

    Raises:
        RecipeError: All mistakes in one message.
    """
    if found := secrets_in(text, overrides):
        lines = "\n".join(f"  {line}" for line in found)
        raise RecipeError(
            f"{origin} holds what looks like a token or a key:\n{lines}\nRecipes and overrides are copied into the run's folder, which is "
            "meant to be shared. Remove it, and log in with `hf auth login` or `wandb login`, or set an environment variable such as "
            "HF_TOKEN or WANDB_API_KEY."
        )
    values = _read_yaml(text, origin)
    if not isinstance(values, dict):
        raise RecipeError(f"{origin} is not a valid recipe:\n  it holds {'nothing' if values is None else 'no keys'}")
    # A section whose lines are all commented out reads as null; it means its defaults.
    values = {key: {} if value is None and key in Recipe.model_fields else value for key, value in values.items()}
    for override in overrides:
        apply_override(values, override)
    _drop_removed_findings(values, origin)
    version = values.get("schema_version")
    if isinstance(version, int) and version != SCHEMA_VERSION:
        remedy = "Update the program." if version > SCHEMA_VERSION else f"There is no version {version}."
        raise RecipeError(
            f"{origin} is written in schema_version {version}, and this program reads {SCHEMA_VERSION}. {remedy}"
        )
    try:
        # Through JSON, where pydantic's strict mode takes a list for a tuple and an int for a float, and nothing else.
        return Recipe.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        tool = other_tool(values)
        if tool not in (None, "accelerate", "DeepSpeed"):
            command = f"sft convert {shlex.quote(origin)} --gpus N -o recipe.yaml"
            raise RecipeError(f"{origin} looks like a config of {tool}. To convert it: {command}") from None
        raise RecipeError("\n".join([f"{origin} is not a valid recipe:", *_explain(error)])) from None


def _drop_removed_findings(values: dict[str, Any], origin: str) -> None:
    data: Any = values.get("data")
    for key in ("refuse", "allow"):
        named = data.get(key) if isinstance(data, dict) else None
        if isinstance(named, list) and (gone := [one for one in named if str(one) in _REMOVED_FINDINGS]):
            data[key] = [one for one in named if one not in gone]
            print(f"{origin}: data.{key}: {', '.join(gone)} no longer exists, and is left out.", file=sys.stderr)


def find_file(path: str) -> Path:
    """Find a path as the user wrote it: from the working directory, or else among the shipped recipes/ and ds_configs/.

    Returns:
        The first that exists; the one from the working directory if neither does.
    """
    here, shipped = Path(path), SHIPPED / path
    try:
        here = here.expanduser()
        return here if here.exists() or not shipped.exists() else shipped
    except (OSError, RuntimeError, ValueError):  # no file can have such a name
        return Path("no such file")


def find_recipe(name: str) -> Path:
    """Find a recipe by its path, as find_file does, or a shipped one by its name alone.

    >>> find_recipe("tiny").name
    'tiny.yaml'
    """
    path = find_file(name)
    shipped = SHIPPED / "recipes" / f"{name.removesuffix('.yaml')}.yaml"
    return shipped if "/" not in name and not path.exists() and shipped.is_file() else path


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `2e-5` is a number, `010` is refused, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, value_node in node.value:
            # `<<: *anchor` takes over another mapping's keys; PyYAML merges them below, under those written here.
            merges = key_node.tag == "tag:yaml.org,2002:merge"
            key = "<<" if merges else self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise RecipeError(f"line {line}: the key {key!r} is not a name; quote it")
            if key in seen:
                raise RecipeError(f"line {line}: `{key}` was already given on line {seen[key]}")
            if key in ("lora", "fsdp") and isinstance(value_node, yaml.ScalarNode) and not value_node.value:
                # It reads as null, which would train all weights when every line under `lora:` is commented out.
                raise RecipeError(
                    f"line {line}: `{key}` is empty: write `{key}: {{}}` for its defaults, or `{key}: null`"
                )
            seen[key] = line
        return super().construct_mapping(node, deep=True)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        # YAML 1.1 reads 010 as 8, and 1:30 as 90.
        base = 8 if re.fullmatch(r"[-+]?0[0-9_]+", node.value) else 60 if ":" in node.value else None
        if base is None:
            return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        raise RecipeError(
            f"line {node.start_mark.line + 1}: YAML reads {node.value} as a number in base {base}. Write a decimal number, or quote it "
            "if it is text"
        )


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


# PyYAML follows YAML 1.1, where 2e-5 has no dot and is therefore a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (made from SafeLoader)
    except RecipeError as error:
        raise RecipeError(f"{origin} is not a valid recipe:\n  {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(f"{origin} is not valid YAML:\n  {place}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as an impossible date, or endless nesting
        raise RecipeError(f"{origin} is not valid YAML:\n  {str(error).splitlines()[0]}") from None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put the value of a `key=value` where its dots say. Raises RecipeError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"'{override}' is not an override. Write key=value, for example train.learning_rate=1e-5.")
    *parents, leaf = key.split(".")
    section = values
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise RecipeError(f"override {override}: `{parent}` holds {section!r}, which has no keys of its own")
    text = text.strip()
    # The shell has removed its quotes: a `#` or a line break in plain text belongs to it and is not YAML's.
    plain = not text.startswith(tuple("'\"[{|>&*!")) and (re.search(r"(^|\s)#", text) or "\n" in text)
    section[leaf] = text if plain else _read_yaml(text, f"override {override}")


_MISSING = {
    "schema_version": f"write `schema_version: {SCHEMA_VERSION}` (format of the file)",
    "version": "write `version: 1` (of this recipe)",
}


def _explain(error: ValidationError) -> list[str]:
    """A line for each mistake, with its key."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        path = _location(problem)
        where = ".".join(path) or "recipe"
        if problem["type"] == "extra_forbidden":
            text = f"unknown key{_hint(path)}"
        elif problem["type"] == "missing":
            text = f"missing; {_MISSING.get(where, 'this key has no default')}"
        elif problem["type"] == "value_error":
            text = problem["msg"].removeprefix("Value error, ")
        else:
            text = _wrong_value(problem, where)
        lines[where] = f"{lines[where]}, or {text}" if where in lines and text not in lines[where] else text
    # pydantic reports each branch of a union: if a mistake lies deeper in `data.train`, its being no text is beside the point.
    shown = {where: text for where, text in lines.items() if not any(other.startswith(f"{where}.") for other in lines)}
    return [f"  {where}: {text}" for where, text in shown.items()]


_UNION_BRANCHES = {"str", "int", "bool", "constrained-int", "constrained-str", "constrained-float"}


def _location(problem: Any) -> list[str]:
    """The path of keys to a mistake, without the union branches that pydantic tried (`str`, `tuple[Source, ...]`)."""
    path = [str(part) for part in problem["loc"]]
    # An unknown key stays, whatever it is called.
    unknown = path[-1:] if problem["type"] == "extra_forbidden" else []
    known = path[: len(path) - len(unknown)]
    return [part for part in known if not ("[" in part or part in _UNION_BRANCHES)] + unknown


# What other tools, or transformers, call a key.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size` (accumulation follows from it), not `gradient_accumulation_steps",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler_kwargs": "min_lr_ratio`, `lr_decay_steps`, `lr_decay_type` and `lr_power",
    "bf16": "precision",
    "fp16": "precision",
    "max_seq_length": "max_length",
    "use_liger_kernel": "kernels",
    "model_name_or_path": "name_or_path",
    "dataset": "train",
}


def _hint(path: list[str]) -> str:
    """What was probably meant by an unknown key."""
    *parents, name = path
    schema = section_at(Recipe, [part for part in parents if not part.isdigit()]) or Recipe
    known, other = list(schema.model_fields), _OTHER_NAMES.get(name, "")
    if other.split("`")[0] in known:
        hint = f"; here it is `{other}`"
    else:
        homes = [
            home
            for home, field in Recipe.model_fields.items()
            for section in sections_in(field.annotation)
            if name in section.model_fields
        ]
        hint = did_you_mean(name, known) or (f"; it belongs to `{homes[0]}`" if homes else "")
        if parents == ["data"] and name in Source.model_fields:
            hint = f"; it belongs to a source: `train: [{{path: ..., {name}: ...}}]`"
    return hint if name.isascii() else f"{hint} (as written it is {name!a}, which only looks alike)"


def _wrong_value(problem: Any, where: str) -> str:
    value, message = problem["input"], problem["msg"]
    shown = json.dumps(value, default=str)
    text = f"{message[0].lower()}{message[1:]}, got {shown if len(shown) < 80 else shown[:77] + '...'}"
    text = text.replace("input should be", "must be").replace("a valid array", "a list")
    if where in ("data.train", "data.held_out") and isinstance(value, dict):
        text += "; one source is a list, too: [{path: ...}]"
    if where == "model" and problem["type"] == "model_type" and isinstance(value, str):
        text += f"; write {{name_or_path: {value}}}"
    return text
