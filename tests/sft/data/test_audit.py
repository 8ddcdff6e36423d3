import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sft.data.audit import check_not_rendered, check_tokenizer
from sft.data.document_maker import DocumentMaker
from sft.data.findings import Findings
from sft.data.formats import row_format
from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.data.readers import read_rows
from sft.data.tokenizer import load_tokenizer
from sft.errors import DataError, ModelError
from sft.hub.demo import Demo
from sft.plan.facts import inspect_model
from sft.recipe.schema import Recipe, Source

MakeRecipe = Callable[..., Recipe]
Row = dict[str, Any]
CHATML = "<|im_start|>user\nQuestion {0}<|im_end|>\n<|im_start|>assistant\n"


def rendered(number: int) -> Row:
    return {"prompt": CHATML.format(number), "completion": f"Answer {number}<|im_end|>"}


def plain(number: int) -> Row:
    return {"prompt": f"Question {number}", "completion": f"Answer {number}"}


@pytest.fixture(scope="module")
def tokenizer_of(make_recipe: MakeRecipe, real_model: Callable[[str], Path]) -> Callable[[str], Any]:
    @cache
    def load(name: str) -> Any:
        return load_tokenizer(make_recipe(*([] if name == "demo" else [f"model.name_or_path={real_model(name)}"])))

    return load


@pytest.fixture
def check(make_recipe: MakeRecipe, tokenizer_of: Callable[[str], Any]) -> Callable[..., None]:
    """The check, of these first rows of a source."""

    def run(rows: list[Row], *overrides: str, chat: bool = True, name: str = "demo", format: str = "") -> None:
        recipe, source = make_recipe(*overrides), Source(path="rows.jsonl", chat=chat)
        maker = DocumentMaker(recipe.data, tokenizer_of(name))
        check_not_rendered(source, format or row_format(set(rows[0]), source), rows, recipe, maker)

    return run


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("spelled", "refused"), [(20, True), (10, True), (9, False), (2, False), (1, False), (0, False)]
)
def test_a_source_of_which_half_the_rows_were_rendered_is_refused(
    spelled: int, refused: bool, chat: bool, check: Callable[..., None]
) -> None:
    rows = [rendered(number) if number < spelled else plain(number) for number in range(20)]
    if not refused:
        check(rows, chat=chat)
        return
    told = rf"{spelled} of the first 20 rows of rows.jsonl spell special tokens, .*Set data.special_tokens=keep"
    with pytest.raises(DataError, match=told) as error:
        check(rows, chat=chat)
    # Rows that are rendered already must not be rendered once more.
    assert ("chat: false" in str(error.value)) == chat
    check(rows, "data.special_tokens=keep", chat=False)
    with pytest.raises(DataError, match=rf"{spelled} of the first 20 rows .*write them once more.*Set chat: false"):
        check(rows, "data.special_tokens=keep")


def test_a_single_row_is_no_habit(check: Callable[..., None]) -> None:
    check([rendered(0)])
    check([rendered(0), plain(1), plain(2)])
    with pytest.raises(DataError, match="2 of the first 2 rows"):
        check([rendered(0), rendered(1)])


def test_conversations_in_which_turns_were_rendered_are_refused_too(check: Callable[..., None]) -> None:
    def turns(number: int, content: str) -> Row:
        return {
            "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": f"Answer {number}"}]
        }

    rows = [turns(number, CHATML.format(number)) for number in range(4)]
    sides = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    alpaca = [{"instruction": row["messages"][0]["content"], "output": "Answer"} for row in rows]
    for told in (rows, sides, alpaca):
        for keys in ([], ["data.special_tokens=keep"]):
            with pytest.raises(DataError, match=r"4 of the first 4 rows .*Take the special tokens out") as error:
                check(told, *keys)
            # Which are for rows of prompt and completion: these would get every header twice.
            assert not any(key in str(error.value) for key in ("special_tokens=keep", "chat: false"))
    check([turns(number, f"Question {number}") for number in range(4)])


def test_a_special_token_that_is_no_header_is_kept_in_conversations(check: Callable[..., None]) -> None:
    """Such as a tool's own token, which a row may spell on purpose."""
    check([plain(number) | {"prompt": "<|endoftext|> of what?"} for number in range(4)], "data.special_tokens=keep")


def test_text_and_tokens_are_not_looked_at(check: Callable[..., None]) -> None:
    """Text is taken as it spells; and tokens spell nothing."""
    check([{"text": rendered(number)["prompt"]} for number in range(9)])
    check([{"input_ids": [1, 2, 3]} for _ in range(9)])


def test_rows_that_are_bad_are_left_for_their_own_turn(check: Callable[..., None]) -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    bad = [{"prompt": 5, "completion": "x"}, {"prompt": "x"}, {"prompt": [None], "completion": deep}]
    bad += [{"prompt": "x", "completion": "y", "tools": deep}]
    check([*bad, plain(0)])


def test_an_answer_that_ends_with_an_end_token_was_not_rendered(check: Callable[..., None]) -> None:
    check([plain(number) | {"completion": f"Answer {number}<|im_end|>"} for number in range(9)])
    check([plain(number) | {"completion": f"Answer {number}<|endoftext|>\n"} for number in range(9)])


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", ["demo", "qwen3", "minimind"])
def test_real_answers_that_end_with_an_end_token_are_taken(
    name: str, chat: bool, check: Callable[..., None], shared: Path
) -> None:
    rows = [row for row in islice(read_rows(shared / "sft" / "t0_short.jsonl"), 1000) if isinstance(row, dict)]
    assert sum(row["completion"].rstrip().endswith(">") for row in rows) > 900
    check(rows, chat=chat, name=name)


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
@pytest.mark.parametrize(
    "file",
    """gpteacher_roleplay.json oasst_en_best_path.jsonl oasst_sft_zh.json raschka_instruction_data.json
    sgd_messages_tools_600.jsonl llamafactory/alpaca_en_demo.json llamafactory/glaive_toolcall_en_demo.json
    llamafactory/identity.json llamafactory/reason_tool_use_demo_50.jsonl llamafactory/v1_sft_demo.jsonl""".split(),
)
def test_real_rows_are_not_taken_for_rendered(file: str, name: str, check: Callable[..., None], shared: Path) -> None:
    rows = [row for row in islice(read_rows(shared / "sft" / file), 200) if isinstance(row, dict)]
    check(rows, name=name, format=row_format(set().union(*rows), Source(path=file)))


@pytest.fixture
def prepared(make_recipe: MakeRecipe, demo: Demo, tmp_path: Path) -> Callable[..., Prepared]:
    """These rows, prepared in a place of their own."""

    def of(rows: list[Row], *overrides: str, chat: bool = True) -> Prepared:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = [f"data.train=[{{path: {path}, chat: {str(chat).lower()}}}]", f"output_dir={tmp_path / 'out'}"]
        recipe = make_recipe(f"model.name_or_path={demo.model}", *keys, *overrides)
        return prepare(recipe, inspect_model(recipe))

    return of


@pytest.mark.parametrize("chat", [True, False])
def test_rendered_rows_leave_no_entry_and_are_trained_as_they_stand_where_the_recipe_says_so(
    chat: bool, prepared: Callable[..., Prepared], tmp_path: Path, tokenizer_of: Callable[[str], Any]
) -> None:
    from sft.data.store import DocumentStore

    rows = [rendered(number) for number in range(10)]
    with pytest.raises(DataError, match=r"10 of the first 10 rows of .*rows.jsonl spell special tokens"):
        prepared(rows, chat=chat)
    assert [path.name for path in (tmp_path / "out" / ".prepared").glob("*") if path.suffix != ".lock"] == []
    entry = prepared(rows, "data.special_tokens=keep", chat=False)
    ids, mask = DocumentStore.open(entry.folder).document(3)
    tokenizer = tokenizer_of("demo")
    assert tokenizer.decode(ids) == rows[3]["prompt"] + rows[3]["completion"]
    assert tokenizer.decode(ids[mask == 1]) == "Answer 3<|im_end|>"


@pytest.mark.parametrize("chat", [True, False])
def test_one_such_row_in_ten_is_noted(chat: bool, prepared: Callable[..., Prepared]) -> None:
    entry = prepared([rendered(number) if number == 4 else plain(number) for number in range(10)], chat=chat)
    (found,) = [found for found in entry.findings if found["kind"] == "special_tokens"]
    assert found["count"] == 1
    assert [row.rpartition(", ")[2] for row in found["rows"]] == ["row 5"]
    assert entry.ledger["total"]["rows"]["used"] == 10


def test_findings_name_the_rows_that_were_dropped_by_reason(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    rows: list[Row] = [plain(number) for number in range(30)]
    for number in (3, 9):
        rows[number] = {"prompt": "a", "completion": " "}
    rows[5] = {"prompt": 5, "completion": "x"}
    for number in range(11, 18):
        rows[number] = {"prompt": "word " * 300, "completion": f"x{number}"}
    entry = prepared(rows, "data.on_bad_row=drop")
    found = {finding["kind"]: finding for finding in entry.findings}
    dropped = {"no answer to train on": [4, 10], "bad row": [6], "longer than max_length": [12, 13, 14, 15, 16]}
    for reason, numbers in dropped.items():
        assert found[reason]["rows"] == [f"{tmp_path / 'rows.jsonl'}, row {number}" for number in numbers]
        assert found[reason]["meaning"].endswith(("; dropped", "(data.on_bad_row=drop)"))
    counts = {reason: found[reason]["count"] for reason in dropped}
    assert counts == entry.ledger["total"]["rows"]["dropped"]
    assert counts["longer than max_length"] == 7
    cut = prepared(rows, "data.on_bad_row=drop", "data.overlong=truncate")
    (told,) = [finding for finding in cut.findings if finding["kind"] == "no trained token within max_length"]
    assert (told["count"], told["rows"][0]) == (7, f"{tmp_path / 'rows.jsonl'}, row 12")


def test_tokens_without_a_trained_one_are_named(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, int(number != 4), 1]} for number in range(9)]
    rows[4] = {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 0]}
    (found,) = [finding for finding in prepared(rows).findings if finding["kind"] == "no trained token"]
    assert (found["count"], found["rows"]) == (1, [f"{tmp_path / 'rows.jsonl'}, row 5"])


LOWERCASE, NO_ACCENTS = (
    {"type": "Lowercase"},
    {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]},
)


@pytest.mark.parametrize(
    ("kind", "normalizer", "accents", "found"),
    [
        ("llama", LOWERCASE, 0, None),
        ("llama", NO_ACCENTS, 11, None),
        ("llama", NO_ACCENTS, 9, {"lossy": 9}),
        ("llama", None, 20, {}),
        # transformers has a class for it, which leaves the file's normalizer out.
        ("qwen2", LOWERCASE, 0, {"other_tokens": 20}),
        ("qwen2", NO_ACCENTS, 9, {"other_tokens": 9}),
        ("qwen2", None, 20, {}),
    ],
)
def test_what_a_tokenizer_loses_is_told(
    kind: str,
    normalizer: Row | None,
    accents: int,
    found: dict[str, int] | None,
    make_recipe: MakeRecipe,
    demo: Demo,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(demo.model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    rows = [{"prompt": f"Question {number}", "completion": "Été" if number < accents else "No"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"data.train={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}", "data.allow=[same_answer]"]
    recipe = make_recipe(f"model.name_or_path={folder}", *keys)
    if found is None:
        with pytest.raises(ModelError, match=r"The tokenizer loses text in .* of the first 20 rows"):
            prepare(recipe, inspect_model(recipe))
        return
    findings = prepare(recipe, inspect_model(recipe)).findings
    told = {one["kind"]: one["count"] for one in findings if one["kind"] in ("lossy", "other_tokens")}
    assert told == found


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_real_tokenizers_lose_nothing(
    name: str, tokenizer_of: Callable[[str], Any], make_recipe: MakeRecipe, shared: Path
) -> None:
    tokenizer, findings = tokenizer_of(name), Findings()
    source = Source(path="oasst_sft_zh.json")
    rows = list(enumerate(islice(read_rows(shared / "sft" / source.path), 100), 1))
    format = row_format(set(rows[0][1]), source)
    texts = DocumentMaker(make_recipe().data, tokenizer).texts(source, format, rows)
    assert len(texts) > 90
    check_tokenizer(source, 0, texts, tokenizer, findings)
    assert findings.counts == {}
