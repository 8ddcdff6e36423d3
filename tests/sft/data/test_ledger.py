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
FORMATS = ("messages", "sharegpt", "prompt_completion", "plain", "alpaca", "text", "tokens")
Rows = list[tuple[dict[str, Any], int | None]]
"""Rows, and the tokens of each, counted apart from our code; None for a row that is never tokenized."""


def words(random: np.random.Generator, least: int = 1) -> str:
    size = int(random.choice([1, 2, 3, 40]))
    return " ".join(random.choice(["train", "Oslo", "9", "Bella", "é", "to"], size=max(least, size)).tolist())


def some_rows(format: str, count: int, tokenizer: Any, random: np.random.Generator) -> Rows:
    """Rows of a format: some long, some the same, some without an answer, some broken."""

    def chat(messages: list[dict[str, str]]) -> int:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(string: str) -> int:
        return len(tokenizer(string + tokenizer.eos_token)["input_ids"])

    rows: Rows = []
    for number in range(count):
        question, answer = words(random), "" if number % 11 == 5 else words(random)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if format in ("messages", "sharegpt") and number % 3 == 0 and answer:
            turns += [{"role": "user", "content": words(random)}, {"role": "assistant", "content": words(random)}]
        length = chat(turns) if answer else None
        if format == "messages":
            row: dict[str, Any] = {"messages": turns}
        elif format == "sharegpt":
            names = {"user": "human", "assistant": "gpt"}
            row = {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]}
        elif format == "prompt_completion":
            row = {"prompt": question, "completion": answer}
        elif format == "plain":
            row, length = {"prompt": question, "completion": answer}, text(question + answer) if answer else None
        elif format == "alpaca":
            row = {"instruction": question, "output": answer}
        elif format == "text":
            row, length = {"text": answer}, text(answer) if answer else None
        else:
            ids = tokenizer(question + answer)["input_ids"]
            labels = [token if place % 4 else -100 for place, token in enumerate(ids)]
            row, length = {"input_ids": ids, "labels": labels if answer else [-100] * len(ids)}, len(ids)
        if number % 13 == 7 and format in ("messages", "alpaca", "tokens"):
            row, length = dict.fromkeys(row, 5), None
        rows.append((row, length))
    return rows + rows[: count // 5]


def some_recipe(seed: int, folder: Path, make_recipe: MakeRecipe) -> tuple[Recipe, list[Rows]]:
    """A small recipe drawn by the seed, and the rows of its sources."""
    random = np.random.default_rng(seed)
    tokenizer = load_tokenizer(make_recipe())
    formats = [str(format) for format in random.choice(FORMATS, size=random.integers(1, 4))]
    held_out = random.choice(["none", "fraction", "source"])
    weighted = random.random() < 0.4
    overlong = str(random.choice(["drop", "truncate", "split"]))
    sources, rows = [], []
    for number, format in enumerate([*formats, formats[0]] if held_out == "source" else formats):
        rows.append(some_rows(format, int(random.integers(20, 60)), tokenizer, random))
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
    if held_out == "source":
        # Some of the rows that are trained.
        rows[-1] += rows[0][:10]
        (folder / f"{seed}-{len(formats)}.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _ in rows[-1]))
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


@pytest.mark.parametrize("seed", range(40))
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
        longer = sum(length is not None and length > recipe.data.max_length for _, length in rows)
        if recipe.data.overlong == "drop":
            assert counts["dropped"].get("too_long", 0) <= longer
            assert tokens["truncated"] == 0
    everything = prepared.ledger["total"]
    for part in ("rows", "tokens"):
        for name, value in everything[part].items():
            if name != "dropped" or part == "tokens":
                assert value == sum(account[part][name] for account in prepared.ledger["sources"])
    assert sum(account["share"] for account in prepared.ledger["sources"]) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_the_ledger_says_what_training_reads(seed: int, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe, _ = some_recipe(seed, tmp_path, make_recipe)
    prepared = prepare(recipe, inspect_model(recipe))
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    read = [store.document(document) for document in index.members]
    tokens = prepared.ledger["total"]["tokens"]
    assert sum(len(ids) for ids, _ in read) == tokens["trained"] + tokens["masked"]
    assert sum(int(trained.sum()) for _, trained in read) == tokens["trained"]
    assert all(trained.any() and not trained[0] and len(ids) <= recipe.data.max_length for ids, trained in read)
    held_out = SequenceIndex.load(prepared.folder / "held_out.npz").members
    cut = int(store.documents["cut"][held_out].sum() + store.documents["lost"][held_out].sum())
    assert sum(len(store.document(document)[0]) for document in held_out) + cut == tokens["held_out"]
    assert not set(held_out.tolist()) & set(index.members.tolist())
    lengths = prepared.ledger["lengths"]
    dropped = prepared.ledger["total"]["rows"]["dropped"]
    unread = dropped.get("bad_row", 0) + dropped.get("no_answer", 0)
    assert sum(lengths["rows"]) == prepared.ledger["total"]["rows"]["in"] - unread


def test_a_row_seen_twice_counts_twice_also_in_what_a_split_drops_of_it(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """Its question fills the first piece, which has nothing to train."""
    row = {"prompt": "9" * 100, "completion": "to"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
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
        first: dict[str, Any] = prepare(recipe, inspect_model(recipe)).ledger["sources"][0]
        return first

    always = {"duplicate": 10, "no_target_tokens": 10, "held_out": 10}
    dropped = account("drop")
    assert dropped["tokens_dropped"] == always | {"too_long": 100}
    assert dropped["rows"]["dropped"] == dict.fromkeys(always, 1) | {"too_long": 2}
    cut = account("truncate")
    assert cut["tokens_dropped"] == always | {"targets_past_max_length": 50}
    assert cut["tokens"] == {"in": 140, "trained": 9 + 31, "masked": 2, "truncated": 18, "held_out": 0, "dropped": 80}
    split = account("split")
    assert split["tokens_dropped"] == always | {"piece_without_targets": 32}
    # A piece's first token is predicted by nothing.
    assert split["tokens"]["trained"] == 9 + 31 + 17 + 10
    assert split["rows"]["used"] == 3


def ledger(used: int, trained: int = 50, masked: int = 50, **dropped: int) -> dict[str, Any]:
    rows = {"in": used + sum(dropped.values()), "used": used, "repeated": 0, "held_out": 0, "dropped": dropped}
    lengths = {"up_to": [8, 11, 16, 22], "rows": [0, 3, 0, 9]}
    return {"total": {"rows": rows, "tokens": {"trained": trained, "masked": masked}}, "lengths": lengths}


def data(**keys: Any) -> Data:
    return Data(train="x", **keys)


def test_too_many_long_rows_stop_the_run_with_the_numbers_and_the_lengths() -> None:
    check_limits(ledger(95, too_long=5), data())
    with pytest.raises(DataError) as error:
        check_limits(ledger(94, too_long=4, targets_past_max_length=2), data(max_length=16))
    message = str(error.value)
    assert "6 of 100 rows (6.0%) are longer than data.max_length=16" in message
    assert "data.max_overlong_fraction=0.05" in message
    assert histogram(ledger(1)) in message
    check_limits(ledger(94, too_long=6), data(max_overlong_fraction=0.06))


def test_too_many_faults_stop_the_run_with_their_reasons() -> None:
    check_limits(ledger(90, bad_row=4, no_answer=6), data())
    with pytest.raises(DataError, match=r"11 of 100 rows \(11.0%\) were dropped \(5 bad row, 6 no answer\)"):
        check_limits(ledger(89, bad_row=5, no_answer=6), data())
    check_limits(ledger(89, bad_row=5, no_answer=6), data(max_dropped_fraction=0.2))


def test_nothing_to_train_on_is_told_with_the_reasons() -> None:
    with pytest.raises(DataError, match=r"all 3 rows were dropped or held out \(3 no answer\)"):
        check_limits(ledger(0, 0, 0, no_answer=3), data(max_dropped_fraction=1.0))
    with pytest.raises(DataError, match=r"(?s)all 3 rows .*\(3 too long\).*tokens a row"):
        check_limits(ledger(0, 0, 0, too_long=3), data(max_overlong_fraction=1.0))


def test_a_histogram_shows_rows_by_length_and_the_bins_between() -> None:
    lines = histogram(ledger(1), width=6).splitlines()
    assert lines[0].split() == ["tokens", "a", "row", "rows"]
    assert [line.split() for line in lines[1:]] == [
        ["9", "-", "11", "3", "██"],
        ["12", "-", "16", "0"],
        ["17", "-", "22", "9", "██████"],
    ]
    assert histogram({"lengths": {"up_to": [8], "rows": [0]}}) == "no rows"


@pytest.mark.parametrize(("overlong", "kind"), [("truncate", "truncated"), ("split", "split")])
def test_rows_that_are_cut_or_split_are_counted_and_told(
    overlong: str, kind: str, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "completion": "b" * size} for size in (5, 300, 7, 200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_recipe(f"data.train={tmp_path / 'rows.jsonl'}", f"data.overlong={overlong}", "data.max_length=128")
    prepared = prepare(recipe, inspect_model(recipe))
    assert prepared.ledger["total"]["rows"][kind] == 2
    (found,) = [finding for finding in prepared.findings if finding["kind"] == kind]
    assert [row.rpartition(" ")[2] for row in found["rows"]] == ["2", "4"]
