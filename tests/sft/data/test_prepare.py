import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.facts import inspect_data
from sft.data.prepare import prepare
from sft.data.prepared import Prepared, find_prepared
from sft.errors import DataError, ModelError
from sft.hub.demo import Demo
from sft.hub.model_facts import inspect_model
from sft.launch.prepare import prepared_data
from sft.program import exit_on_error
from sft.recipe.schema import Recipe
from tests.sft.data.conftest import talk

Row = dict[str, Any]
Make = Callable[..., Recipe]
FILES = ("tokens.bin", "trained.bin", "documents.bin", "train.npz", "held_out.npz", "prepared.json")


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], demo: Demo, tmp_path: Path) -> Make:
    """A recipe that prepares its data in a place of its own."""

    def of(*overrides: str) -> Recipe:
        return make_recipe(f"model.name_or_path={demo.model}", f"output_dir={tmp_path / 'out'}", *overrides)

    return of


def prepared(recipe: Recipe, workers: int = 1) -> Prepared:
    return prepare(recipe, inspect_model(recipe), workers)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an entry; of prepared.json all but the time it took."""
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    summary = json.loads(found["prepared.json"])
    assert summary.pop("seconds") >= 0
    return found | {"prepared.json": json.dumps(summary).encode()}


def left_in(place: Path) -> list[str]:
    """What is in the place of entries besides locks, which are empty files."""
    return sorted(path.name for path in place.glob("*") if not path.name.endswith(".lock"))


def finding(entry: Prepared, kind: str) -> dict[str, Any]:
    (found,) = [found for found in entry.findings if found["kind"] == kind]
    return found


VARIED = [talk(f"question {number} " * (number % 7 + 1), f"answer {number % 40}") for number in range(150)]
VARIED[20], VARIED[90] = talk("nothing", ""), talk("{{name}}", "<|im_end|> too")
VARIED[33] = {"messages": [{"role": "narrator", "content": "?"}]}


def test_an_entry_is_the_same_bytes_with_any_workers_and_chunks(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", VARIED)
    write(tmp_path / "b.jsonl", VARIED[::-1])
    keys = [f"data.train=[{{path: {tmp_path}/a.jsonl, epochs: 1.5}}, {{path: {tmp_path}/b.jsonl, rows: 70}}]"]
    keys += ["data.on_bad_row=drop", "data.held_out=0.1", "data.max_length=48", "data.overlong=split"]

    def entry(rows: int, workers: int) -> dict[str, bytes]:
        monkeypatch.setattr("sft.data.workers.CHUNK_ROWS", rows)
        return contents(prepared(make(*keys, f"output_dir={tmp_path}/{workers}-{rows}"), workers).folder)

    several, alone = entry(7, 3), [entry(rows, 1) for rows in (7, 1000)]
    assert set(alone[0]) == set(FILES)
    assert several == alone[0] == alone[1]


def test_the_data_that_is_prepared_is_found_from_any_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make(f"data.train={write(tmp_path / 'rows.jsonl', VARIED[:9])}")
    first = prepared(recipe)
    assert "Preparing" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = prepared(recipe)
    assert (again.folder, again.summary) == (first.folder, first.summary)
    assert capsys.readouterr().err == ""
    assert prepared_data(recipe, inspect_model(recipe), ["no command is run"]).fingerprint == first.fingerprint


@pytest.mark.parametrize("damage", ["no tokens.bin", "no prepared.json", "empty prepared.json", "altered tokens.bin"])
def test_a_damaged_entry_is_made_anew(damage: str, make: Make, tmp_path: Path) -> None:
    recipe = make(f"data.train={write(tmp_path / 'rows.jsonl', VARIED[:9])}")
    first = prepared(recipe)
    assert first.altered() is None
    whole, file = contents(first.folder), first.folder / damage.split()[1]
    if damage.startswith("altered"):
        file.write_bytes(bytes([whole["tokens.bin"][0] ^ 1]) + whole["tokens.bin"][1:])
        assert first.altered() == "tokens.bin"
        first.forget()
    elif damage.startswith("empty"):
        file.write_bytes(b"")
    else:
        file.unlink()
    (first.folder / "left").touch()
    assert find_prepared(first.folder) is None
    assert contents(prepared(recipe).folder) == whole
    assert left_in(first.folder.parent) == [first.folder.name]


def test_entries_that_no_run_uses_are_removed(make: Make, tmp_path: Path) -> None:
    entry = prepared(make(f"data.train={write(tmp_path / 'rows.jsonl', VARIED[:9])}")).folder
    for name, days in (("unused", 100), ("of-this-month", 20), (".killed.123", 100)):
        copy = Path(shutil.copytree(entry, entry.with_name(name)))
        for path in (copy / "prepared.json", copy):
            os.utime(path, (0, time.time() - days * 24 * 3600))
    newest = prepared(make(f"data.train={write(tmp_path / 'more.jsonl', VARIED[:8])}")).folder
    assert set(left_in(entry.parent)) == {newest.name, entry.name, "of-this-month"}


def test_an_error_and_a_finding_name_the_right_file_and_row(make: Make, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.jsonl", VARIED[:5])
    write(tmp_path / "data" / "b.jsonl", [])
    write(tmp_path / "data" / "c.jsonl", [*VARIED[5:8], talk("{{name}}", "x"), VARIED[8], VARIED[6]])
    write(tmp_path / "held_out.jsonl", [talk("other", "held out {{name}}"), VARIED[2]])
    keys = [f"data.train={tmp_path / 'data'}", f"data.held_out={tmp_path / 'held_out.jsonl'}"]
    entry = prepared(make(*keys))
    a, c = (f"{tmp_path}/data/{name}.jsonl" for name in "ac")
    assert finding(entry, "placeholder")["rows"] == [f"{c}, row 4", f"{tmp_path / 'held_out.jsonl'}, row 1"]
    assert finding(entry, "duplicate")["rows"] == [f"{c}, row 6"]
    assert finding(entry, "held_out_duplicate")["rows"] == [f"{a}, row 3"]
    write(tmp_path / "data" / "d.jsonl", [VARIED[9], {"messages": 5}])
    with pytest.raises(DataError, match=r"data/d.jsonl, row 2: `messages` is of type int"):
        prepared(make(*keys))
    assert left_in(entry.folder.parent) == [entry.folder.name]


def test_the_fingerprint_is_of_what_is_trained_and_of_nothing_else(make: Make, tmp_path: Path) -> None:
    def fingerprint(rows: list[Row], *overrides: str, name: str = "rows.jsonl") -> str:
        return prepared(make(f"data.train={write(tmp_path / name, rows)}", *overrides)).fingerprint

    first = fingerprint(VARIED[:9])
    assert fingerprint(VARIED[:9], "data.min_trained_fraction=0.01", "train.seed=5", name="other.jsonl") == first
    others = [fingerprint(VARIED[:9][::-1]), fingerprint(VARIED[:9], "data.loss_on=all"), fingerprint(VARIED[:8])]
    others += [fingerprint(VARIED[:9], "data.seed=1"), fingerprint(VARIED[:9], "data.packing=false")]
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("row", "override", "told"),
    [
        ({"text": "a"}, "data.loss_on=completion", "is of the format text, which has no completion"),
        (VARIED[0], "data.train=[{path: ROWS, chat: false}]", "chat=false is for rows of prompt and"),
        (VARIED[0], "data.train=[{path: ROWS, rows: 9}]", "rows=9 of .*rows.jsonl, which has 1 usable"),
        (VARIED[0], "data.held_out=0.0001", "data.held_out=0.0001 holds out no usable row. Raise it, or leave"),
    ],
)
def test_data_that_a_recipe_cannot_use_is_one_message_and_leaves_nothing(
    row: Row, override: str, told: str, make: Make, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=told):
        prepared(make(f"data.train={path}", override.replace("ROWS", str(path))))
    assert left_in(tmp_path / "out" / ".prepared") == []


def test_conversations_without_a_chat_template_are_one_message(make: Make, demo: Demo, tmp_path: Path) -> None:
    model = Path(shutil.copytree(demo.model, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    path = write(tmp_path / "rows.jsonl", VARIED[:3])
    with pytest.raises(
        ModelError, match=r"has no chat template, which rows of the format messages need \(.*rows.jsonl"
    ):
        prepared(make(f"data.train={path}", f"model.name_or_path={model}"))
    write(path, [{"prompt": "a", "completion": "b"}])
    train = f"data.train=[{{path: {path}, chat: false}}]"
    assert prepared(make(train, f"model.name_or_path={model}")).ledger["total"]["rows"]["used"] == 1


@pytest.mark.parametrize("size", [16, 104, pytest.param(116, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_message_and_leaves_no_entry(
    size: int, make: Make, tmp_path: Path, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """At each size another file finds no space."""
    path = write(tmp_path / "rows.jsonl", [talk(f"{number:04} " * 6, "x" * 8) for number in range(400)])
    place = small_disk(size)
    recipe = make(f"data.train={path}", f"output_dir={place}")
    with pytest.raises(SystemExit) as ended, exit_on_error():
        entry = prepared(recipe)
        pytest.skip(f"{size} KiB were enough for {sum(entry.summary['sizes'].values())} bytes")
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "The disk is full" in told
    assert "Traceback" not in told
    assert left_in(place / ".prepared") == []


def test_data_that_has_changed_when_it_is_prepared_is_not_kept(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.data.workers.CHUNK_ROWS", 20)
    train, other = write(tmp_path / "train.jsonl", VARIED[:20] * 100), write(tmp_path / "other.jsonl", VARIED[40:45])

    def write_meanwhile() -> None:
        while not any(file.stat().st_size for file in (tmp_path / "out").glob(".prepared/.*.*/tokens.bin")):
            time.sleep(0.001)
        other.write_text(other.read_text().replace("answer", "ANSWER"))  # as many bytes

    writer = threading.Thread(target=write_meanwhile)
    writer.start()
    try:
        with pytest.raises(DataError, match=r"changed while it was prepared\. Start again"):
            prepared(make(f"data.train={train}", f"data.held_out={other}"))
    finally:
        writer.join()
    assert left_in(tmp_path / "out" / ".prepared") == []


def test_a_row_is_held_out_whatever_its_mask(make: Make, tmp_path: Path) -> None:
    """Trained in two turns here, and held out with a prompt of which nothing is trained."""
    turns = [{"role": role, "content": f"{role} {at}"} for at in range(2) for role in ("user", "assistant")]
    train = write(tmp_path / "train.jsonl", [*VARIED[:5], {"messages": turns}, talk("Why", "Because")])
    prompts = [{"prompt": turns[:3], "completion": turns[3:]}, {"prompt": "Why", "completion": "Because"}]
    held_out = write(tmp_path / "held_out.jsonl", prompts)
    for loss_on in ("auto", "last_assistant", "all"):
        entry = prepared(make(f"data.train={train}", f"data.held_out={held_out}", f"data.loss_on={loss_on}"))
        assert entry.ledger["total"]["rows"]["dropped"] == {"held_out": 2}
        assert finding(entry, "held_out_duplicate")["rows"] == [f"{train}, row 6", f"{train}, row 7"]


def test_a_message_about_a_held_out_source_names_its_key(make: Make, tmp_path: Path) -> None:
    recipe = make(f"data.train={write(tmp_path / 'train.jsonl', VARIED[:9])}", "data.held_out=gone.jsonl")
    for step in (lambda: prepared(recipe), lambda: inspect_data(recipe, inspect_model(recipe).path)):
        with pytest.raises(DataError, match=r"^data.held_out: there is no file or folder"):
            step()
