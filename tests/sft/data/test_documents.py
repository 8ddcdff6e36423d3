import random
import re
from collections.abc import Callable
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.documents import DOCUMENT, Chunk, DocumentMaker, RowError, token_range
from sft.data.formats import IGNORED, row_format
from sft.data.readers import BadRow, read_rows
from sft.data.tokenizer import load_tokenizer
from sft.recipe.schema import Recipe, Source

MakeRecipe = Callable[..., Recipe]
TokenizerOf = Callable[..., Any]
Made = Callable[..., Chunk]

OVERRIDES = {
    "gpt2": ["model.chat_template=plain", "model.new_tokens=[<|pad|>]", "model.pad_token=<|pad|>"],
    "stories260k_hf": ["model.chat_template=plain", "model.pad_token=<unk>"],
}
MODELS = ("demo", "qwen3", "minimind", "gpt2", "stories260k_hf")


@pytest.fixture(scope="module")
def tokenizer_of(make_recipe: MakeRecipe, real_model: Callable[[str], Path]) -> TokenizerOf:
    @cache
    def load(name: str, *overrides: str) -> Any:
        model = [] if name == "demo" else [f"model.name_or_path={real_model(name)}"]
        return load_tokenizer(make_recipe(*model, *OVERRIDES.get(name, []), *overrides))

    return load


@pytest.fixture(scope="module")
def made(make_recipe: MakeRecipe, tokenizer_of: TokenizerOf) -> Made:
    """Documents of rows, by one of the tokenizers; a row may come with its number."""

    def make(name: str, rows: list[Any], format: str = "messages", chat: bool = True, **data: object) -> Chunk:
        overrides = [f"data.{key}={value}" for key, value in ({"max_length": 4096} | data).items()]
        maker = DocumentMaker(make_recipe(*overrides).data, tokenizer_of(name))
        return maker.make(Source(path="rows", chat=chat), 3, format, list(enumerate(rows, start=1)))

    return make


def talk(question: str, answer: str | None, *more: str) -> dict[str, Any]:
    roles = ("user", "assistant") * (1 + len(more))
    return {
        "messages": [
            {"role": role, "content": content} for role, content in zip(roles, (question, answer, *more), strict=False)
        ]
    }


def documents(chunk: Chunk) -> list[tuple[list[int], list[int]]]:
    """Token ids and mask of each document."""
    ends = np.cumsum(chunk.documents["length"])
    assert (ends[-1] if len(ends) else 0) == len(chunk.tokens) == len(chunk.trained)
    pieces = zip(np.split(chunk.tokens, ends)[:-1], np.split(chunk.trained, ends)[:-1], strict=True)
    return [(ids.tolist(), mask.tolist()) for ids, mask in pieces]


def trained_runs(chunk: Chunk, tokenizer: Any) -> list[list[str]]:
    """What each document's trained tokens spell, stretch by stretch."""
    found = []
    for ids, mask in documents(chunk):
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        found.append([tokenizer.decode(ids[start:stop]) for start, stop in edges])
    return found


def rendered_length(tokenizer: Any, row: dict[str, Any]) -> int:
    """Counted apart from our code: by the tokenizer's own template, without a mask."""
    return len(tokenizer.apply_chat_template(row["messages"], return_dict=False))


def error_of(make: Callable[[], Chunk]) -> tuple[int, str]:
    with pytest.raises(RowError) as error:
        make()
    return error.value.row, error.value.reason


ALPHABET = [
    "a",
    "B",
    " ",
    "  ",
    "\n",
    "1",
    ".",
    "ä",
    "ß",
    "e\u0301",
    "a\u0308\u0323",
    "Å",
    "\u212b",
    "한",
    "数",
    "学",
    "中文",
]
ALPHABET += [
    "😀",
    "👩‍🚀",
    "🇳🇴",
    "نص",
    "שָׁ",
    "नि",
    "Привет",
    " the",
    "\u200b",
    "\ufeff",
    "\u3000",
    "ﬁ",
    "<",
    "|",
    "\t",
    "\U000e0041",
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_a_range_of_characters_are_those_that_hold_any_of_them(
    name: str, special: bool, tokenizer_of: TokenizerOf
) -> None:
    backend, draw = tokenizer_of(name).backend_tokenizer, random.Random(f"{name}{special}")
    multi = 0
    for _ in range(150):
        text = "".join(draw.choices(ALPHABET, k=draw.randint(1, 25)))
        encoding = backend.encode(text, add_special_tokens=special)
        multi += len(set(encoding.offsets)) < len(encoding.offsets)
        for _ in range(12):
            start, end = sorted(draw.choices(range(len(text) + 1), k=2))
            held = [at for at, (first, last) in enumerate(encoding.offsets) if max(first, start) < min(last, end)]
            first, stop = token_range(encoding, start, end)
            assert list(range(first, stop)) == held, (text, start, end, encoding.tokens, encoding.offsets)
    assert multi > 50


@pytest.mark.parametrize("name", MODELS)
def test_a_document_is_what_the_tokenizer_makes_of_its_own_template(
    name: str, made: Made, tokenizer_of: TokenizerOf
) -> None:
    """One turn: TRL's template for training shows the thoughts of earlier ones too."""
    tokenizer = tokenizer_of(name)
    rows = [talk("Hi", "Hello"), talk("Wie, ünï 数 😀?", "Süre\n\n 数 e\u0301"), talk(" a\n", " b ")]
    rows += [{"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]} for row in rows]
    chunk = made(name, rows)
    assert [ids for ids, _ in documents(chunk)] == [
        tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows
    ]
    assert chunk.documents["row"].tolist() == list(range(1, 7))
    assert set(chunk.documents["source"]) == {3}
    for (ids, mask), row in zip(documents(chunk), rows, strict=True):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        assert mask[: len(prompt) - 1] == [0] * (len(prompt) - 1)
        end = len(mask) - mask[::-1].index(1)
        assert ids[end - 1] == tokenizer.eos_token_id
        assert mask[len(prompt) : end] == [1] * (end - len(prompt))
        assert mask[end:] == [0] * (len(ids) - end)


def test_labels_are_the_answers_with_their_ends(made: Made, tokenizer_of: TokenizerOf) -> None:
    rows = [talk("Hi", "Hello there", "More", "Sure"), talk("Who", "Me")]
    chunk = made("demo", rows)
    assert trained_runs(chunk, tokenizer_of("demo")) == [["Hello there<|im_end|>", "Sure<|im_end|>"], ["Me<|im_end|>"]]
    assert chunk.documents["trained"].tolist() == [sum(mask) for _, mask in documents(chunk)]
    assert chunk.documents.dtype == DOCUMENT
    assert (chunk.tokens.dtype, chunk.trained.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_loss_on_all_trains_every_token_that_something_predicts(name: str, made: Made) -> None:
    for rows, format in (([talk("Hi", "Hello")], "messages"), ([{"text": "Once upon"}], "text")):
        ((ids, mask),) = documents(made(name, rows, format, loss_on="all"))
        assert mask == [0] + [1] * (len(ids) - 1)
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    ((ids, mask),) = documents(made(name, [row], "prompt_completion", chat=False, loss_on="all"))
    assert mask == [0] + [1] * (len(ids) - 1)


# What an answer is does not depend on its length here: a character is a token of the demo's.
SIZES = [talk("x" * size, "y" * (size // 3 + 1)) for size in range(1, 120)]


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("limit", [16, 64, 4096])
def test_every_token_is_accounted_for(
    overlong: str, loss_on: str, limit: int, made: Made, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of("demo")
    lengths = [rendered_length(tokenizer, row) for row in SIZES]
    chunk = made("demo", SIZES, max_length=limit, overlong=overlong, loss_on=loss_on)
    counts, records = chunk.counts, chunk.documents
    used = set(records["row"].tolist())
    assert counts.rows_in == len(SIZES) == len(used) + counts.dropped_rows.total()
    cut_off = sum(dict(zip(records["row"].tolist(), records["cut"].tolist(), strict=True)).values())
    lost = int(records["lost"].sum())
    assert len(chunk.tokens) + cut_off + lost + counts.dropped_tokens.total() == sum(lengths)
    assert counts.lengths.sum() == len(SIZES)
    assert records["trained"].sum() == chunk.trained.sum()
    # Every document can be trained on, fits, and predicts nothing from nothing.
    for ids, mask in documents(chunk):
        assert len(ids) <= limit
        assert mask[0] == 0 < sum(mask)
    longer = [length for length in lengths if length > limit]
    assert bool(longer) == (limit < 4096)
    if overlong == "drop":
        assert counts.dropped_rows["too_long"] == len(longer)
        assert counts.dropped_tokens["too_long"] == sum(longer)
        assert cut_off == 0
    elif overlong == "truncate":
        assert len(records) == len(used)
        lost = counts.dropped_rows["targets_past_max_length"]
        assert (lost > 0) == (loss_on == "assistant" and limit < 4096)
        assert cut_off == sum(max(0, lengths[row - 1] - limit) for row in used)
    else:
        assert cut_off == 0
        assert counts.dropped_rows.total() == 0
        whole = made("demo", SIZES, loss_on=loss_on)
        starts = dict(zip(whole.documents["row"].tolist(), documents(whole), strict=True))
        if loss_on == "all":
            for row, (ids, mask) in starts.items():
                pieces = [
                    piece for piece, of in zip(documents(chunk), records["row"].tolist(), strict=True) if of == row
                ]
                # A last piece of one token has nothing to train.
                last = len(ids) % limit == 1 and len(ids) > 1
                assert [token for piece, _ in pieces for token in piece] == ids[: len(ids) - last]
                assert sum(sum(kept) for _, kept in pieces) == sum(mask) - len(range(limit, len(ids), limit))


def test_a_row_whose_pieces_have_no_trained_token_is_dropped_with_its_tokens(made: Made) -> None:
    """An answer of one token, which the cut makes the first of its piece."""
    ids = list(range(10, 26))
    row = {"input_ids": ids, "labels": [token if at == 8 else IGNORED for at, token in enumerate(ids)]}
    chunk = made("demo", [row], "tokens", max_length=8, overlong="split")
    assert documents(chunk) == []
    assert chunk.counts.dropped_rows.total() == chunk.counts.rows_in == 1
    assert chunk.counts.dropped_tokens.total() == 16


def test_a_row_too_long_can_be_an_error(made: Made) -> None:
    rows = [talk("a", "b"), talk("a" * 100, "b"), talk("c", "d")]
    row, reason = error_of(lambda: made("demo", rows, max_length=64, overlong="error"))
    assert row == 2
    assert reason.partition(",")[2].startswith(" more than data.max_length=64. Raise it, or set data.overlong to drop")
    # Whatever happens to bad rows.
    assert error_of(lambda: made("demo", rows, max_length=64, overlong="error", on_bad_row="drop"))[0] == 2


def test_rows_without_an_answer_are_dropped_and_counted(made: Made) -> None:
    rows = [talk("a", "b"), talk("a", ""), talk("a", None), talk("a", " \n"), talk("a", "<|im_end|>")]
    rows += [{"messages": []}, {"messages": None}, {"messages": talk("a", "b")["messages"][:1]}]
    for loss_on in ("auto", "all", "last_assistant"):
        chunk = made("demo", rows, loss_on=loss_on)
        assert len(documents(chunk)) == 1
        assert chunk.counts.dropped_rows == {"no_answer": 7}
        assert chunk.counts.rows_in == 8
    for format, row in (
        ("text", {"text": " "}),
        ("text", {"text": None}),
        ("prompt_completion", {"prompt": "a", "completion": ""}),
        ("prompt_completion", {"prompt": "a", "completion": "<|im_end|>"}),
    ):
        assert made("demo", [row], format, chat=False).counts.dropped_rows == {"no_answer": 1}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", ["Once upon a time", " Once\n", "数 ünï 😀"])
def test_text_begins_and_ends_once(name: str, text: str, made: Made, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    plain = tokenizer(text)["input_ids"]
    written = [text, text + eos]
    if name == "stories260k_hf":
        assert plain[0] == tokenizer.bos_token_id
        written += [bos + text, bos + text + eos]
    chunk = made(name, [{"text": one} for one in written], "text")
    first, *others = (ids for ids, _ in documents(chunk))
    assert first == [*plain, tokenizer.eos_token_id]
    for ids in others:
        # Behind a control token sentencepiece's text begins anew, with a space of its own or not.
        assert ids.count(tokenizer.eos_token_id) == first.count(tokenizer.eos_token_id) == 1
        assert ids.count(tokenizer.bos_token_id) == first.count(tokenizer.bos_token_id)
        assert (ids[0], ids[-1]) == (first[0], first[-1])
    assert all(mask == [0] + [1] * (len(ids) - 1) for ids, mask in documents(chunk))
    assert chunk.findings.counts == {}


def test_an_end_that_the_tokenizer_adds_is_the_only_one(make_recipe: MakeRecipe, tokenizer_of: TokenizerOf) -> None:
    from tokenizers.processors import TemplateProcessing

    recipe = make_recipe()
    tokenizer = load_tokenizer(recipe)
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    maker = DocumentMaker(recipe.data, tokenizer)
    rows = [{"text": text} for text in ("Once upon", "Once upon<|im_end|>")]
    expected = [*tokenizer_of("demo")("Once upon")["input_ids"], end]
    for ids, mask in documents(maker.make(Source(path="x"), 0, "text", list(enumerate(rows, 1)))):
        assert ids == expected
        assert mask == [0] + [1] * (len(ids) - 1)
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    chunk = maker.make(Source(path="x", chat=False), 0, "prompt_completion", [(1, row)])
    assert trained_runs(chunk, tokenizer) == [[" 2<|im_end|>"]]


@pytest.mark.parametrize("name", MODELS)
def test_a_completion_without_a_chat_template_is_trained_with_the_eos(
    name: str, made: Made, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of(name)
    rows = [{"prompt": "Question: 1 + 1\nAnswer:", "completion": " two, ünï 数"}, {"prompt": "", "completion": "Once"}]
    chunk = made(name, rows, "prompt_completion", chat=False)
    (ids, mask), (only, only_mask) = documents(chunk)
    assert ids == [*tokenizer(rows[0]["prompt"] + rows[0]["completion"])["input_ids"], tokenizer.eos_token_id]
    prompt = len(tokenizer(rows[0]["prompt"])["input_ids"])
    assert mask == [0] * prompt + [1] * (len(ids) - prompt)
    assert tokenizer.decode(ids[prompt:]).strip() == f"two, ünï 数{tokenizer.eos_token}"
    assert only == [*tokenizer("Once")["input_ids"], tokenizer.eos_token_id]
    assert only_mask == [0] + [1] * (len(only) - 1)


def test_a_token_that_reaches_from_the_prompt_into_the_completion_is_trained(
    made: Made, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of("gpt2")
    ((ids, mask),) = documents(
        made("gpt2", [{"prompt": "I like unb", "completion": "elievable"}], "prompt_completion", chat=False)
    )
    whole = tokenizer("I like unbelievable")["input_ids"]
    assert ids == [*whole, tokenizer.eos_token_id]
    assert tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept]).endswith(
        "elievable<|endoftext|>"
    )
    assert mask.index(1) < len(whole)


def test_tokens_are_trained_as_their_labels_say(made: Made) -> None:
    rows = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, IGNORED]},
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
        {"input_ids": [0, 540], "labels": None},
    ]
    chunk = made("demo", rows, "tokens")
    assert documents(chunk) == [
        ([5, 6, 7], [0, 1, 1]),
        ([5, 6, 7], [0, 1, 0]),
        ([5, 6, 7], [0, 1, 1]),
        ([0, 540], [0, 1]),
    ]
    assert chunk.findings.counts == {("no_end", 3): 4}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [5, -1]}, "input_ids holds -1, and the tokenizer has 541 tokens"),
        ({"input_ids": [541, 5]}, "input_ids holds 541, and the tokenizer has 541 tokens"),
        ({"input_ids": [5, 2**70]}, f"input_ids holds {2**70}, and"),
        ({"input_ids": [5, 6], "labels": [6]}, "`labels` has 1 numbers, and `input_ids` 2"),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, IGNORED]}, "labels differ from input_ids .*; give them unshifted"),
        ({"input_ids": [5, 6], "labels": [IGNORED, -1]}, "labels differ from input_ids"),
        ({"input_ids": [5, 6], "labels": [IGNORED, 2**70]}, "labels differ from input_ids"),
        ({"input_ids": None}, "`input_ids` is not a list of whole numbers"),
    ],
)
def test_tokens_that_are_none_of_the_tokenizers_are_a_bad_row(row: dict[str, Any], told: str, made: Made) -> None:
    number, reason = error_of(lambda: made("demo", [{"input_ids": [5, 6]}, row], "tokens"))
    assert number == 2
    assert re.match(told, reason)
    chunk = made("demo", [{"input_ids": [5, 6]}, row], "tokens", on_bad_row="drop")
    assert (len(documents(chunk)), chunk.counts.dropped_rows) == (1, {"bad_row": 1})


BAD_ROWS: list[tuple[Any, str]] = [
    ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
    ({"text": "x"}, "column 'messages'"),
    ({"messages": 5}, "`messages` is of type int"),
    (talk("a", "b") | {"tools": "{"}, "`tools` is not JSON"),
    (talk("a", "b") | {"chat_template_kwargs": {"messages": []}}, "`chat_template_kwargs` sets messages"),
    (BadRow("line 3 is no JSON"), "line 3 is no JSON"),
    (talk("a \ud83d b", "c"), ""),
    (talk("a", "b \udfff"), ""),
]


@pytest.mark.parametrize(("row", "told"), BAD_ROWS)
def test_a_bad_row_stops_the_run_with_its_number_or_is_counted(row: Any, told: str, made: Made) -> None:
    rows = [talk("a", "b"), row, talk("c", "d")]
    number, reason = error_of(lambda: made("demo", rows))
    assert number == 2
    assert told in reason
    assert reason.endswith(". Correct or remove the row, or set data.on_bad_row=drop")
    chunk = made("demo", rows, on_bad_row="drop")
    assert chunk.documents["row"].tolist() == [1, 3]
    assert chunk.counts.rows_in == 3
    assert chunk.counts.dropped_rows == {"bad_row": 1}
    assert chunk.findings.rows["bad_row", 3] == [2]


def test_a_finding_may_be_refused(made: Made) -> None:
    rows = [talk("a", "b"), talk("{{name}}", "c"), talk("d", "e")]
    assert made("demo", rows).findings.rows == {("placeholder", 3): [2]}
    assert error_of(lambda: made("demo", rows, refuse='["placeholder"]')) == (
        2,
        "a placeholder that was never filled in, such as {{name}} (data.refuse: placeholder). Correct or remove the row, or set "
        "data.on_bad_row=drop",
    )
    chunk = made("demo", rows, refuse='["placeholder", "end_token"]', on_bad_row="drop")
    assert chunk.documents["row"].tolist() == [1, 3]
    assert chunk.findings.rows == {("placeholder", 3): [2], ("refused", 3): [2]}
    assert len(made("demo", rows, refuse='["end_token"]').documents) == 3


def test_a_digest_is_of_tokens_and_of_nothing_else(made: Made) -> None:
    prompt = {"prompt": "Hi", "completion": "Hello"}
    first, second, third = made("demo", [talk("Hi", "Hello"), talk("Hi", "Hello!"), talk("Ho", "Hello")]).documents
    (same,) = made("demo", [prompt], "prompt_completion").documents
    (all_trained,) = made("demo", [talk("Hi", "Hello")], loss_on="all").documents
    # Not of the labels: a row that is held out is not to be trained under another mask.
    assert first["digest"] == same["digest"] == all_trained["digest"]
    assert len({int(one["digest"]) for one in (first, second, third)}) == 3
    assert first["answer"] == third["answer"] != second["answer"]
    assert first["row"] == 1


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("sgd_messages_tools_600.jsonl", "qwen3"),
        ("llamafactory/reason_tool_use_demo_50.jsonl", "qwen3"),
        ("llamafactory/v1_sft_demo.jsonl", "qwen3"),
        ("llamafactory/glaive_toolcall_en_demo.json", "minimind"),
        ("oasst_en_best_path.jsonl", "minimind"),
        ("oasst_sft_zh.json", "minimind"),
        ("t0_short.jsonl", "minimind"),
        ("t0_short.jsonl", "gpt2"),
        ("llamafactory/alpaca_en_demo.json", "stories260k_hf"),
    ],
)
def test_real_data_ends_every_answer_with_the_end_of_turn(
    file: str, model: str, made: Made, tokenizer_of: TokenizerOf, shared: Path
) -> None:
    rows = [row for row in islice(read_rows(shared / "sft" / file), 60) if isinstance(row, dict)]
    chunk = made(model, rows, row_format(rows, Source(path=file)), max_length=65536)
    assert len(chunk.documents) == len(rows) - chunk.counts.dropped_rows.total() > 0.9 * len(rows)
    tokenizer = tokenizer_of(model)
    for ids, mask in documents(chunk):
        ends = [token for token, kept, after in zip(ids, mask, [*mask[1:], 0], strict=True) if kept > after]
        assert set(ends) == {tokenizer.eos_token_id}
    # It is at an answer's end and nowhere else in it, neither as a token nor spelled out.
    for run in chain.from_iterable(trained_runs(chunk, tokenizer)):
        assert run.count(tokenizer.eos_token) == 1


OFF = [("weight", 0), ("weight", 0.0), ("weight", False), ("loss_weight", 0), ("train", False), ("training", False)]
OFF += [("loss", False), ("loss", 0)]


@pytest.mark.parametrize(("key", "off"), OFF)
def test_loss_on_all_leaves_out_exactly_the_turns_that_the_row_takes_out(
    key: str, off: Any, made: Made, tokenizer_of: TokenizerOf
) -> None:
    row = talk("a", "One", "b", "Two", "c", "Three")
    row["messages"][3][key] = off
    (runs,) = trained_runs(made("demo", [row], loss_on="all"), tokenizer_of("demo"))
    begins, ends = "<|im_start|>assistant\n", "<|im_end|><|im_start|>"
    assert runs == [
        f"user\na{ends}assistant\nOne{ends}user\nb<|im_end|>{begins}",
        f"<|im_start|>user\nc<|im_end|>{begins}Three<|im_end|>",
    ]
