import json
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.ledger import check_limits, histogram
from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.data.tokenizer import load_tokenizer
from sft.errors import DataError
from sft.hub.model_facts import inspect_model
from sft.recipe.schema import Data, Recipe
from tests.sft.data.conftest import talk

MakeRecipe = Callable[..., Recipe]
FORMATS = ("messages", "plain", "tokens")
Rows = list[tuple[dict[str, Any], int | None]]
"""Rows, and the tokens of each, counted apart from our code; None for a row that is never tokenized."""


def some_rows(format: str, tokenizer: Any, random: np.random.Generator) -> Rows:
    """Rows of a format: some long, some the same, some without an answer, some broken."""
    rows: Rows = []
    for number in range(40):
        question, answer = (
            " ".join(random.choice(["train", "Oslo", "9", "é"], size=random.choice([1, 2, 3, 40]))) for _ in "qa"
        )
        if number % 11 == 5:
            answer = ""
        turns = talk(question, answer)
        ids = tokenizer(question + answer)["input_ids"]
        labels = [token if place % 4 and answer else -100 for place, token in enumerate(ids)]
        row, length = {
            "messages": (turns, len(tokenizer.apply_chat_template(turns["messages"], return_dict=False))),
            "plain": ({"prompt": question, "completion": answer}, len(ids) + 1),
            "tokens": ({"input_ids": ids, "labels": labels}, len(ids)),
        }[format]
        if number % 13 == 7 and format != "plain":
            rows.append((dict.fromkeys(row, 5), None))
        else:
            rows.append((row, length if answer or format == "tokens" else None))
    return rows + rows[:8]


CASES: dict[str, dict[str, Any]] = {
    "dropped": {"max_length": 64, "held_out": 0.25},
    "truncated": {"max_length": 24, "overlong": "truncate", "deduplicate": True},
    "split": {"max_length": 24, "overlong": "split", "packing": False, "loss_on": "all"},
    "weighted": {"max_length": 1000, "held_out": 0.25, "sources": [{"weight": 0.7}, {"weight": 2.0}, {"weight": 1.0}]},
    "repeated": {"max_length": 64, "sources": [{"epochs": 2.5}, {"epochs": 0.5}, {"rows": 3}]},
}


def some_recipe(case: str, folder: Path, make_recipe: MakeRecipe) -> tuple[Recipe, list[Rows]]:
    """The recipe of a case over three sources and an eval split with rows of the first, and their rows."""
    random, tokenizer, keys = np.random.default_rng(1), load_tokenizer(make_recipe()), dict(CASES[case])
    rows = [some_rows(format, tokenizer, random) for format in FORMATS]
    if "held_out" not in keys:
        rows.append(some_rows("messages", tokenizer, random) + rows[0][:10])
    sources: list[dict[str, Any]] = []
    for number, (part, more) in enumerate(zip_longest(rows, keys.pop("sources", []), fillvalue={})):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row, _ in part))
        sources.append({"path": str(path), "chat": number != FORMATS.index("plain")} | more)
    keys = {"train": sources[:3], "held_out": sources[3:], "on_bad_row": "drop"} | keys
    return make_recipe(f"data={json.dumps(keys)}"), rows


def times_seen(prepared: Prepared) -> Counter[tuple[int, int]]:
    """How often each row is in the sequences to train on."""
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    times = np.bincount(index.members, minlength=len(store.documents))
    places = zip(store.documents["source"].tolist(), store.documents["row"].tolist(), strict=True)
    return Counter({place: int(count) for place, count in zip(places, times, strict=True) if count})


@pytest.mark.parametrize("case", CASES)
def test_every_row_and_token_is_accounted_for(case: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe, sources = some_recipe(case, tmp_path, make_recipe)
    prepared = prepare(recipe, inspect_model(recipe))
    seen = times_seen(prepared)
    for number, (account, rows) in enumerate(zip(prepared.ledger["sources"], sources, strict=True)):
        counts, tokens = account["rows"], account["tokens"]
        assert counts["in"] == len(rows) == counts["used"] + counts["held_out"] + sum(counts["dropped"].values())
        parts = sum(tokens[name] for name in ("trained", "masked", "truncated", "held_out", "dropped"))
        counted = sum((length or 0) * max(seen[number, row], 1) for row, (_, length) in enumerate(rows, start=1))
        assert tokens["in"] == parts == counted
        assert tokens["dropped"] == sum(account["tokens_dropped"].values())
        assert counts["used"] == sum(source == number for source, _ in seen)
        assert counts["repeated"] == sum(times - 1 for (source, _), times in seen.items() if source == number)
        never = sum(length is None for _, length in rows)
        assert never == counts["dropped"].get("bad_row", 0) + counts["dropped"].get("no_answer", 0)
    everything = prepared.ledger["total"]
    # And training reads what the ledger says.
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    read, tokens = [store.document(document) for document in index.members], everything["tokens"]
    assert sum(len(ids) for ids, _ in read) == tokens["trained"] + tokens["masked"]
    assert sum(int(trained.sum()) for _, trained in read) == tokens["trained"]
    assert all(trained.any() and not trained[0] and len(ids) <= recipe.data.max_length for ids, trained in read)
    held_out = SequenceIndex.load(prepared.folder / "held_out.npz").members
    assert not set(held_out.tolist()) & set(index.members.tolist())


def test_every_reason_for_a_loss_of_tokens_is_named(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5] * 10, "labels": [-100] + [5] * 9},
        {"input_ids": [5] * 10, "labels": [-100] + [5] * 9},
        {"input_ids": [6] * 50, "labels": [-100] + [6] * 49},
        {"input_ids": [7] * 50, "labels": [-100] * 40 + [7] * 10},
        {"input_ids": [8] * 10, "labels": [-100] * 10},
        {"input_ids": [9] * 10, "labels": [-100] + [9] * 9},
    ]
    for name, part in (("train", rows), ("held_out", rows[5:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    train = [f"data.train={tmp_path / 'train.jsonl'}", f"data.held_out={tmp_path / 'held_out.jsonl'}"]

    def account(overlong: str) -> dict[str, Any]:
        recipe = make_recipe(*train, f"data.overlong={overlong}", "data.max_length=32", "data.deduplicate=true")
        prepared = prepare(recipe, inspect_model(recipe))
        found = {kind: where for kind, where in counts_of(prepared).items() if kind in ("truncated", "split")}
        first: dict[str, Any] = prepared.ledger["sources"][0]
        assert found == {kind: first["rows"][kind] for kind in found}
        return first

    always = {"duplicate": 10, "no_target_tokens": 10, "held_out": 10}
    dropped = account("drop")
    assert dropped["tokens_dropped"] == always | {"too_long": 100}
    assert dropped["rows"]["dropped"] == dict.fromkeys(always, 1) | {"too_long": 2}
    cut = account("truncate")
    assert cut["tokens_dropped"] == always | {"targets_past_max_length": 50}
    assert cut["tokens"] == {"in": 140, "trained": 9 + 31, "masked": 2, "truncated": 18, "held_out": 0, "dropped": 80}
    assert cut["rows"]["truncated"] == 1
    split = account("split")
    assert split["tokens_dropped"] == always | {"piece_without_targets": 32}
    # A piece's first token is predicted by nothing.
    assert split["tokens"]["trained"] == 9 + 31 + 17 + 10
    assert (split["rows"]["used"], split["rows"]["split"]) == (3, 2)


def counts_of(prepared: Prepared) -> dict[str, int]:
    return {finding["kind"]: finding["count"] for finding in prepared.findings}


def ledger(used: int, trained: int = 50, masked: int = 50, **dropped: int) -> dict[str, Any]:
    rows = {"in": used + sum(dropped.values()), "used": used, "repeated": 0, "held_out": 0, "dropped": dropped}
    lengths = {"up_to": [8, 11, 16, 22], "rows": [0, 3, 0, 9]}
    return {"total": {"rows": rows, "tokens": {"trained": trained, "masked": masked}}, "lengths": lengths}


@pytest.mark.parametrize(
    ("good", "bad", "limit", "told"),
    [
        (
            ledger(95, too_long=5),
            ledger(94, too_long=4, targets_past_max_length=2),
            {"max_overlong_fraction": 0.06},
            r"(?s)6 of 100 rows \(6.0%\) are too long for data.max_length=2048, .*data.max_overlong_fraction=0.05.*tokens a row",
        ),
        (
            ledger(90, bad_row=4, no_answer=6, duplicate=50),
            ledger(89, bad_row=5, no_answer=6),
            {"max_dropped_fraction": 0.2},
            r"11 of 100 rows \(11.0%\) were dropped \(5 bad row, 6 no answer\)",
        ),
        (ledger(1), ledger(0, too_long=3), None, r"(?s)all 3 rows .*\(3 too long\).*tokens a row"),
    ],
)
def test_a_limit_stops_the_run_with_the_numbers(
    good: dict[str, Any], bad: dict[str, Any], limit: dict[str, Any] | None, told: str
) -> None:
    check_limits(good, Data(train="x"))
    with pytest.raises(DataError, match=told):
        check_limits(bad, Data(train="x"))
    if limit is not None:
        check_limits(bad, Data(train="x", **limit))


def test_a_histogram_shows_rows_by_length_and_the_bins_between() -> None:
    lines = histogram(ledger(1), width=6).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["9", "-", "11", "3", "██"],
        ["12", "-", "16", "0"],
        ["17", "-", "22", "9", "██████"],
    ]
    assert histogram({"lengths": {"up_to": [8], "rows": [0]}}) == "no rows"
