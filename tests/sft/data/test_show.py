import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import cli
from sft.data.document_maker import DocumentMaker
from sft.data.ledger import histogram
from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.data.show import finding_lines, marked_text, summary_lines
from sft.data.tokenizer import load_tokenizer
from sft.errors import DataError
from sft.hub.demo import Demo
from sft.plan.facts import inspect_model
from sft.recipe.schema import Recipe, Source

MakeRecipe = Callable[..., Recipe]
ESCAPE = re.compile("\x1b\\[[0-9;]*m")


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]}


TALKS = [
    talk("Hi", "Hello there."),
    talk(" Two  spaces,\n\nlines ", " leading and trailing \n", "Why ?", "Don 't , ask !"),
    talk("Ωμέγα 日本語 👩‍👩‍👧", "naïve 🙂🙂 … ½", "\ttabs\t", "Zażółć"),
    talk("code", "def f(x):\n    return x\n"),
]


@pytest.fixture(params=["demo", "qwen3", "minimind", "gpt2", "stories260k_hf"])
def tokenizer(request: pytest.FixtureRequest, make_recipe: MakeRecipe, real_model: Callable[[str], Path]) -> Any:
    tokens = {
        "gpt2": [
            "model.chat_template=chatml",
            "model.new_tokens=['<|im_start|>', '<|im_end|>', '<|pad|>']",
            "model.pad_token=<|pad|>",
        ],
        "stories260k_hf": ["model.chat_template=plain", "model.pad_token=<unk>"],
    }
    name = request.param
    overrides = [] if name == "demo" else [f"model.name_or_path={real_model(name)}", *tokens.get(name, [])]
    return load_tokenizer(make_recipe(*overrides))


def documents(tokenizer: Any, make_recipe: MakeRecipe) -> list[tuple[np.ndarray, np.ndarray]]:
    maker = DocumentMaker(make_recipe("data.max_length=4096").data, tokenizer)
    chunk = maker.make(Source(path="x"), 0, "messages", list(enumerate(TALKS, start=1)))
    assert chunk.error is None
    ends = np.cumsum(chunk.documents["length"])[:-1]
    return list(zip(np.split(chunk.tokens, ends), np.split(chunk.trained, ends), strict=True))


def test_no_character_is_lost_and_what_is_trained_stands_in_brackets(tokenizer: Any, make_recipe: MakeRecipe) -> None:
    for ids, trained in documents(tokenizer, make_recipe):
        text = marked_text(ids, trained, tokenizer, colours=False)
        assert text.replace("[[", "").replace("]]", "") == tokenizer.decode(ids.tolist())
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


def test_colours_change_no_character_and_no_line_leaves_its_colour_on(tokenizer: Any, make_recipe: MakeRecipe) -> None:
    for ids, trained in documents(tokenizer, make_recipe):
        text = marked_text(ids, trained, tokenizer, colours=True)
        plain = marked_text(ids, trained, tokenizer, colours=False)
        assert ESCAPE.sub("", text) == plain.replace("[[", "").replace("]]", "")
        assert "\x1b[32m" in text
        for line in text.split("\n"):
            codes = ESCAPE.findall(line)
            assert not codes or codes[-1] == "\x1b[0m"


def test_every_special_token_stands_alone(tokenizer: Any, make_recipe: MakeRecipe) -> None:
    """Two behind each other are two."""
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id]
    word = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = np.array([*special, *word, *special], np.int32)
    text = marked_text(ids, np.ones(len(ids), np.uint8), tokenizer, colours=True)
    names = [tokenizer.eos_token, tokenizer.pad_token, tokenizer.eos_token]
    reversed_parts = re.findall(r"\x1b\[7m(.*?)\x1b\[0m", text)
    assert reversed_parts == names * 2


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1], [0, 1, 1]])
def test_brackets_open_and_close_where_the_mask_changes(mask: list[int], make_recipe: MakeRecipe, demo: Demo) -> None:
    tokenizer = load_tokenizer(make_recipe())
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "c")]
    text = marked_text(np.array(ids, np.int32), np.array(mask, np.uint8), tokenizer, colours=False)
    expected = "".join(
        f"[[{''.join(letter for letter, _ in run)}]]" if keep else "".join(letter for letter, _ in run)
        for keep, run in (
            (keep, list(run)) for keep, run in groupby(zip("abc", mask, strict=True), lambda pair: pair[1])
        )
    )
    assert text == expected


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


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (1, 1), (3, 3), (22, 22), (500, 22)])
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


def test_a_row_is_shown_with_its_tokens_and_what_is_trained(show: Callable[..., str], rows: Path) -> None:
    out = show(["--show", "1"], f"data.train={rows}")
    assert "<|im_start|>user\nquestion 0<|im_end|><|im_start|>assistant\n[[answer 0<|im_end|>]]" in out


def test_a_row_that_was_cut_says_how_much(show: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(talk("?", "9" * 200)))
    out = show(["--show", "1"], f"data.train={path}", "data.overlong=truncate", "data.max_length=64")
    cut = re.search(r"64 tokens, (\d+) of them trained, (\d+) cut off", out)
    assert cut
    assert re.search(rf"tokens truncated +{int(cut[2]):,}", out)


def test_every_source_has_a_column_with_all_of_its_numbers(
    show: Callable[..., str], rows: Path, tmp_path: Path
) -> None:
    names = [f"a_rather_long_name_of_a_file_{number}.jsonl" for number in range(6)]
    for name in names:
        (tmp_path / name).write_text(rows.read_text())
    train = ", ".join(f"{{path: {tmp_path / name}, epochs: 0.5}}" for name in names)
    out = show(["--show", "0"], f"data.train=[{train}]", "data.held_out=0.2", "data.deduplicate=true")
    (used,) = re.findall(r"^ *rows used +(.*?) *$", out, flags=re.MULTILINE)
    counts = [int(number) for number in used.split()]
    assert len(counts) == 7
    assert counts[-1] == sum(counts[:-1])
    for label in ("rows held out", "rows dropped: duplicate", "rows dropped: not drawn", "tokens held out", "all"):
        assert label in out
    # Names are folded, not cut: all their letters are there.
    columns = re.sub(r"\s", "", out)
    assert columns.count("a_rather") >= 6


def test_the_ledger_is_shown_before_a_limit_stops(show: Callable[..., str], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(talk("?", "9" * 200)))
    with pytest.raises(DataError, match="Nothing is left to train on"):
        show(["--show", "3"], f"data.train={path}", "data.max_length=64")
    out = capsys.readouterr().out
    assert "rows dropped: longer than max_length" in out
    assert "tokens a row" in out


@pytest.mark.parametrize("word", ["x", "-1", "1.5", "²", ""])
def test_a_number_of_rows_that_is_none_is_told(word: str, recipe_file: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["show", str(recipe_file), f"--rows={word}"])
    assert ended.value.code == 2
    assert "--rows" in capsys.readouterr().err


def test_preparing_says_where(show: Callable[..., str], rows: Path, make_recipe: MakeRecipe) -> None:
    out = show(["--prepare"], f"data.train={rows}")
    prepared = entry([f"data.train={rows}"], make_recipe)
    assert out.splitlines() == [*summary_lines(prepared), f"Prepared: {prepared.folder}"]


@pytest.mark.parametrize("words", [["--prepare"], ["--show", "1"]])
def test_the_data_can_be_looked_at_where_it_cannot_be_trained(
    words: list[str], show: Callable[..., str], rows: Path
) -> None:
    assert "Prepared" in show(words, f"data.train={rows}", "train.precision=fp16", "train.deepspeed=zero3")


def test_the_summary_is_the_ledger_in_a_line(make_recipe: MakeRecipe, rows: Path) -> None:
    prepared = entry([f"data.train={rows}", "data.held_out=0.3", "data.deduplicate=true"], make_recipe)
    line, *notes = summary_lines(prepared)
    counts, tokens = prepared.ledger["total"]["rows"], prepared.ledger["total"]["tokens"]
    assert f"{counts['used']} of 22 rows used, {counts['held_out']} held out" in line
    assert f"{tokens['trained'] + tokens['masked']} tokens, {tokens['trained']} of them trained" in line
    assert f"{prepared.ledger['packing']['packs']} packs" in line
    assert notes == finding_lines(prepared)
    assert len(notes) == len(prepared.findings)
    assert any(note.endswith(f"{rows}, row 21, 22") for note in notes)


@pytest.mark.slow
def test_on_a_terminal_there_are_colours(recipe_file: Path, outputs: Path, rows: Path, make_recipe: MakeRecipe) -> None:
    prepared = entry([f"data.train={rows}"], make_recipe)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "sft.launch", str(recipe_file), f"data.train={rows}", f"output_dir={outputs}"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "150"}
    with subprocess.Popen([*command, "--show", "2"], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 2**16)
            except OSError:  # what Linux says when the other side is closed
                break
            if not part:
                break
            seen += part
    os.close(ours)
    out = seen.decode().replace("\r\n", "\n")
    assert process.returncode == 0, out
    assert "\x1b[32manswer 0\x1b[0m" in out
    assert "green: trained, dim: not trained" in out
    assert "[[" not in out
    assert histogram(prepared.ledger) in out


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(recipe_file: Path, outputs: Path, demo: Demo) -> None:
    """As `--show 1000 | head` does."""
    command = [sys.executable, "-m", "sft.launch", str(recipe_file), f"output_dir={outputs}", "--show", "5000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("── ")
        process.stdout.close()
        told = process.stderr.read()
    assert "Traceback" not in told
    assert "Broken" not in told


def test_text_that_only_spells_a_special_token_has_a_backslash(tokenizer: Any, make_recipe: MakeRecipe) -> None:
    names = sorted(set(tokenizer.all_special_tokens))
    evil = f"a {' '.join(names)} b"
    maker = DocumentMaker(make_recipe("data.max_length=4096").data, tokenizer)
    chunk = maker.make(Source(path="x"), 0, "messages", [(1, talk("Hi", "Ho")), (2, talk(evil, f"c {evil} d"))])
    assert chunk.error is None
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


def test_the_legend_says_what_a_backslash_is(show: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(talk(f"{n}" if n else "see <|im_end|>", "x")) + "\n" for n in range(9)))
    out = show(["--show", "9"], f"data.train={path}")
    assert "<|im_start|>user\nsee \\<|im_end|><|im_end|><|im_start|>assistant\n[[x<|im_end|>]]" in out
    assert "a backslash before <...>: text that only spells a special token" in out


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["a_train.jsonl", "a_validation.jsonl", "b.jsonl"], ["a_validation.jsonl"]),
        (["a_test.jsonl", "b_test.jsonl"], []),
        (["a.jsonl", "contest.jsonl"], []),
    ],
)
def test_a_pattern_that_takes_in_files_of_another_split_is_told(
    files: list[str], told: list[str], make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    for number, name in enumerate(files):
        (tmp_path / name).write_text("".join(json.dumps(talk(f"{number} {n}", "a")) + "\n" for n in range(5)))
    pattern = f"{tmp_path}/*.jsonl"
    lines = summary_lines(entry([f"data.train={pattern}"], make_recipe))
    assert [name for name in files if f"another split: {name}." in "".join(lines)] == told
    assert "another split" not in "".join(
        summary_lines(entry([f"data.train={tmp_path / files[0]}", f"data.held_out={pattern}"], make_recipe))
    )


def test_columns_that_nobody_reads_are_told(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.jsonl" for name in "abc")
    first.write_text("".join(json.dumps(talk(f"{n}", "a") | {"id": n, "source": "x"}) + "\n" for n in range(5)))
    second.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "b"}) + "\n" for n in range(5)))
    # Of few rows too.
    rows = [{"text": f"text {n}"} | ({"meta": 1} if n == 3 else {}) for n in range(9)]
    third.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = ", ".join(f"{{path: {path}}}" for path in (first, second, third))
    lines = summary_lines(entry([f"data.train=[{train}]"], make_recipe))
    told = [line for line in lines if line.startswith("Not read: ")]
    assert told == [f"Not read: id, source of {first}", f"Not read: meta of {third}"]
    assert lines[0].startswith("Data: ")
