"""Reads a config of another tool, converts it, and shows the three lists. What `sft convert` runs."""

from __future__ import annotations

import json
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


class _Loader(yaml.SafeLoader):
    """YAML as the tools read it: `2e-5` is a number, and a key given twice counts last."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Aliases can stand for billions of values, and hold themselves.
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not read; write the values in their place")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file.

    Raises:
        ConversionError: It cannot be read, or holds no keys.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (made from SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict) or not values:
        raise ConversionError(f"{path} holds no keys, so it is no training config.")
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
            raise ConversionError(f"{path} gives no usable {key}.")
    return conversion


def _unknown(path: Path, values: dict[str, Any], tool: str | None) -> str:
    if "schema_version" in values:
        return f"{path} is a recipe already (schema_version: {values['schema_version']}). Train it: sft train {path}."
    if tool == "DeepSpeed":
        return (
            f"{path} is a DeepSpeed file, which a recipe names: train.deepspeed: {path}. Convert the training config."
        )
    if tool == "accelerate":
        return (
            f"{path} is a config of `accelerate launch`, which says how to start and not what to train. Convert the training config with "
            "--gpus, and set the engine in the recipe: train.deepspeed: zero3, or train.fsdp: {}."
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
    command = f"sft convert {shlex.quote(str(file))}{f' --gpus {gpus}' if gpus else ''}"
    text = recipe_text(conversion, command, folder)
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
        output.parent.mkdir(parents=True, exist_ok=True)
        for name, content in {**templates, output.name: text}.items():
            file = output.parent / name
            before = file.read_text(encoding="utf-8") if file.exists() else content
            if before != content and not (file == output and before.startswith("# From ")):
                raise ConversionError(
                    f"{file} exists, and sft convert did not write it. Name another file, or remove it."
                )
        for name, content in {**templates, output.name: text}.items():
            (output.parent / name).write_text(content, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{output} cannot be written: {error}.") from None
