"""Bad data: one message with the place, the reason and the remedy and status 2, or rows dropped and counted. Never a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sft.data.ledger import check_limits
from sft.data.prepare import prepare
from sft.errors import UserError
from sft.hub.model_facts import inspect_model
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]

GOOD: dict[str, Any] = {"prompt": "Hi", "completion": "Hello"}


def lines(*rows: object) -> bytes:
    """Rows as .jsonl; bytes and text stand as they are."""
    encoded = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    return b"".join(row + b"\n" for row in encoded)


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def many(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {number}", "completion": f"Answer {number}"} for number in range(count)]


@dataclass(frozen=True)
class Bad:
    """Data, and what becomes of it: a message that holds all of `told`, or rows dropped by reason."""

    rows: bytes
    told: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    used: int | None = None
    overrides: tuple[str, ...] = ()
    name: str = "rows.jsonl"


def refused(rows: bytes, *told: str, overrides: tuple[str, ...] = (), name: str = "rows.jsonl") -> Bad:
    return Bad(rows, told, overrides=overrides, name=name)


DROP = ("data.on_bad_row=drop",)
LONG = {"prompt": "Hi", "completion": "word " * 200_000}
BROKEN = b'{"prompt": "Hi", "comple'
TURNS_330 = talk(*[turn for _ in range(165) for turn in (("user", "Go on"), ("assistant", "And then"))])

BAD = {
    # Files
    "a file of no bytes": refused(b"", "rows.jsonl holds no rows"),
    "a broken line in the middle": refused(
        lines(GOOD, BROKEN, GOOD), "rows.jsonl, row 2", "not JSON", "data.on_bad_row=drop"
    ),
    # Columns
    "two kinds of rows in one file": refused(
        lines(GOOD, GOOD, talk(("user", "Hi"), ("assistant", "Hello"))),
        "row 3",
        "no column 'completion', 'prompt'",
        "but messages",
    ),
    # Rows
    "half a weight": refused(
        lines({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}),
        "row 1",
        "`weight` of a message is 0.5",
    ),
    "a row of weight 0": Bad(
        lines(*many(4), GOOD | {"weight": 0}, GOOD | {"loss_weight": "0.0"}, GOOD | {"sample_weight": False}),
        dropped={"zero_weight": 3},
        used=4,
    ),
    "a turn of weight 0": refused(
        lines({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.0}]}),
        "Nothing is left to train on",
    ),
    "a weight for each token": refused(
        lines({"input_ids": [5, 6], "loss_weight": [0, 1]}), "row 1", "`loss_weight` is a list", "`labels`"
    ),
    "an unwanted answer": refused(lines(GOOD, GOOD | {"label": False}), "row 2", "`label` is false", "KTO"),
    # Tokens
    "labels that are all -100": refused(
        lines({"input_ids": [5, 6, 7], "labels": [-100] * 3}), "Nothing is left to train on", "1 no target tokens"
    ),
    "tokens that were packed elsewhere": refused(
        lines({"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}), "row 1", "`position_ids` start again"
    ),
    # Lengths
    "a conversation of 330 turns": refused(
        lines(TURNS_330), "Nothing is left to train on", "1 too long", "tokens a row"
    ),
    "a row of a megabyte": refused(
        lines(*many(9), LONG),
        "1 of 10 rows (10.0%) are too long for data.max_length=128",
        "data.max_overlong_fraction=0.05",
        "tokens a row",
    ),
    # What is asked of the data
    "too little that is trained": refused(
        lines({"prompt": "a " * 30, "completion": "x"}),
        "data.min_trained_fraction=0.5",
        overrides=("data.min_trained_fraction=0.5",),
    ),
}


@pytest.fixture
def prepared(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Bad], dict[str, Any]]:
    """The ledger of the data; a UserError where it is refused."""

    def run(bad: Bad) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / bad.name).write_bytes(bad.rows)
        recipe = make_recipe(f"data.train={bad.name}", *bad.overrides, f"output_dir={tmp_path / 'outputs'}")
        ledger = prepare(recipe, inspect_model(recipe)).ledger
        check_limits(ledger, recipe.data)
        return ledger

    return run


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_in_one_message_or_counted(
    name: str, prepared: Callable[[Bad], dict[str, Any]], tmp_path: Path
) -> None:
    bad = BAD[name]
    if bad.told:
        with pytest.raises(UserError) as error:
            prepared(bad)
        for part in bad.told:
            assert part in str(error.value)
        assert len(str(error.value)) < 4000
        return
    ledger = prepared(bad)["total"]
    assert ledger["rows"]["dropped"] == bad.dropped
    assert bad.used in (None, ledger["rows"]["used"])
    tokens = ledger["tokens"]
    assert tokens["in"] == sum(tokens[part] for part in ("trained", "masked", "truncated", "dropped"))
    assert not list((tmp_path / "outputs" / ".prepared").glob(".*.[0-9]*"))


@pytest.mark.slow
def test_a_user_sees_the_message_alone_and_status_2(tmp_path: Path) -> None:
    bad = BAD["a broken line in the middle"]
    (tmp_path / bad.name).write_bytes(bad.rows)
    (tmp_path / "mine.yaml").write_text(
        'schema_version: 1\nversion: 1\nmodel: {name_or_path: "builtin:demo"}\n'
        f"data: {{train: {bad.name}, max_length: 128}}\ntrain: {{global_batch_size: 8}}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "sft.launch", "mine.yaml", *bad.overrides],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for part in bad.told:
        assert part in ended.stderr
    assert "Run:" not in ended.stdout
    assert [path.name for path in (tmp_path / "outputs").iterdir() if not path.name.startswith(".")] == []
