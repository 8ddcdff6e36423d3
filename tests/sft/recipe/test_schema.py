from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from sft.data.findings import FINDINGS
from sft.data.formats import FORMATS
from sft.errors import RecipeError
from sft.recipe.schema import Data, Finding, Recipe, Section, Source

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
        "eval.suite eval.limit tracking.report_to tracking.run_name output_dir train.trainer_args "
        "data.held_out data.loss_on data.overlong data.deduplicate data.seed model.new_tokens"
    ).split()
    dumped = make_recipe().model_dump()
    for key in keys:
        value: Any = dumped
        for part in key.split("."):
            assert part in value, key
            value = value[part]


def test_a_path_is_a_list_of_one_source(make_recipe: MakeRecipe) -> None:
    assert make_recipe("data.train=a.jsonl").sources == (Source(path="a.jsonl"),)
    assert make_recipe("data.train=[{path: a.jsonl}]").sources == (Source(path="a.jsonl"),)


@pytest.mark.parametrize(
    ("held_out", "sources"),
    [
        ("null", ()),
        ("0.1", ()),
        ("b.jsonl", (Source(path="b.jsonl"),)),
        (
            "[{path: b.jsonl, chat: false}, {path: c.jsonl}]",
            (Source(path="b.jsonl", chat=False), Source(path="c.jsonl")),
        ),
    ],
)
def test_what_is_held_out_is_a_fraction_or_sources(
    held_out: str, sources: tuple[Source, ...], make_recipe: MakeRecipe
) -> None:
    assert make_recipe(f"data.held_out={held_out}").held_out_sources == sources


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("train=[{path: a, weight: 1.0}, {path: b}]", "give `weight` to all sources of `train`, or to none"),
        ("train=[{path: a, weight: 1.0, rows: 5}]", "`rows` and `weight` of a source both say how much to take"),
        ("held_out=[{path: a, rows: 5}]", "held_out sources are used in full"),
        ("held_out=1.0", "data.held_out"),
        ("held_out=[]", "data.held_out"),
        ("train=[]", "data.train"),
        ("train=[{path: a, epochs: 0}]", "epochs"),
        ("pack_length=127", "pack_length=127 is less than max_length=128, .*: raise pack_length to 128 or more"),
        ("pack_length=256; packing=false", "pack_length=256 has no effect while packing is false"),
        ("refuse=[role_ordr]", "data.refuse"),
    ],
)
def test_data_that_contradicts_itself_is_refused(section: str, told: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=told):
        make_recipe(*(f"data.{word}" for word in section.split("; ")))


@pytest.mark.parametrize("value", ["1", "2.5", "all"])
def test_checkpointing_of_every_nth_layer_is_a_number_from_two(value: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=r"train\.gradient_checkpointing"):
        make_recipe(f"train.gradient_checkpointing={value}")


def test_a_sequence_is_as_long_as_a_pack_or_where_there_is_none_as_a_document(make_recipe: MakeRecipe) -> None:
    overrides: list[list[str]] = [[], ["data.packing=false"], ["data.pack_length=128"], ["data.pack_length=4096"]]
    assert [make_recipe(*override).sequence_length for override in overrides] == [128, 128, 128, 4096]


def test_whole_numbers_are_epochs_and_weights_too(make_recipe: MakeRecipe) -> None:
    """As people write them."""
    (source,) = make_recipe("data.train=[{path: a, epochs: 2, weight: 1}]").sources
    assert (source.epochs, source.weight) == (2.0, 1.0)


def test_every_format_and_finding_that_a_recipe_may_name_is_one() -> None:
    formats = get_args(get_args(Source.model_fields["format"].annotation)[0])
    assert set(formats) == set(FORMATS)
    assert set(get_args(Finding)) < set(FINDINGS)


def test_nothing_is_lost_by_default() -> None:
    """What is dropped or held out, the recipe says; a row that cannot be read stops the run."""
    data = Data(train="a.jsonl")
    assert (data.on_bad_row, data.held_out, data.deduplicate, data.refuse) == ("error", None, False, ())
