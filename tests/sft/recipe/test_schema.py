from collections.abc import Callable
from typing import get_args

import pytest

from sft.data.findings import FINDINGS
from sft.data.formats import FORMATS
from sft.errors import RecipeError
from sft.recipe.changes import recipe_keys
from sft.recipe.schema import Data, Finding, Recipe, Section, Source
from sft.recipe.section import sections_in
from sft.recipe.train import parse_duration

MakeRecipe = Callable[..., Recipe]


def undocumented(section: type[Section]) -> list[str]:
    found = [] if section.__doc__ else [section.__name__]
    for name, field in section.model_fields.items():
        inner = list(sections_in(field.annotation))
        found += [] if field.description or inner else [f"{section.__name__}.{name}"]
        found += [key for one in inner for key in undocumented(one)]
    return found


def test_every_key_is_documented() -> None:
    """The reference of the documentation is made of these docstrings."""
    assert undocumented(Recipe) == []


def test_the_keys_that_scripts_rely_on_keep_their_names() -> None:
    keys = (
        "model.name_or_path model.attn_implementation model.kernels data.train data.max_length data.packing "
        "train.global_batch_size train.micro_batch_size train.learning_rate train.num_train_epochs train.max_steps "
        "train.precision train.seed train.deepspeed train.save_steps train.logging_steps train.resume eval.tasks "
        "eval.suite eval.limit tracking.report_to tracking.run_name output_dir train.trainer_args train.fsdp "
        "data.held_out data.loss_on data.overlong data.deduplicate data.seed model.new_tokens"
    ).split()
    assert set(keys) <= set(recipe_keys())


def test_a_path_is_a_list_of_one_source(make_recipe: MakeRecipe) -> None:
    assert make_recipe("data.train=a.jsonl").sources == (Source(path="a.jsonl"),)
    # Whole numbers are epochs and weights too, as people write them.
    (source,) = make_recipe("data.train=[{path: a, epochs: 2, weight: 1}]").sources
    assert (source.epochs, source.weight) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("held_out", "sources"),
    [
        ("null", ()),
        ("0.1", ()),
        ("b.jsonl", (Source(path="b.jsonl"),)),
        ("[{path: b, chat: false}, {path: c}]", (Source(path="b", chat=False), Source(path="c"))),
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
        ("held_out=5%", "write five percent as 0.05"),
        ("pack_length=127", "pack_length=127 is less than max_length=128, .*: raise pack_length to 128 or more"),
        ("pack_length=256; packing=false", "pack_length=256 has no effect while packing is false"),
    ],
)
def test_data_that_contradicts_itself_is_refused(section: str, told: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=told):
        make_recipe(*(f"data.{word}" for word in section.split("; ")))


@pytest.mark.parametrize("value", ["1", "all"])
def test_checkpointing_of_every_nth_layer_is_a_number_from_two(value: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=r"train\.gradient_checkpointing"):
        make_recipe(f"train.gradient_checkpointing={value}")


def test_a_batch_is_in_sequences_or_in_tokens_of_packs_or_documents(make_recipe: MakeRecipe) -> None:
    assert make_recipe("data.packing=false").sequence_length == 128
    packs = make_recipe("data.pack_length=4096", "train.global_batch_size=null", "train.global_batch_tokens=8192")
    assert (packs.sequence_length, packs.sequences_per_step) == (4096, 2)


@pytest.mark.parametrize("text", ["30", "0s", "1m1h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    assert parse_duration("1d2h3m4s") == 93784
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


def test_every_format_and_finding_that_a_recipe_may_name_is_one() -> None:
    formats = get_args(get_args(Source.model_fields["format"].annotation)[0])
    assert set(formats) == set(FORMATS)
    assert set(get_args(Finding)) < set(FINDINGS)


def test_nothing_is_lost_by_default() -> None:
    """What is dropped or held out, the recipe says; a row that cannot be read stops the run."""
    data = Data(train="a.jsonl")
    assert (data.on_bad_row, data.held_out, data.deduplicate, data.refuse) == ("error", None, False, ())
