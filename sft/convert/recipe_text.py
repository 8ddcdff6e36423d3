"""Writes the recipe of a conversion: only what differs from the defaults, with a comment where the meaning differs."""

from __future__ import annotations

from pathlib import Path

from sft.convert.conversion import Conversion
from sft.recipe.json_schema import schema_line
from sft.recipe.write import recipe_lines


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
        f"# From {c.file}, a config of {c.tool}: {counts}.",
        f"#   {command}",
        "# Look at what the model will see, and at every decision, before you train: sft show, sft plan.",
        *filter(None, [schema_line(folder)]),
        "schema_version: 1",
        "version: 1",
    ]
    lines += recipe_lines(c.settings, c.comments)
    return "\n".join(lines) + "\n"
