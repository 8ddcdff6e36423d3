"""Python that a recipe names: found beside the recipe, refused in one line, and copied into the run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sft.errors import RecipeError
from sft.recipe.load import load_recipe
from sft.recipe.local_code import check_code, code_hashes, copy_code, load_code, references
from sft.recipe.schema import Recipe
from tests.conftest import DEMO_RECIPE

Open = Callable[..., Recipe]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def open_recipe(*overrides: str) -> Recipe:
        file = tmp_path / "mine.yaml"
        file.write_text(DEMO_RECIPE)
        return load_recipe(file, overrides)

    (tmp_path / "rows.py").write_text("def convert(row):\n    return row\n\nNUMBER = 3\n")
    (tmp_path / "broken.py").write_text("import json\nx = json.nothing\n")
    (tmp_path / "no_python.py").write_text("x = 1\ndef f(:\n")
    return open_recipe


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.function=rows.py:covert", ["data.function=rows.py:covert", "did you mean `convert`?"]),
        ("data.function=other.py:convert", ["other.py cannot be read", "relative to the recipe's folder"]),
        ("data.function=no_python.py:f", ["it is no Python", "line 2"]),
        ("train.callbacks=[rows.py:Mine]", ["train.callbacks=rows.py:Mine", "defines no Mine"]),
        ("data.train=[{path: x.jsonl, function: rows.py:no}]", ["data.train=rows.py:no", "defines no no"]),
    ],
)
def test_what_cannot_be_found_is_refused_without_running_it(override: str, words: list[str], opened: Open) -> None:
    with pytest.raises(RecipeError) as raised:
        check_code(opened(override))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("value", ["rows.py", "rows.py:a.b"])
def test_another_form_than_a_file_and_a_name_is_refused(value: str, opened: Open) -> None:
    with pytest.raises(RecipeError, match=r"data\.function: must be file\.py:name"):
        opened(f"data.function={value}")


def test_a_file_that_fails_is_one_line_with_its_own_line(opened: Open) -> None:
    recipe = opened("data.function=broken.py:x")
    check_code(recipe)
    with pytest.raises(RecipeError, match=r"AttributeError: .*nothing.* \(broken.py, line 2: x = json.nothing\)"):
        load_code(recipe, "data.function", "broken.py:x")


def test_annotations_are_evaluated_as_in_any_file_that_python_runs(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text("def convert(row: dict): ...\n")
    assert load_code(opened(), "data.function", "typed.py:convert").__annotations__ == {"row": dict}


def test_compiled_code_beside_a_file_is_neither_run_nor_written(opened: Open, tmp_path: Path) -> None:
    import py_compile

    file = tmp_path / "rows.py"
    source = file.read_text()
    file.write_text(source.replace("3", "4"))
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text(source)
    assert load_code(opened(), "data.function", "rows.py:NUMBER") == 3
    (tmp_path / "more.py").write_text("NUMBER = 5\n")
    assert load_code(opened(), "data.function", "more.py:NUMBER") == 5
    assert not list((tmp_path / "__pycache__").glob("more*"))


def test_a_run_keeps_a_copy_which_a_start_from_its_folder_uses(opened: Open, tmp_path: Path) -> None:
    recipe = opened("data.function=rows.py:convert", "train.callbacks=[../mine/hooks.py:Mine]")
    (tmp_path.parent / "mine").mkdir(exist_ok=True)
    (tmp_path.parent / "mine" / "hooks.py").write_text("class Mine: ...\n")
    assert list(references(recipe)) == [
        ("data.function", "rows.py:convert"),
        ("train.callbacks", "../mine/hooks.py:Mine"),
    ]
    run = tmp_path / "run"
    run.mkdir()
    copy_code(recipe, run)
    (run / "run.json").write_text("{}")
    (run / "recipe.yaml").write_text(DEMO_RECIPE)
    words = ("data.function=rows.py:convert", "train.callbacks=[../mine/hooks.py:Mine]")
    again = load_recipe(run / "recipe.yaml", words)
    before = code_hashes(recipe)
    assert code_hashes(again) == before and set(before) == {"rows.py", "../mine/hooks.py"}
    (tmp_path / "rows.py").write_text("def convert(row):\n    return None\n")
    assert code_hashes(again) == before != code_hashes(recipe)
    copy_code(again, run)  # onto itself


def test_two_files_whose_copies_would_be_one_are_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path.parent / "rows.py").write_text("class Mine: ...\n")
    with pytest.raises(RecipeError, match="keeps a copy"):
        check_code(opened("data.function=rows.py:convert", "train.callbacks=[../rows.py:Mine]"))
