from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from sft.recipe import Recipe, Section

MakeRecipe = Callable[..., Recipe]


def test_nothing_changes_after_loading(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.seed = 5  # type: ignore[misc]


def sections(section: type[Section] = Recipe) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        inner = [
            part
            for option in (field.annotation, *getattr(field.annotation, "__args__", ()))
            for part in (option, *getattr(option, "__args__", ()))
            if isinstance(part, type) and issubclass(part, Section)
        ]
        if not inner or inner == [section]:
            yield f"{section.__name__}.{name}", field
        for part in inner:
            yield from sections(part)


def test_every_key_says_what_it_is() -> None:
    fields = dict(sections())
    assert len(fields) > 50
    assert [name for name, field in fields.items() if not field.description and name != "Recipe.data"] == []


def test_the_keys_that_scripts_rely_on_keep_their_names(make_recipe: MakeRecipe) -> None:
    keys = (
        "model.name_or_path model.attn_implementation model.kernels data.train data.max_length data.packing "
        "train.global_batch_size train.micro_batch_size train.learning_rate train.num_train_epochs train.max_steps "
        "train.precision train.seed train.deepspeed train.save_steps train.logging_steps train.resume eval.tasks "
        "eval.suite eval.limit tracking.report_to tracking.run_name output_dir train.trainer_args"
    ).split()
    dumped = make_recipe().model_dump()
    for key in keys:
        value: Any = dumped
        for part in key.split("."):
            assert part in value, key
            value = value[part]
