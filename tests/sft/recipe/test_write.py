"""Values of a written recipe change in their places, and all else stays as it was."""

import pytest

from sft.errors import RecipeError
from sft.recipe.load import parse_recipe
from sft.recipe.schema import REPOSITORY
from sft.recipe.write import edited

RECIPE = """\
# What it is for.
schema_version: 1
version: 1
model: {name_or_path: m} # a small one
data:
  train: x # rows
  # Long ones.
  max_length: 4096  # tokens

train:
  global_batch_size: 8
  fsdp:
    prefetch: 2 # layers
  # At the end of the section.
output_dir: out # here
"""


def after(*overrides: str, text: str = RECIPE) -> str:
    return edited(text, overrides)


@pytest.mark.parametrize(
    ("override", "old", "new"),
    [
        ("data.max_length=2048", "max_length: 4096  # tokens", "max_length: 2048  # tokens"),
        ("train.seed=3", "    prefetch: 2 # layers\n", "    prefetch: 2 # layers\n  seed: 3\n"),
        ("model.lora={}", "{name_or_path: m} # a", "{name_or_path: m, lora: {}} # a"),
        ("train.fsdp=null", "\n    prefetch: 2 # layers", "\n    null # layers"),
        ("train.fsdp.prefetch=3", "prefetch: 2 #", "prefetch: 3 #"),
        ("eval.limit=10", "out # here\n", "out # here\neval: {limit: 10}\n"),
        ("output_dir=elsewhere", "out # here", "elsewhere # here"),
    ],
)
def test_a_value_changes_in_its_place_and_the_comments_stay(override: str, old: str, new: str) -> None:
    assert RECIPE.count(old) == 1
    assert after(override) == RECIPE.replace(old, new)


def test_an_empty_section_and_a_file_without_a_last_line_break_take_keys() -> None:
    text = "schema_version: 1\nversion: 1\nmodel: {name_or_path: m}\ndata: {train: x}\ntrain: {global_batch_size: 8}\neval:"
    assert after("eval.limit=3", text=text).endswith("\neval: {limit: 3}")
    assert after("tracking.run_name=a", text=text).endswith("\neval:\ntracking: {run_name: a}")


def test_every_shipped_recipe_can_be_changed() -> None:
    overrides = ["train.deepspeed=zero3", "train.parallel=null", "train.gradient_checkpointing=2", "output_dir=a b"]
    for file in sorted((REPOSITORY / "recipes").glob("*.yaml")):
        text = file.read_text()
        changed = edited(text, overrides)
        assert parse_recipe(changed) == parse_recipe(text, overrides)
        comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
        assert [line.partition("#")[2] for line in changed.splitlines() if "#" in line] == comments


def test_a_value_that_an_anchor_shares_is_refused() -> None:
    text = RECIPE.replace("max_length: 4096", "max_length: &length 4096\n  pack_length: *length")
    with pytest.raises(RecipeError, match=r"data\.max_length=2048.* by hand"):
        after("data.max_length=2048", text=text)
