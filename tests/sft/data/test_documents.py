import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from sft.data.documents import Chunk, RowError, token_range
from sft.data.formats import IGNORED
from sft.data.readers import BadRow
from sft.data.tokenizer import load_tokenizer
from sft.recipe.schema import Recipe
from tests.sft.data.conftest import MODELS, documents, talk, trained_runs

TokenizerOf = Callable[..., Any]
Made = Callable[..., Chunk]


def error_of(make: Callable[[], Chunk]) -> tuple[int, str]:
    with pytest.raises(RowError) as error:
        make()
    return error.value.row, error.value.reason


ALPHABET = list("aB \n1.ß한学😀🇳🇴نص\u200b\ufeffﬁ<|\t\u0301\U000e0041")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_a_range_of_characters_are_those_that_hold_any_of_them(
    name: str, special: bool, tokenizer_of: TokenizerOf
) -> None:
    backend, draw = tokenizer_of(name).backend_tokenizer, random.Random(f"{name}{special}")
    multi = 0
    for _ in range(100):
        text = "".join(draw.choices(ALPHABET, k=draw.randint(1, 25)))
        encoding = backend.encode(text, add_special_tokens=special)
        multi += len(set(encoding.offsets)) < len(encoding.offsets)
        for _ in range(12):
            start, end = sorted(draw.choices(range(len(text) + 1), k=2))
            held = [at for at, (first, last) in enumerate(encoding.offsets) if max(first, start) < min(last, end)]
            first, stop = token_range(encoding, start, end)
            assert list(range(first, stop)) == held, (text, start, end, encoding.tokens, encoding.offsets)
    assert multi > 30


@pytest.mark.parametrize("name", MODELS)
def test_a_document_is_what_the_tokenizer_makes_of_its_own_template(
    name: str, made: Made, tokenizer_of: TokenizerOf
) -> None:
    """One turn: TRL's template for training shows the reasoning of earlier ones too."""
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


@pytest.mark.parametrize(
    ("row", "format", "chat"),
    [
        (talk("Hi", "Hello"), "messages", True),
        ({"text": "Once upon"}, "text", True),
        ({"prompt": "1 + 1 =", "completion": " 2"}, "prompt_completion", False),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_loss_on_all_trains_every_token_that_something_predicts(
    name: str, row: dict[str, Any], format: str, chat: bool, made: Made
) -> None:
    ((ids, mask),) = documents(made(name, [row], format, chat, loss_on="all"))
    assert mask == [0] + [1] * (len(ids) - 1)


def test_a_row_too_long_can_be_an_error(made: Made) -> None:
    rows = [talk("a", "b"), talk("a" * 100, "b"), talk("c", "d")]
    for bad in ("error", "drop"):  # whatever happens to bad rows
        row, reason = error_of(lambda: made("demo", rows, max_length=64, overlong="error", on_bad_row=bad))  # noqa: B023
        assert row == 2
        assert "more than data.max_length=64" in reason


def test_rows_without_an_answer_are_dropped_and_counted(made: Made) -> None:
    rows = [talk("a", "b"), talk("a", ""), talk("a", None), talk("a", " \n"), talk("a", "<|im_end|>")]
    rows += [{"messages": []}, {"messages": None}, talk("a")]
    for loss_on in ("auto", "all", "last_assistant"):
        chunk = made("demo", rows, loss_on=loss_on)
        assert (len(documents(chunk)), chunk.counts.rows_in, chunk.counts.dropped_rows) == (1, 8, {"no_answer": 7})
    assert made("demo", [{"text": " "}, {"text": None}], "text").counts.dropped_rows == {"no_answer": 2}
    rows = [{"prompt": "a", "completion": completion} for completion in ("", "<|im_end|>")]
    assert made("demo", rows, "prompt_completion", chat=False).counts.dropped_rows == {"no_answer": 2}


@pytest.mark.parametrize("name", MODELS)
def test_text_begins_and_ends_once(name: str, made: Made, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(name)
    for text in ("Once upon a time", " Once\n", "数 ünï 😀"):
        plain = tokenizer(text)["input_ids"]
        written = [text, text + tokenizer.eos_token]
        if name == "stories260k_hf":
            assert plain[0] == tokenizer.bos_token_id
            written += [tokenizer.bos_token + text, tokenizer.bos_token + text + tokenizer.eos_token]
        chunk = made(name, [{"text": one} for one in written], "text")
        first, *others = (ids for ids, _ in documents(chunk))
        assert first == [*plain, tokenizer.eos_token_id]
        for ids in others:
            # Behind a special token sentencepiece's text begins anew, with a space of its own or not.
            for token in (tokenizer.eos_token_id, tokenizer.bos_token_id):
                assert ids.count(token) == first.count(token)
            assert (ids[0], ids[-1]) == (first[0], first[-1])
        assert all(mask == [0] + [1] * (len(ids) - 1) for ids, mask in documents(chunk))


def test_an_end_that_the_tokenizer_adds_is_the_only_one(
    make_recipe: Callable[..., Recipe], made: Made, tokenizer_of: TokenizerOf
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(make_recipe())
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    expected = [*tokenizer_of("demo")("Once upon")["input_ids"], end]
    for ids, mask in documents(made(tokenizer, [{"text": "Once upon"}, {"text": "Once upon<|im_end|>"}], "text")):
        assert (ids, mask) == (expected, [0] + [1] * (len(ids) - 1))
    chunk = made(tokenizer, [{"prompt": "1 + 1 =", "completion": " 2"}], "prompt_completion", chat=False)
    assert trained_runs(chunk, tokenizer) == [[" 2<|im_end|>"]]


@pytest.mark.parametrize("name", MODELS)
def test_a_completion_without_a_chat_template_is_trained_with_the_eos(
    name: str, made: Made, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of(name)
    rows = [{"prompt": "Question: 1 + 1\nAnswer:", "completion": " two, ünï 数"}, {"prompt": "", "completion": "Once"}]
    (ids, mask), (only, only_mask) = documents(made(name, rows, "prompt_completion", chat=False))
    assert ids == [*tokenizer(rows[0]["prompt"] + rows[0]["completion"])["input_ids"], tokenizer.eos_token_id]
    prompt = len(tokenizer(rows[0]["prompt"])["input_ids"])
    assert mask == [0] * prompt + [1] * (len(ids) - prompt)
    assert only == [*tokenizer("Once")["input_ids"], tokenizer.eos_token_id]
    assert only_mask == [0] + [1] * (len(only) - 1)


def test_a_token_that_reaches_from_the_prompt_into_the_completion_is_trained(
    made: Made, tokenizer_of: TokenizerOf
) -> None:
    row = {"prompt": "I like unb", "completion": "elievable"}
    chunk = made("gpt2", [row], "prompt_completion", chat=False)
    assert trained_runs(chunk, tokenizer_of("gpt2"))[0][0].endswith("elievable<|endoftext|>")
    assert documents(chunk)[0][0][:-1] == tokenizer_of("gpt2")("I like unbelievable")["input_ids"]


def test_tokens_are_trained_as_their_labels_say(made: Made) -> None:
    rows = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, IGNORED]},
        {"input_ids": [0, 540], "labels": None},
    ]
    chunk = made("demo", rows, "tokens")
    assert documents(chunk) == [([5, 6, 7], [0, 1, 1]), ([5, 6, 7], [0, 1, 0]), ([0, 540], [0, 1])]
    assert chunk.findings.counts == {("no_end", 3): 3}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [5, -1]}, "input_ids holds -1, and the tokenizer has 541 tokens"),
        ({"input_ids": [541, 5]}, "input_ids holds 541, and the tokenizer has 541 tokens"),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, IGNORED]}, "labels differ from input_ids .*; give them unshifted"),
        ({"input_ids": [5, 6], "labels": [IGNORED, 2**70]}, "labels differ from input_ids"),
    ],
)
def test_tokens_that_are_none_of_the_tokenizers_are_a_bad_row(row: dict[str, Any], told: str, made: Made) -> None:
    number, reason = error_of(lambda: made("demo", [{"input_ids": [5, 6]}, row], "tokens"))
    assert number == 2
    assert re.match(told, reason)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (talk("a", "b", tools="{"), "`tools` is not JSON"),
        (BadRow("line 3 is no JSON"), "line 3 is no JSON"),
        (talk("a \ud83d b", "c"), ""),
    ],
)
def test_a_bad_row_stops_the_run_with_its_number_or_is_counted(row: Any, told: str, made: Made) -> None:
    rows = [talk("a", "b"), row, talk("c", "d")]
    number, reason = error_of(lambda: made("demo", rows))
    assert number == 2
    assert told in reason
    chunk = made("demo", rows, on_bad_row="drop")
    assert chunk.documents["row"].tolist() == [1, 3]
    assert (chunk.counts.rows_in, chunk.counts.dropped_rows) == (3, {"bad_row": 1})
    assert chunk.findings.rows["bad_row", 3] == [2]


def test_a_finding_may_be_refused(made: Made) -> None:
    rows = [talk("a", "b"), talk("{{name}}", "c"), talk("d", "e")]
    assert made("demo", rows).findings.rows == {("placeholder", 3): [2]}
    row, reason = error_of(lambda: made("demo", rows, refuse='["placeholder"]'))
    assert row == 2
    assert reason == "a placeholder that was never filled in, such as {{name}} (data.refuse: placeholder)"
    chunk = made("demo", rows, refuse='["placeholder", "end_token"]', on_bad_row="drop")
    assert chunk.findings.rows == {("placeholder", 3): [2], ("bad_row", 3): [2]}
    assert len(made("demo", rows, refuse='["end_token"]').documents) == 3


def test_a_digest_is_of_tokens_and_of_nothing_else(made: Made) -> None:
    first, second, third = made("demo", [talk("Hi", "Hello"), talk("Hi", "Hello!"), talk("Ho", "Hello")]).documents
    (same,) = made("demo", [{"prompt": "Hi", "completion": "Hello"}], "prompt_completion").documents
    (all_trained,) = made("demo", [talk("Hi", "Hello")], loss_on="all").documents
    # Not of the labels: a row that is held out is not to be trained under another mask.
    assert first["digest"] == same["digest"] == all_trained["digest"]
    assert len({int(one["digest"]) for one in (first, second, third)}) == 3
    assert first["answer"] == third["answer"] != second["answer"]
