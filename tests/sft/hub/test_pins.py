from collections.abc import Callable
from pathlib import Path

import pytest

from sft.hub.model_facts import ModelFacts
from sft.hub.names import is_commit, is_on_hub
from sft.hub.pins import hub_revisions, pin_lines
from sft.recipe.load import load_recipe
from sft.recipe.schema import REPOSITORY, Recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_names_the_commit_of_all_that_it_takes_from_the_hub(path: Path) -> None:
    recipe = load_recipe(path)
    if not recipe.model.name_or_path.startswith("builtin:"):
        assert is_commit(recipe.model.revision)
    assert all(is_commit(source.revision) for source in recipe.sources if is_on_hub(source))


def test_what_is_pinned_is_recorded_and_not_told(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("model.name_or_path=owner/m", f"data.train=[{{path: owner/d, revision: {COMMIT}}}]")
    revisions = hub_revisions(recipe, ModelFacts("owner/m", commit=COMMIT))
    assert [(one["key"], one["name"], one["commit"]) for one in revisions] == [
        ("model", "owner/m", COMMIT),
        ("data.train", "owner/d", COMMIT),
    ]
    (line,) = pin_lines(revisions)
    assert line == f"Not pinned: owner/m main stands for {COMMIT} today; to keep it, set model.revision: {COMMIT}"


def test_a_branch_that_nobody_can_resolve_is_told_as_such(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("data.train=[{path: owner/no-such-data, revision: dev}]")
    (line,) = pin_lines(hub_revisions(recipe, ModelFacts("/models/local")))
    assert "owner/no-such-data dev" in line
    assert "revision of owner/no-such-data in data.train" in line


def test_local_models_and_data_have_nothing_to_pin(make_recipe: Callable[..., Recipe]) -> None:
    assert hub_revisions(make_recipe(), ModelFacts("/models/local")) == []
