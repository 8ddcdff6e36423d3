import re
from pathlib import Path

import pytest

from sft.recipe.json_schema import FILE, json_schema, schema_line
from sft.recipe.schema import REPOSITORY

RECIPES = sorted((REPOSITORY / "recipes").glob("**/*.yaml"))


def test_the_committed_schema_is_that_of_the_recipe() -> None:
    assert FILE.read_text(encoding="utf-8") == json_schema(), (
        "recipes changed: python -m sft.recipe.json_schema > recipes/recipe.schema.json"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_leads_editors_to_the_schema(path: Path) -> None:
    found = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [path.parent / one for one in found] == [FILE]


def test_a_recipe_elsewhere_leads_to_it_too(tmp_path: Path) -> None:
    for folder in (tmp_path, REPOSITORY, REPOSITORY / "docs" / "images", REPOSITORY / "recipes"):
        line = schema_line(folder)
        assert (folder / line.removeprefix("# yaml-language-server: $schema=")).resolve() == FILE
