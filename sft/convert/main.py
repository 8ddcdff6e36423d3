"""Reads a config of another tool, converts it, and shows the three lists. What `sft convert` runs."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sft.convert import axolotl, llamafactory, torchtune, trl
from sft.convert.conversion import Conversion, ConversionError, Row, flatten
from sft.recipe.json_schema import schema_line
from sft.recipe.load import parse_recipe
from sft.recipe.other_tools import other_tool
from sft.recipe.write import recipe_lines
from sft.terminal import visible_line

TOOLS: dict[str, tuple[Callable[[Conversion], None], Mapping[str, Row]]] = {
    "trl": (trl.convert, trl.TRL),
    "alignment-handbook": (trl.convert, trl.TRL),
    "transformers": (trl.convert, trl.TRANSFORMERS),
    "axolotl": (axolotl.convert, axolotl.AXOLOTL),
    "LLaMA-Factory": (llamafactory.convert, llamafactory.LLAMA_FACTORY),
    "torchtune": (torchtune.convert, torchtune.TORCHTUNE),
}
"""How each tool's config is converted, and the table of its keys."""

_LARGEST = 2_000_000
"""Bytes of a config. More is a dataset that was named by mistake."""

_MOST_VALUES = 100_000
"""More are no config: YAML aliases can stand for billions, and hold themselves."""


class _Loader(yaml.SafeLoader):
    """YAML as the tools read it: `2e-5` is a number, and a key given twice counts last."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file.

    Raises:
        ConversionError: It cannot be read, or holds no keys.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ConversionError(
                f"{path} has {path.stat().st_size:,} bytes, as no training config does. Name the config, not the data."
            )
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (made from SafeLoader)
    except FileNotFoundError:
        raise ConversionError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise ConversionError(f"{path} is a folder. Name the training config in it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict) or not values:
        raise ConversionError(
            f"{path} holds {'nothing' if values is None else 'no keys'}, so it is no training config."
        )
    rest, count = list(values.values()), 0
    while rest and count < _MOST_VALUES:
        one, count = rest.pop(), count + 1
        rest += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    if rest:
        raise ConversionError(
            f"{path} stands for more than {_MOST_VALUES:,} values through its aliases, as no training config does."
        )
    return {str(key): value for key, value in values.items()}


def convert(path: Path, gpus: int | None) -> Conversion:
    """Convert a config of another tool.

    Args:
        path: The file.
        gpus: GPUs that it was used on, which turn a batch per GPU into a global batch.

    Raises:
        ConversionError: It is no config of a known tool, it configures another kind of training, or `gpus` is missing.
    """
    values = read_config(path)
    tool = other_tool(values)
    if tool is None or tool not in TOOLS:
        raise ConversionError(_unknown(path, values, tool))
    conversion = Conversion(tool, path.name, flatten(values), gpus)
    TOOLS[tool][0](conversion)
    for key in ("model.name_or_path", "data.train", "train.global_batch_size"):
        if key not in conversion.settings:
            why = next((f": {why}" for why in conversion.dropped.values() if key in why), "")
            raise ConversionError(f"{path} gives no usable {key}{why}.")
    return conversion


def _unknown(path: Path, values: dict[str, Any], tool: str | None) -> str:
    if "schema_version" in values:
        return f"{path} is a recipe already (schema_version: {values['schema_version']}). Train it: sft train {path}."
    if tool == "DeepSpeed":
        return (
            f"{path} is a DeepSpeed file, which a recipe names: train.deepspeed: {path}. Convert the training config."
        )
    if tool == "accelerate":
        deepspeed, processes = values.get("deepspeed_config"), values.get("num_processes") or "N"
        stage = deepspeed.get("zero_stage") if isinstance(deepspeed, dict) else None
        fsdp = "train.fsdp: {}" if values.get("fsdp_config") else "none, as is the default"
        return (
            f"{path} is a config of `accelerate launch` ({values.get('distributed_type')}, {processes} processes), which says how to start "
            f"and not what to train. Convert the training config with --gpus {processes}; in the recipe, the engine of this file is "
            f"{f'train.deepspeed: zero{stage}' if stage else fsdp}."
        )
    names = ", ".join(list(values)[:8])
    return (
        f"{path} is no config of a tool that is known here: {', '.join(TOOLS)}. Its keys are {names}. A recipe is short to write by hand: "
        "README.md has one."
    )


def recipe_text(c: Conversion, command: str, folder: Path = Path()) -> str:
    """The recipe as YAML.

    Args:
        c: What it holds.
        command: How it was made.
        folder: Where it will lie.
    """
    counts = (
        f"{len(c.carried)} keys carried over, {len(c.changed)} with another meaning, {len(c.dropped)} not carried over"
    )
    lines = [
        f"# From {visible_line(c.file)}, a config of {c.tool}: {counts}.",
        f"#   {visible_line(command)}",
        "# Look at what the model will see, and at every decision, before you train: sft show, sft plan.",
        *filter(None, [schema_line(folder)]),
        "schema_version: 1",
        "version: 1",
    ]
    lines += recipe_lines(c.settings, c.comments)
    return "\n".join(lines) + "\n"


def main(file: Path, output: Path | None, gpus: int | None, as_json: bool) -> None:
    """Convert, write the recipe where `output` says, and print the lists.

    Raises:
        ConversionError: The file cannot become a recipe.
    """
    conversion = convert(file, gpus)
    folder = output.parent if output else Path()
    for name in conversion.templates:
        conversion.settings["model.chat_template"] = str(folder / name)
    command = [
        "sft",
        "convert",
        str(file),
        *(["--gpus", str(gpus)] if gpus else []),
        *(["-o", str(output)] if output else []),
    ]
    text = recipe_text(conversion, shlex.join(command), folder)
    parse_recipe(text, origin=f"the recipe from {file}")
    if output:
        _write(output, text, conversion.templates)
    if as_json:
        print(json.dumps(_lists(conversion), indent=2, ensure_ascii=False))
    elif output:
        print("\n".join(_report(conversion)))
        print(f"\nWrote {output}.", f"Look at it, then: sft plan {output}")
    else:
        print(text)
        print("\n".join(f"# {line}".rstrip() for line in _report(conversion)))


def _lists(c: Conversion) -> dict[str, Any]:
    return {"tool": c.tool, "carried": c.carried, "changed": c.changed, "dropped": c.dropped}


def _report(c: Conversion) -> list[str]:
    lines = [f"{c.file} is a config of {c.tool}."]
    for title, keys in (("Carried over", c.carried), ("Carried over with another meaning", c.changed)):
        lines += ["", f"{title} ({len(keys)})", *(f"  {key} -> {text}" for key, text in keys.items())]
    lines += ["", f"Not carried over ({len(c.dropped)})"]
    reasons: dict[str, list[str]] = {}
    for key, why in c.dropped.items():
        reasons.setdefault(why, []).append(key)
    lines += [f"  {', '.join(keys)}: {why}" for why, keys in reasons.items()]
    return [visible_line(line) for line in lines]


def _write(output: Path, text: str, templates: dict[str, str]) -> None:
    try:
        if output.exists() and not output.read_text(encoding="utf-8").startswith("# From "):
            raise ConversionError(
                f"{output} exists, and sft convert did not write it. Name another file, or remove it."
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        for name, template in templates.items():
            file = output.parent / name
            if file.exists() and file.read_text(encoding="utf-8") != template:
                raise ConversionError(
                    f"{file} exists and is another chat template. Write the recipe to another folder."
                )
            (output.parent / name).write_text(template, encoding="utf-8")
        output.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(
            f"{output} cannot be written: {os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error}."
        ) from None
