from collections.abc import Callable

import pytest

from sft.errors import RecipeError
from sft.recipe.changes import (
    check_allowed_changes,
    differences,
    not_allowed,
    on_resume,
    recipe_differences,
    recipe_keys,
)
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]


def changed(make_recipe: MakeRecipe, *overrides: str) -> dict[str, str]:
    """Kind of each changed key."""
    return {change.key: change.kind for change in recipe_differences(make_recipe(), make_recipe(*overrides))}


def test_every_key_says_whether_it_may_change_on_resume() -> None:
    """A key that is added must be thought about: may it change when a run resumes?"""
    keys = set(recipe_keys())
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    assert {on_resume(key).kind for key in keys - sections} == {"free", "named", "fixed"}


def test_recipes_are_compared_by_meaning(make_recipe: MakeRecipe) -> None:
    assert changed(make_recipe, "train.adam_beta2=0.95", "train.resume=auto") == {}
    assert changed(make_recipe, "train.seed=1", "train.max_steps=7", "eval.limit=3") == {
        "train.seed": "fixed",
        "train.max_steps": "named",
        "eval.limit": "free",
    }
    assert changed(make_recipe, "model.lora={}", "train.fsdp={}") == {"model.lora": "fixed", "train.fsdp": "free"}
    assert changed(make_recipe, "train.trainer_args={neftune_noise_alpha: 5, dataloader_num_workers: 2}") == {
        "train.trainer_args.neftune_noise_alpha": "fixed",
        "train.trainer_args.dataloader_num_workers": "free",
    }


def test_differences_are_told_by_key() -> None:
    old = {"a": {"b": 1, "c": None}, "list": [{"x": 1}, {"x": 2}], "text": "", "same": [1]}
    new = {"a": {"b": True, "d": 1}, "list": [{"x": 1}, {"x": 3}], "text": "word", "same": [1]}
    assert [str(change) for change in differences(old, new)] == [
        "a.b: 1 -> true",
        "a.c: null -> (not there)",
        "a.d: (not there) -> 1",
        "list.1.x: 2 -> 3",
        'text: "" -> word',
    ]


def test_a_change_is_allowed_by_its_name_or_its_sections(make_recipe: MakeRecipe) -> None:
    changes = recipe_differences(make_recipe(), make_recipe("train.max_steps=7", "data.on_bad_row=drop", "debug=true"))
    assert [change.key for change in not_allowed(changes, [])] == ["data.on_bad_row", "train.max_steps"]
    assert [change.key for change in not_allowed(changes, ["data"])] == ["train.max_steps"]
    assert not_allowed(changes, ["data.on_bad_row", "train.max_steps"]) == []
    fixed = recipe_differences(make_recipe(), make_recipe("train.seed=1"))
    assert not_allowed(fixed, ["train.seed", "train"]) == fixed


def test_names_that_allow_nothing_are_refused() -> None:
    check_allowed_changes(["train.max_steps", "data", "eval", "data.on_bad_row", "train.save_steps"])
    with pytest.raises(RecipeError) as refused:
        check_allowed_changes(["train.max_step", "max_steps", "train", "model.lora.r", "train.weight_decay", "qqq"])
    assert str(refused.value).splitlines() == [
        "train.resume_allow_changes:",
        "  train.max_step: unknown key; did you mean `train.max_steps`?",
        "  max_steps: unknown key; did you mean `train.max_steps`?",
        "  train: some keys of this section may change and others may not; name the keys",
        "  model.lora.r: cannot change when a run resumes: the weights and tokens in the checkpoint belong to the other model",
        "  train.weight_decay: cannot change when a run resumes: it is part of the optimizer's state in the checkpoint, which would win",
        "  qqq: unknown key",
    ]
