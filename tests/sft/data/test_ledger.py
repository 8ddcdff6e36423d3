import json
from collections import Counter
from collections.abc import Callable
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

MakeRecipe = Callable[..., Recipe]
FORMATS = ("messages", "prompt_completion", "plain", "alpaca", "text", "tokens")
Rows = list[tuple[dict[str, Any], int | None]]
"""Rows, and the tokens of each, counted apart from our code; None for a row that is never tokenized."""


def words(random: np.random.Generator) -> str:
    return " ".join(random.choice(["train", "Oslo", "9", "Bella", "é", "to"], size=random.choice([1, 2, 3, 40])))


def some_rows(format: str, count: int, tokenizer: Any, random: np.random.Generator) -> Rows:
    """Rows of a format: some long, some the same, some without an answer, some broken."""

    def chat(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.apply_chat_template(messages, return_dict=False))

    def text(string: str) -> int:
        return len(tokenizer(string + tokenizer.eos_token)["input_ids"])

    rows: Rows = []
    for number in range(count):
        question, answer = words(random), "" if number % 11 == 5 else words(random)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if format == "messages" and number % 3 == 0 and answer:
            turns += [{"role": "user", "content": words(random)}, {"role": "assistant", "content": words(random)}]
        ids = tokenizer(question + answer)["input_ids"]
        labels = [token if place % 4 and answer else -100 for place, token in enumerate(ids)]
        rendered = chat(turns) if answer else None
        row, length = {
            "messages": ({"messages": turns}, rendered),
            "prompt_completion": ({"prompt": question, "completion": answer}, rendered),
            "plain": ({"prompt": question, "completion": answer}, text(question + answer) if answer else None),
            "alpaca": ({"instruction": question, "output": answer}, rendered),
            "text": ({"text": answer}, text(answer) if answer else None),
            "tokens": ({"input_ids": ids, "labels": labels}, len(ids)),
        }[format]
        if number % 13 == 7 and format in ("messages", "alpaca", "tokens"):
            row, length = dict.fromkeys(row, 5), None
        rows.append((row, length))
    return rows + rows[: count // 5]


def some_recipe(seed: int, folder: Path, make_recipe: MakeRecipe) -> tuple[Recipe, list[Rows]]:
    """A small recipe drawn by the seed, and the rows of its sources."""
    random = np.random.default_rng(seed)
    tokenizer = load_tokenizer(make_recipe())
    formats = [str(format) for format in random.choice(FORMATS, size=random.integers(1, 4))]
    held_out, overlong = (
        random.choice(["none", "fraction", "source"]),
        str(random.choice(["drop", "truncate", "split"])),
    )
    weighted = random.random() < 0.4
    sources, rows = [], []
    for number, format in enumerate([*formats, formats[0]] if held_out == "source" else formats):
        rows.append(some_rows(format, int(random.integers(20, 60)), tokenizer, random))
        if number == len(formats):
            rows[-1] += rows[0][:10]  # some of the rows that are trained
        path = folder / f"{seed}-{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row, _ in rows[-1]))
        source: dict[str, Any] = {"path": str(path), "chat": format != "plain"}
        if number < len(formats):
            # Rows that are split and repeated have a test of their own.
            source["epochs"] = float(random.choice([0.5, 1.0] if overlong == "split" else [0.5, 1.0, 1.0, 2.0, 2.5]))
            if weighted:
                source["weight"] = float(random.uniform(0.2, 3))
            elif random.random() < 0.3:
                source["rows"] = 3
        sources.append(source)
    section: dict[str, Any] = {
        "train": sources[: len(formats)],
        "held_out": {"none": None, "fraction": 0.25, "source": sources[len(formats) :]}[str(held_out)],
        "max_length": int(random.choice([24, 64, 1000])),
        "packing": bool(random.random() < 0.7),
        "overlong": overlong,
        "loss_on": str(random.choice(["auto", "all", "last_assistant"])),
        "deduplicate": bool(random.random() < 0.4),
        "on_bad_row": "drop",
        "seed": seed,
    }
    return make_recipe(f"data={json.dumps(section)}"), rows


def times_seen(prepared: Prepared) -> Counter[tuple[int, int]]:
    """How often each row is in the sequences to train on."""
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    times = np.bincount(index.members, minlength=len(store.documents))
    places = zip(store.documents["source"].tolist(), store.documents["row"].tolist(), strict=True)
    return Counter({place: int(count) for place, count in zip(places, times, strict=True) if count})


@pytest.mark.parametrize("seed", range(24))
def test_every_row_and_token_is_accounted_for(seed: int, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe, sources = some_recipe(seed, tmp_path, make_recipe)
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
    for part in ("rows", "tokens"):
        for name, value in everything[part].items():
            if name != "dropped" or part == "tokens":
                assert value == sum(account[part][name] for account in prepared.ledger["sources"])
    assert sum(account["share"] for account in prepared.ledger["sources"]) == pytest.approx(1)
    unread = everything["rows"]["dropped"].get("bad_row", 0) + everything["rows"]["dropped"].get("no_answer", 0)
    assert sum(prepared.ledger["lengths"]["rows"]) == everything["rows"]["in"] - unread
    # And training reads what the ledger says.
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    read, tokens = [store.document(document) for document in index.members], everything["tokens"]
    assert sum(len(ids) for ids, _ in read) == tokens["trained"] + tokens["masked"]
    assert sum(int(trained.sum()) for _, trained in read) == tokens["trained"]
    assert all(trained.any() and not trained[0] and len(ids) <= recipe.data.max_length for ids, trained in read)
    held_out = SequenceIndex.load(prepared.folder / "held_out.npz").members
    assert not set(held_out.tolist()) & set(index.members.tolist())


def test_a_row_seen_twice_counts_twice_also_in_what_a_split_drops_of_it(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """Its question fills the first piece, which has nothing to train."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "9" * 100, "completion": "to"}) + "\n")
    accounts = []
    for epochs in (1.0, 2.0):
        source = json.dumps([{"path": str(tmp_path / "rows.jsonl"), "epochs": epochs}])
        recipe = make_recipe(f"data.train={source}", "data.max_length=64", "data.overlong=split")
        accounts.append(prepare(recipe, inspect_model(recipe)).ledger["total"]["tokens"])
    assert accounts[0]["dropped"] > 0
    assert accounts[1] == {name: 2 * count for name, count in accounts[0].items()}


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
        (ledger(1), ledger(0, no_answer=3), None, r"all 3 rows were dropped or held out \(3 no answer\)"),
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
