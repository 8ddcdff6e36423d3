from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.findings import check_findings, found_in_row
from sft.data.formats import Conversation, Text, Tokens
from sft.data.prepare import prepare
from sft.data.special_tokens import SpecialTokens
from sft.data.tokenizer import load_tokenizer
from sft.errors import DataError
from sft.hub.model_facts import inspect_model
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
RecipeOf = Callable[..., Recipe]
WriteRows = Callable[..., Path]


@pytest.fixture(scope="session")
def control(make_recipe: MakeRecipe) -> SpecialTokens:
    return SpecialTokens(load_tokenizer(make_recipe()))


def turns(*given: tuple[str, Any], tools: list[Any] | None = None, **last: Any) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in given]
    messages[-1] |= last
    return Conversation(messages, tools, [message["role"] == "assistant" for message in messages])


def asked(question: str, answer: str = "Hello", **last: Any) -> Conversation:
    return turns(("user", question), ("assistant", answer), **last)


def called(**arguments: Any) -> Conversation:
    return asked("Hi", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize(
    "clean",
    [
        asked("Hi"),
        asked("A tag </s>, <b>, {{ 5 }}, { {name} } and <|not_a_token|>"),
        turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")),
        turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
        called(a="x", b=[1, None, {"c": "y"}]),
        Text("", "Once upon a time"),
        Text("1 + 1 =", " 2"),
        Tokens([0, 1, 2], [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("escape", [True, False])
def test_a_clean_row_has_no_findings(clean: Any, escape: bool, control: SpecialTokens) -> None:
    assert found_in_row(clean, control, escape) == []


@pytest.mark.parametrize(
    "roles",
    [
        ["assistant"],
        ["user", "assistant", "assistant"],
        ["system", "system", "user", "assistant"],
        ["user", "tool", "assistant"],
        ["user", "assistant", "tool", "assistant"],
    ],
)
def test_roles_out_of_order_are_found(roles: list[str], control: SpecialTokens) -> None:
    assert found_in_row(turns(*((role, "x") for role in roles)), control, True) == ["role_order"]


def test_an_answer_that_closes_with_an_end_token_is_found(control: SpecialTokens) -> None:
    for end in ("<|im_end|>", "<|endoftext|>\n", "<|eot_id|>", "<|im_end|><|endoftext|> "):
        assert found_in_row(asked("Hi", f"Hello{end}"), control, True) == ["end_token"]
        assert found_in_row(Text("Hi", f"Hello{end}"), control, True) == ["end_token"]
    assert found_in_row(asked("Hi<|eot_id|>", "<|eot_id|> Hello</s>"), control, True) == ["rendered"]
    both = asked("Hi", "Hello <|im_start|> there<|im_end|>")
    assert found_in_row(both, control, True) == ["end_token", "special_tokens"]


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize(
    "text", ["é", "naïve", "it’s", "a — b", "Straße", "5 °C", "Привет", "你好", "😀", "żółty", "Γειά"]
)
def test_text_that_was_decoded_wrongly_is_found(text: str, encoding: str, control: SpecialTokens) -> None:
    wrong = text.encode().decode(encoding, "ignore")
    assert found_in_row(asked(wrong), control, True) == ["mojibake"]
    assert found_in_row(Text("Hi", wrong), control, True) == ["mojibake"]


@pytest.mark.parametrize(
    "text",
    [
        "»Spaß« – „MENÜ“, CAFÉ… «É» “NÃO”",
        "Ångström Å’s ‘Ä’ Âge à €5, “café”…",
        "Ελλάδα «α», Привет «мир» — да…",
        "数学 “你好”……",
    ],
)
def test_text_in_any_language_is_decoded_rightly(text: str, control: SpecialTokens) -> None:
    assert found_in_row(asked(text), control, True) == found_in_row(asked("Hi", text), control, True) == []


@pytest.mark.parametrize(
    "text", [r"One\nTwo", r"a\r\nb", r"- a\n- b", r"Caf\u00e9", "&quot;Hi&quot;", "a &amp;lt; b", "it&#39;s"]
)
def test_text_that_was_escaped_twice_is_found(text: str, control: SpecialTokens) -> None:
    assert found_in_row(asked(text), control, True) == ["escaped"]
    assert found_in_row(Text("", text), control, True) == ["escaped"]


@pytest.mark.parametrize(
    "text",
    [
        r"\nabla \neq \theta",
        "print('a\\nb')\nprint('C\\nD')",
        r'{"city": "K\u00f6ln\n"}',
        "R&D, a && b, AT&T; &x",
        r"C:\new\users",
    ],
)
def test_code_formulas_and_json_have_backslashes_of_their_own(text: str, control: SpecialTokens) -> None:
    assert found_in_row(asked(text), control, True) == found_in_row(asked("Hi", text), control, True) == []


LONG = "The train to Oslo leaves at noon from platform nine."


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (asked("<|start_header_id|>user<|end_header_id|>Hi"), "rendered"),
        (asked("[INST] Hi [/INST]"), "rendered"),
        (asked("Do it.\n\n### Response:\n"), "rendered"),
        (Text("", "<|user|>Hi<|assistant|>Hello"), "rendered"),
        (asked("What is the capital?", " What is the capital? Oslo"), "echo"),
        (asked("Hi", "Hello\nUser: And you?\nAssistant: Fine"), "dialogue"),
        (asked("Hi", "nan"), "missing_value"),
    ],
)
def test_a_fault_that_programs_make_of_rows_is_found(row: Any, kind: str, control: SpecialTokens) -> None:
    assert found_in_row(row, control, True) == [kind]


@pytest.mark.parametrize(
    "row",
    [
        asked("Hi", "Hi there, None of us knows"),
        asked("Who is the user: a person?", "### Heading\nA human: you"),
        asked(LONG, f"It says: {LONG}"),
        asked("Hi", "One speaker is the user.\nUser: Hi"),
        Text("", "Context.\nUser: Hi\nAssistant: Hello"),
        turns(("system", "Be brief."), ("user", "Be brief. Hi"), ("assistant", "a")),
        Text("", "[INST] Hi [/INST] Hello"),
        called(note="nan"),
    ],
)
def test_what_only_looks_like_a_fault_is_none(row: Any, control: SpecialTokens) -> None:
    assert found_in_row(row, control, True) == []


def row_of(question: str, answer: str = "Hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def prepared(recipe: Recipe) -> dict[str, dict[str, Any]]:
    return {finding["kind"]: finding for finding in prepare(recipe, inspect_model(recipe)).findings}


def rows_told(found: dict[str, dict[str, Any]], kind: str) -> list[int]:
    return [int(place.rpartition(" ")[2]) for place in found[kind]["rows"]]


PLAIN = [row_of(f"Question {number}", f"Answer {number}") for number in range(40)]


def judged(recipe: Recipe) -> None:
    check_findings(prepare(recipe, inspect_model(recipe)).findings, recipe.data)


@pytest.mark.parametrize(
    ("kind", "bad", "enough"),
    [
        ("placeholder", lambda n: row_of(f"{n} {{{{name}}}}", str(n)), 18),
        ("same_answer", lambda n: row_of(f"x{n}", "Yes"), 18),
        ("duplicate", lambda n: row_of("Question 19", "Answer 19"), 18),
        ("mojibake", lambda n: row_of(f"{n} Ã©"), 2),
    ],
)
def test_what_nearly_all_rows_of_a_source_have_is_refused(
    kind: str, bad: Callable[[int], object], enough: int, recipe_of: RecipeOf
) -> None:
    first = kind == "duplicate"  # which is none
    allowed = "data.allow=[same_answer]" if kind == "duplicate" else "data.allow=[]"
    many, fewer = ([*PLAIN[: 20 - count - first], *map(bad, range(count + first))] for count in (enough, enough - 1))
    with pytest.raises(DataError, match=rf"(?s)rows.jsonl: {enough} of 20 rows: .*{kind}.*data.allow=\[.*{kind}\]"):
        judged(recipe_of(many, allowed))
    judged(recipe_of(many, f"data.allow=[{kind}, same_answer]"))
    judged(recipe_of(fewer, allowed))
    judged(recipe_of(list(map(bad, range(9)))))
    if kind == "duplicate":
        judged(recipe_of(many, allowed, "data.deduplicate=true"))


def test_tokens_that_never_end_are_found(make_recipe: MakeRecipe, write_rows: WriteRows) -> None:
    end = load_tokenizer(make_recipe()).eos_token_id
    rows = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, end]},
        {"input_ids": [5, end, 7], "labels": [-100, end, -100]},
    ]
    found = prepared(make_recipe(f"data.train={write_rows(*rows)}"))
    assert rows_told(found, "no_end") == [1]


def test_a_small_source_is_judged_beside_a_large_one(make_recipe: MakeRecipe, write_rows: WriteRows) -> None:
    good = write_rows(*PLAIN, name="good.jsonl")
    bad = write_rows(*(row_of(f"{n} {{{{name}}}}") for n in range(10)), name="bad.jsonl")
    with pytest.raises(DataError, match=r"bad.jsonl: 10 of 10 rows: .*placeholder"):
        judged(make_recipe(f"data.train=[{{path: {good}}}, {{path: {bad}}}]"))
