import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft.data.facts import inspect_data
from sft.data.prepare import prepare
from sft.errors import DataError, ModelError
from sft.hub.demo import Demo
from sft.hub.model_facts import inspect_model
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write_rows(path: Path, count: int) -> Path:
    path.write_text((json.dumps(ROW) + "\n") * count)
    return path


KINDS = {
    "a part of it": ["data.train=[{path: 'builtin:demo', split: 'train[:500]'}]"],
    "a number of rows": ["data.train=[{path: 'builtin:demo', rows: 500}]"],
    "repeated": ["data.train=[{path: 'builtin:demo', epochs: 3.0}]"],
    "without packing": ["data.packing=false"],
    "all trained": ["data.loss_on=all"],
    "some held out": ["data.held_out=0.4"],
    "weighted": ["data.train=[{path: 'builtin:demo', weight: 1.0}, {path: SMALL, weight: 1.0}]"],
}


@pytest.mark.parametrize("overrides", KINDS.values(), ids=list(KINDS))
def test_the_estimate_is_near_the_count(
    overrides: list[str], make_recipe: MakeRecipe, demo: Demo, tmp_path: Path
) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join(demo.train.read_text().splitlines(keepends=True)[:300]))
    recipe = make_recipe(*(override.replace("SMALL", str(small)) for override in overrides))
    model = inspect_model(recipe)
    estimate, counted = inspect_data(recipe, model.path), prepare(recipe, model).facts()
    assert estimate is not None
    assert (estimate.exact, counted.exact) == (False, True)
    assert estimate.documents == pytest.approx(counted.documents, rel=0.05)
    assert estimate.trained_tokens == pytest.approx(counted.trained_tokens, rel=0.1)
    assert estimate.tokens == pytest.approx(counted.tokens, rel=0.1)
    if estimate.sequences is not None:  # else as if every pack were full
        assert estimate.sequences == pytest.approx(counted.sequences, rel=0.1)


def test_a_small_file_is_counted_and_sources_add_up(make_recipe: MakeRecipe, demo: Demo, tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "one.jsonl", 30), write_rows(tmp_path / "two.jsonl", 12)
    recipe = make_recipe(f"data.train=[{{path: {one}}}, {{path: {two}}}]")
    facts = inspect_data(recipe, inspect_model(recipe).path)
    assert facts is not None
    assert facts.documents == 42
    assert facts.trained_tokens == 42 * 2  # a letter and the end of its turn
    assert facts.tokens > 2 * facts.trained_tokens


def test_a_tokenizer_that_is_half_there_is_one_message(make_recipe: MakeRecipe, demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ModelError, match=r"tokenizer.json"):
        inspect_data(make_recipe(), str(tmp_path))


def test_a_broken_file_behind_the_first_is_one_message(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("half a download")
    with pytest.raises(DataError, match=r"b.parquet"):
        inspect_data(make_recipe(f"data.train={tmp_path}"), "some/model")


def test_all_rows_of_parquet_files_are_counted_without_reading_them(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    for name, count in (("a", 300), ("b", 45)):
        pq.write_table(pa.Table.from_pylist([ROW] * count), tmp_path / f"{name}.parquet")
    facts = inspect_data(make_recipe(f"data.train={tmp_path}"), "some/model")
    assert facts is not None
    assert facts.documents == 345
