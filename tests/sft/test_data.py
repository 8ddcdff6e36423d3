import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sft.batches import documents_dataset
from sft.data import IGNORED, Account, Documents, labels_from_mask, prepare_documents
from sft.errors import DataError
from sft.recipe import Recipe
from sft.rows import read_rows
from sft.tokenizer import load_tokenizer

MakeRecipe = Callable[..., Recipe]
RecipeOf = Callable[..., Recipe]
RealModel = Callable[[str], Path]


def talk(question: str, answer: str | None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def prepared(
    recipe: Recipe, folder: Path, name: str = "documents.arrow"
) -> tuple[Documents, list[dict[str, list[int]]]]:
    documents = prepare_documents(recipe, load_tokenizer(recipe), folder / name)
    return documents, documents_dataset(documents.file).to_list()


def rendered_length(tokenizer: Any, row: dict[str, Any]) -> int:
    """Counted apart from our code: by the tokenizer's own template, without a mask."""
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def runs(tokenizer: Any, row: dict[str, list[int]]) -> list[str]:
    found: list[list[int]] = []
    for before, label in zip([IGNORED, *row["labels"]], row["labels"], strict=False):
        if label != IGNORED:
            found = [*found, [label]] if before == IGNORED else [*found[:-1], [*found[-1], label]]
    return [tokenizer.decode(run) for run in found]


def test_labels_are_the_answers_with_their_ends(recipe_of: RecipeOf, tmp_path: Path) -> None:
    row = {"messages": talk("Hi", "Hello there")["messages"] + talk("More", "Sure")["messages"]}
    recipe = recipe_of([row, talk("Who", "Me")])
    tokenizer = load_tokenizer(recipe)
    documents, rows = prepared(recipe, tmp_path)
    assert [runs(tokenizer, row) for row in rows] == [["Hello there<|im_end|>", "Sure<|im_end|>"], ["Me<|im_end|>"]]
    for document in rows:
        assert all(
            label in (IGNORED, token) for token, label in zip(document["input_ids"], document["labels"], strict=True)
        )
    # The template has written the special tokens; nothing is added before or behind.
    assert (
        tokenizer.decode(rows[1]["input_ids"]) == "<|im_start|>user\nWho<|im_end|><|im_start|>assistant\nMe<|im_end|>"
    )
    assert documents.total().rows_used == 2


def test_a_tokenizer_that_would_add_a_beginning_adds_no_second(
    real_model: RealModel, recipe_of: RecipeOf, tmp_path: Path
) -> None:
    model = [f"model.name_or_path={real_model('stories260k_hf')}", "model.chat_template=plain", "model.pad_token=<unk>"]
    recipe = recipe_of([talk("Hi", "Hello")], *model)
    _, (row,) = prepared(recipe, tmp_path)
    assert row["input_ids"].count(1) == 1
    assert (row["input_ids"][0], row["labels"][0]) == (1, IGNORED)


def test_loss_on_all_trains_every_token_that_something_predicts(recipe_of: RecipeOf, tmp_path: Path) -> None:
    _, (row,) = prepared(recipe_of([talk("Hi", "Hello")], "data.loss_on=all"), tmp_path)
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


def test_the_first_token_is_never_trained() -> None:
    assert labels_from_mask([5], [True]) == [IGNORED]
    assert labels_from_mask([5, 6, 7], [True, True, False]) == [IGNORED, 6, IGNORED]
    with pytest.raises(ValueError, match="zip"):
        labels_from_mask([5, 6], [True])


ROWS = [talk("a" * size, "b" * (size // 3 + 1)) for size in range(1, 120)]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_every_token_is_accounted_for(overlong: str, loss_on: str, recipe_of: RecipeOf, tmp_path: Path) -> None:
    recipe = recipe_of(ROWS, "data.max_length=64", f"data.overlong={overlong}", f"data.loss_on={loss_on}")
    tokenizer = load_tokenizer(recipe)
    lengths = [rendered_length(tokenizer, row) for row in ROWS]
    documents, rows = prepared(recipe, tmp_path)
    (account,) = documents.accounts
    assert account.trained + account.masked + account.truncated + account.dropped == sum(lengths)
    assert account.as_json()["tokens"]["in"] == sum(lengths)
    assert account.trained == sum(label != IGNORED for row in rows for label in row["labels"])
    assert account.trained + account.masked == sum(len(row["input_ids"]) for row in rows)
    assert account.rows_in == len(ROWS) == account.rows_used + account.rows_dropped.total()
    assert account.rows_used == len(rows)
    longer = [length for length in lengths if length > 64]
    assert len(longer) > 10
    if overlong == "drop":
        assert (account.truncated, account.dropped) == (0, sum(longer))
        assert account.rows_dropped == {"longer than max_length": len(longer)}
    else:
        lost = account.rows_dropped["no trained token within max_length"]
        assert (lost > 0) == (loss_on == "assistant")
        assert len(rows) == len(ROWS) - lost
        assert account.truncated > 0
        assert max(len(row["input_ids"]) for row in rows) == 64
    assert all(any(label != IGNORED for label in row["labels"]) for row in rows)


def test_a_row_too_long_can_be_an_error(recipe_of: RecipeOf, tmp_path: Path) -> None:
    recipe = recipe_of([talk("a", "b"), talk("a" * 100, "b")], "data.max_length=64", "data.overlong=error")
    with pytest.raises(
        DataError, match=r"a row has \d+ tokens, more than data.max_length=64. Raise it, or set data.overlong"
    ):
        prepared(recipe, tmp_path)


def test_rows_without_an_answer_are_dropped_and_counted(recipe_of: RecipeOf, tmp_path: Path) -> None:
    rows = [talk("a", "b"), talk("a", ""), talk("a", None), {"messages": []}, {"messages": None}]
    documents, kept = prepared(recipe_of([*rows, {"messages": talk("a", "b")["messages"][:1]}]), tmp_path)
    assert len(kept) == 1
    assert documents.total().rows_dropped == {"no answer to train on": 5}
    assert documents.total().rows_in == 6


def test_nothing_to_train_on_is_an_error_with_the_reasons(recipe_of: RecipeOf, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 2 rows were dropped \(2 no answer to train on\)"):
        prepared(recipe_of([talk("a", ""), talk("b", "")]), tmp_path)
    with pytest.raises(DataError, match=r"all 1 rows were dropped \(1 longer than max_length\)"):
        prepared(recipe_of([talk("a" * 99, "b")], "data.max_length=32"), tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"text": "x"}, "the column 'messages' is missing"),
        ({"messages": 5}, ""),
        (talk("a", "b") | {"tools": "{"}, ""),
    ],
)
def test_a_wrong_row_is_told_with_its_file_and_number(
    row: dict[str, Any], told: str, recipe_of: RecipeOf, tmp_path: Path
) -> None:
    recipe = recipe_of([talk("a", "b"), talk("a", "b"), row])
    with pytest.raises(DataError) as error:
        prepared(recipe, tmp_path)
    assert "rows.jsonl, row 3: " in str(error.value)
    assert told in str(error.value)
    assert str(error.value).endswith("Correct or remove the row.")


def test_sources_keep_their_own_accounts_and_their_order(
    make_recipe: MakeRecipe, write_rows: Any, tmp_path: Path
) -> None:
    one = write_rows(talk("a", "first"), name="one.jsonl")
    two = write_rows({"prompt": "b", "completion": "second"}, {"prompt": "b", "completion": ""}, name="two.jsonl")
    recipe = make_recipe(f"data.train=[{{path: {two}}}, {{path: {one}}}]")
    tokenizer = load_tokenizer(recipe)
    documents, rows = prepared(recipe, tmp_path)
    assert [runs(tokenizer, row) for row in rows] == [["second<|im_end|>"], ["first<|im_end|>"]]
    assert [(account.source, account.rows_in) for account in documents.accounts] == [(str(two), 2), (str(one), 1)]
    total = documents.total()
    for name in ("rows_in", "rows_used", "trained", "masked", "truncated", "dropped"):
        assert getattr(total, name) == sum(getattr(account, name) for account in documents.accounts)
    assert total.rows_dropped == {"no answer to train on": 1}


def test_the_fingerprint_is_of_tokens_and_labels_and_of_nothing_else(recipe_of: RecipeOf, tmp_path: Path) -> None:
    def fingerprint(rows: list[Any], *overrides: str) -> str:
        return prepared(recipe_of(rows, *overrides), tmp_path)[0].fingerprint

    rows = [talk("a", "b"), talk("c", "d e f")]
    first = fingerprint(rows)
    assert fingerprint(rows, "train.seed=5") == first
    assert fingerprint([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d e f"}]) == first
    others = [
        fingerprint(rows[::-1]),
        fingerprint(rows, "data.loss_on=all"),
        fingerprint([rows[0], talk("c", "d e g")]),
    ]
    assert len({first, *others, fingerprint(rows * 2)}) == 5


def test_batches_of_rows_change_nothing(recipe_of: RecipeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [talk(f"question {number}", f"answer {number}") for number in range(50)]
    recipe = recipe_of(rows)
    whole, documents = prepared(recipe, tmp_path)
    monkeypatch.setattr("sft.data._BATCH", 7)
    told: list[str] = []
    parts = prepare_documents(recipe, load_tokenizer(recipe), tmp_path / "parts.arrow", told.append)
    assert documents_dataset(parts.file).to_list() == documents
    assert parts.accounts == whole.accounts
    assert len(told) == 8


def test_a_batch_of_rows_may_be_dropped_whole(
    recipe_of: RecipeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.data._BATCH", 3)
    documents, rows = prepared(recipe_of([talk("a", "")] * 7 + [talk("a", "b")]), tmp_path)
    assert len(rows) == 1
    assert documents.total().rows_dropped == {"no answer to train on": 7}


def test_an_account_says_where_all_of_it_went() -> None:
    account = Account("x", rows_in=3, rows_used=2, trained=5, masked=7, truncated=11, dropped=13)
    tokens = account.as_json()["tokens"]
    assert tokens == {"in": 36, "trained": 5, "masked": 7, "truncated": 11, "dropped": 13}
    assert json.loads(json.dumps(account.as_json()))["rows"] == {"in": 3, "used": 2, "dropped": {}}


@pytest.mark.parametrize(
    ("file", "model", "overrides"),
    [
        ("sgd_messages_tools_600.jsonl", "qwen3", []),
        ("llamafactory/glaive_toolcall_en_demo.json", "minimind", []),
        ("oasst_en_best_path.jsonl", "minimind", []),
        ("llamafactory/alpaca_en_demo.json", "stories260k_hf", ["model.chat_template=plain", "model.pad_token=<unk>"]),
    ],
)
def test_real_data_ends_every_answer_with_the_end_of_turn(
    file: str,
    model: str,
    overrides: list[str],
    real_model: RealModel,
    recipe_of: RecipeOf,
    shared: Path,
    tmp_path: Path,
) -> None:
    rows = list(islice(read_rows(shared / "sft" / file), 60))
    recipe = recipe_of(rows, f"model.name_or_path={real_model(model)}", "data.max_length=8192", *overrides)
    tokenizer = load_tokenizer(recipe)
    documents, prepared_rows = prepared(recipe, tmp_path)
    total = documents.total()
    assert total.rows_used == 60
    assert total.trained == sum(label != IGNORED for row in prepared_rows for label in row["labels"])
    for row in prepared_rows:
        following = [*row["labels"][1:], IGNORED]
        ends = [label for label, after in zip(row["labels"], following, strict=True) if label != IGNORED == after]
        assert ends
        assert set(ends) == {tokenizer.eos_token_id}
