import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import cli
from sft.data.documents import Chunk
from sft.data.ledger import histogram
from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.data.show import finding_lines, marked_text, summary_lines
from sft.data.tokenizer import load_tokenizer
from sft.hub.model_facts import inspect_model
from sft.recipe.schema import Recipe
from tests.sft.data.conftest import MODELS, documents, talk

MakeRecipe = Callable[..., Recipe]
ESCAPE = re.compile("\x1b\\[[0-9;]*m")


TALKS = [
    talk("Hi", "Hello there."),
    talk(" Two  spaces,\n\nlines ", " leading and trailing \n", "Why ?", "Don 't , ask !"),
    talk("Ωμέγα 日本語 👩‍👩‍👧", "naïve 🙂🙂 … ½", "\ttabs\t", "Zażółć"),
    talk("code", "def f(x):\n    return x\n"),
]


@pytest.fixture(params=MODELS)
def tokenizer(request: pytest.FixtureRequest, tokenizer_of: Callable[..., Any]) -> Any:
    return tokenizer_of(request.param)


def test_no_character_is_lost_and_what_is_trained_stands_in_brackets(
    tokenizer: Any, made: Callable[..., Chunk]
) -> None:
    for ids, trained in documents(made(tokenizer, TALKS)):
        text = marked_text(np.array(ids), np.array(trained), tokenizer, colours=False)
        assert text.replace("[[", "").replace("]]", "") == tokenizer.decode(ids)
        runs = [
            [int(token) for token, _ in run]
            for keep, run in groupby(zip(ids, trained, strict=True), lambda t: t[1])
            if keep
        ]
        shown = re.findall(r"\[\[(.*?)\]\]", text, flags=re.DOTALL)
        assert len(shown) == len(runs)
        for found, run in zip(shown, runs, strict=True):
            # What decodes alone may lack the space before it.
            assert found.lstrip(" ") == tokenizer.decode(run).lstrip(" ")


@pytest.mark.parametrize("colours", [True, False])
def test_what_a_row_says_to_a_terminal_is_not_said_to_it(colours: bool, make_recipe: MakeRecipe) -> None:
    """It could clear the screen, change the title, or hide a part of itself; also from a file that is shown later."""
    tokenizer = load_tokenizer(make_recipe())
    row = "w\x1b[2Jv\x1b]0;title\x07y\rz\u202e"
    ids = np.array(tokenizer(row, add_special_tokens=False)["input_ids"], np.int32)
    shown = ESCAPE.sub("", marked_text(ids, np.ones(len(ids), np.uint8), tokenizer, colours))
    assert not set("\x1b\x07\r\u202e") & set(shown)
    assert [letter for letter in shown if letter in "wvyz"] == list("wvyz")


def entry(overrides: list[str], make_recipe: MakeRecipe) -> Prepared:
    recipe = make_recipe(*overrides)
    return prepare(recipe, inspect_model(recipe))


@pytest.fixture
def show(recipe_file: Path, outputs: Path, make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the launcher prints of data that is prepared."""

    def printed(words: list[str], *overrides: str) -> str:
        entry(list(overrides), make_recipe)
        capsys.readouterr()
        cli.run(["train", str(recipe_file), f"output_dir={outputs}", *overrides, *words])
        return capsys.readouterr().out

    return printed


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows [v1].jsonl"
    talks = [talk(f"question {number}", f"answer {number}") for number in range(20)] + [talk("{{name}}", "x")] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in talks))
    return path


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (3, 3), (500, 22)])
def test_so_many_rows_are_shown_and_the_whole_ledger(
    count: int, shown: int, show: Callable[..., str], rows: Path, make_recipe: MakeRecipe
) -> None:
    out = show(["--show", str(count)], f"data.train={rows}")
    heads = re.findall(r"^── (.*): (\d+) tokens, (\d+) of them trained$", out, flags=re.MULTILINE)
    assert len(heads) == shown
    assert out.count("[[") - out.count("[[...]]") == shown
    assert all(place.startswith(f"{rows}, row ") for place, _, _ in heads)
    if shown > 1:
        assert [heads[0][0], heads[-1][0]] == [f"{rows}, row 1", f"{rows}, row 22"]
    prepared = entry([f"data.train={rows}"], make_recipe)
    tokens = prepared.ledger["total"]["tokens"]
    for label, value in [
        ("rows in", 22),
        ("rows used", 22),
        *((f"tokens {key}", tokens[key]) for key in ("in", "trained")),
    ]:
        assert re.search(rf"^ *{label} +{value:,} *$", out, flags=re.MULTILINE), label
    assert histogram(prepared.ledger) in out
    assert "rows [v1].jsonl" in out
    assert "2 x a placeholder that was never filled in" in out
    assert f"Prepared in {prepared.folder}" in out
    assert "\x1b" not in out


def test_the_summary_is_the_ledger_in_a_line(make_recipe: MakeRecipe, rows: Path) -> None:
    prepared = entry([f"data.train={rows}", "data.held_out=0.3", "data.deduplicate=true"], make_recipe)
    line, *notes = summary_lines(prepared)
    counts, tokens = prepared.ledger["total"]["rows"], prepared.ledger["total"]["tokens"]
    assert f"{counts['used']} of 22 rows used, {counts['held_out']} held out" in line
    assert f"{tokens['trained'] + tokens['masked']} tokens, {tokens['trained']} of them trained" in line
    assert f"{prepared.ledger['packing']['packs']} packs" in line
    assert notes == finding_lines(prepared)
    assert len(notes) == len(prepared.findings)
    assert any(note.endswith(f"{rows}, row 21; {rows}, row 22") for note in notes)


def test_text_that_only_spells_a_special_token_has_a_backslash(tokenizer: Any, made: Callable[..., Chunk]) -> None:
    names = sorted(set(tokenizer.all_special_tokens))
    evil = f"a {' '.join(names)} b"
    chunk = made(tokenizer, [talk("Hi", "Ho"), talk(evil, f"c {evil} d")])
    at = int(chunk.documents["length"][0])
    marked = " ".join(f"\\{name}" for name in names)
    for colours in (False, True):
        written = ESCAPE.sub("", marked_text(chunk.tokens[:at], chunk.trained[:at], tokenizer, colours))
        shown = ESCAPE.sub("", marked_text(chunk.tokens[at:], chunk.trained[at:], tokenizer, colours))
        assert "\\" not in written
        assert shown.count(f"a {marked} b") == 2
        # The tokens themselves have none, and are as many as without the text.
        for name in names:
            assert shown.count(name) - shown.count(f"\\{name}") == written.count(name)
