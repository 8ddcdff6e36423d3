"""Generates the JSON Schema of recipes, with which editors complete and check keys.

After a change of the schema: python -m sft.recipe.json_schema > recipes/recipe.schema.json
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from sft.recipe.schema import REPOSITORY, SHIPPED, Recipe
from sft.recipe.section import sections_in

FILE = SHIPPED / "recipes" / "recipe.schema.json"


class _Untitled(GenerateJsonSchema):
    """Without pydantic's titles of fields, which repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    """The JSON Schema of a recipe, as text."""
    schema = Recipe.model_json_schema(schema_generator=_Untitled)
    for name, field in Recipe.model_fields.items():
        if list(sections_in(field.annotation)) and not field.is_required():
            # A section whose lines are all commented out reads as null: sft/recipe/load.py.
            schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    # The draft that editors know best.
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Recipe", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def schema_line(folder: Path) -> str:
    """The comment by which an editor finds the schema for a recipe in this folder; empty where this installation has no schema file.

    >>> schema_line(REPOSITORY / "recipes")
    '# yaml-language-server: $schema=recipe.schema.json'
    """
    at = folder.resolve()
    path = os.path.relpath(FILE, at) if at.is_relative_to(REPOSITORY) else str(FILE)
    return f"# yaml-language-server: $schema={path}" if FILE.is_file() and " " not in path else ""


if __name__ == "__main__":
    print(json_schema(), end="")
