"""data.function: each row goes through the user's Python, in every worker, and its errors name the row."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.facts import inspect_data
from sft.data.prepare import prepare
from sft.data.prepared import entry_folder
from sft.errors import DataError, RecipeError
from sft.hub.model_facts import inspect_model
from sft.recipe.schema import Recipe

CODE = """
def convert(row):
    number = row.pop("number")
    if number == 3:
        return None
    one = {"prompt": f"What is {number}?", "completion": f"It is {number}."}
    return [one, {**one, "completion": "I do not know."}] if number == 5 else one

def fails(row):
    return {"prompt": row["question"]} if row["number"] == 7 else convert(row)

def leaves_out(row):
    return None

NUMBER = 3
"""
Make = Callable[..., Recipe]


@pytest.fixture
def numbers(make_recipe: Make, tmp_path: Path) -> Make:
    rows = [{"number": number} for number in range(1, 1201)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(CODE)

    def make(function: str = "convert", *overrides: str) -> Recipe:
        words = (f"data.train={tmp_path / 'rows.jsonl'}", f"data.function=mine.py:{function}", *overrides)
        return make_recipe(*words).placed(tmp_path)

    return make


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_may_become_one_row_several_or_none(workers: int, numbers: Make) -> None:
    recipe = numbers()
    prepared = prepare(recipe, inspect_model(recipe), workers)
    rows = prepared.ledger["total"]["rows"]
    assert (rows["in"], rows["used"], rows["split"], rows["dropped"]) == (1201, 1200, 0, {"function": 1})
    assert prepared.ledger["sources"][0]["format"] == "prompt_completion"
    (left_out,) = (one for one in prepared.findings if one["kind"] == "function")
    assert left_out["count"] == 1 and left_out["rows"] == [f"{recipe.data.train}, row 3"]


def test_the_estimate_reads_converted_rows(numbers: Make) -> None:
    recipe = numbers()
    facts = inspect_data(recipe, inspect_model(recipe).path)
    assert facts is not None
    assert facts.documents == pytest.approx(1200, rel=0.05)


def test_an_error_names_file_row_and_line_without_a_traceback(numbers: Make) -> None:
    recipe = numbers("fails")
    with pytest.raises(DataError) as raised:
        prepare(recipe, inspect_model(recipe))
    message = str(raised.value)
    assert f"{recipe.data.train}, row 7: " in message
    assert "data.function=mine.py:fails fails: KeyError: 'question' (mine.py, line 10: " in message
    recipe = numbers("fails", "data.on_bad_row=drop")
    dropped = prepare(recipe, inspect_model(recipe)).ledger["total"]["rows"]["dropped"]
    assert dropped == {"bad_row": 1, "function": 1}


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("leaves_out", DataError, "makes no row of the first 200"),
        ("NUMBER", RecipeError, "data.function=mine.py:NUMBER is no function, but int"),
    ],
)
def test_what_makes_no_rows_is_refused_by_the_plan(
    name: str, error: type[Exception], words: str, numbers: Make
) -> None:
    recipe = numbers(name)
    with pytest.raises(error, match=words):
        inspect_data(recipe, inspect_model(recipe).path)


def test_another_text_of_the_file_is_other_data_and_the_callbacks_are_not(numbers: Make, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("class Mine: ...\n")
    folder = entry_folder(numbers(), inspect_model(numbers()))
    recipe = numbers("convert", "train.callbacks=[hooks.py:Mine]")
    assert entry_folder(recipe, inspect_model(recipe)) == folder
    (tmp_path / "mine.py").write_text(CODE + "\n")
    assert entry_folder(numbers(), inspect_model(numbers())) != folder


def test_a_source_has_its_own_function_and_the_eval_split_too(numbers: Make, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "Hello there, you."}\n')
    (tmp_path / "own.py").write_text("def same(row):\n    return row\n")
    sources = f"[{{path: {tmp_path / 'rows.jsonl'}}}, {{path: {tmp_path / 'text.jsonl'}, function: own.py:same}}]"
    recipe = numbers("convert", f"data.train={sources}", f"data.held_out=[{{path: {tmp_path / 'rows.jsonl'}}}]")
    formats = [one["format"] for one in prepare(recipe, inspect_model(recipe)).ledger["sources"]]
    assert formats == ["prompt_completion", "text", "prompt_completion"]
