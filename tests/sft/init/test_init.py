"""`sft init`: a file of any kind becomes a recipe that starts, or one message."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from sft.errors import UserError
from sft.hub.demo import Demo
from sft.init.main import main
from sft.recipe.load import load_recipe
from sft.recipe.schema import Recipe

Init = Callable[..., Recipe]

QUESTIONS = [(f"Which city lies {number} miles from here?", f"City number {number}") for number in range(60)]


@pytest.fixture
def init(tmp_path: Path, demo: Demo, monkeypatch: pytest.MonkeyPatch) -> Init:
    """Write a file, and a recipe for it; the recipe that can be read."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, content: str | bytes | None = None, *given: str, **options: Any) -> Recipe:
        if content is not None:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        output = options.setdefault("output", Path("recipe.yaml"))
        main(name, options.pop("model", str(demo.model)), given=given, **options)
        return load_recipe(output)

    return run


def jsonl(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def csv(header: str, rows: Sequence[Sequence[str]], separator: str = ",") -> str:
    return "\n".join([header, *(separator.join(row) for row in rows)]) + "\n"


def task() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task that was written, and its documents."""
    config = yaml.safe_load(Path("recipe_eval/recipe_eval.yaml").read_text())
    data = datasets.load_dataset(config["dataset_path"], **config["dataset_kwargs"], split="test")
    return config, list(data)


def chat(question: str, answer: str, *before: dict[str, str], roles: tuple[str, str] = ("user", "assistant")) -> Any:
    return {"messages": [*before, {"role": roles[0], "content": question}, {"role": roles[1], "content": answer}]}


# What a file becomes


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.csv", csv("question,answer", QUESTIONS), {"prompt": "question", "completion": "answer"}),
        ("a.csv", "\ufeff" + csv("Question;Answer", QUESTIONS, ";"), {"prompt": "Question", "completion": "Answer"}),
        ("a.csv", csv("Frage\tAntwort", QUESTIONS, "\t"), {"prompt": "Frage", "completion": "Antwort"}),
        ("a.csv", csv("prompt,completion", QUESTIONS), {}),
        ("a.csv", csv("id,User Query,bot_reply", [(str(at), *row) for at, row in enumerate(QUESTIONS)]),
         {"prompt": "User Query", "completion": "bot_reply"}),
        ("a.json", json.dumps([{"context": "A map.", "question": q, "answer": a} for q, a in QUESTIONS]),
         {"instruction": "question", "input": "context", "output": "answer"}),
        ("a.jsonl", jsonl([{"instruction": q, "input": "", "output": a} for q, a in QUESTIONS]), {}),
        ("a.jsonl", jsonl([{"instruction": q, "context": "A map.", "response": a, "category": "x"} for q, a in QUESTIONS]),
         {"input": "context"}),
        ("a.jsonl", jsonl([{"id": q, "system_prompt": "Hi.", "question": q, "response": a} for q, a in QUESTIONS]),
         {"prompt": "question", "completion": "response", "system": "system_prompt"}),
        ("a.jsonl", jsonl([{"dialog": chat(q, a)["messages"]} for q, a in QUESTIONS]), {"messages": "dialog"}),
    ],
)  # fmt: skip
def test_the_columns_are_found(init: Init, name: str, content: str, columns: dict[str, str]) -> None:
    recipe = init(name, content)
    assert recipe.sources[0].columns == columns
    assert recipe.held_out_sources[0].columns == columns


def test_a_label_beside_a_text_is_the_answer_and_the_task_chooses_among_the_labels(init: Init) -> None:
    rows = [(f"Review {number}", ("good", "bad")[number % 2]) for number in range(60)]
    recipe = init("a.csv", csv("text,label", rows))
    assert recipe.sources[0].columns == {"prompt": "text", "completion": "label"}
    config, documents = task()
    assert (config["output_type"], documents[0]["choices"]) == ("multiple_choice", ["bad", "good"])
    assert all(dict(rows)[one["question"]] == one["choices"][one["gold"]] for one in documents)


def test_dates_stay_texts(init: Init) -> None:
    rows = [(f"When was meeting {number}?", f"2024-01-{number % 28 + 1:02}") for number in range(60)]
    init("a.csv", csv("question,answer", rows))
    assert all(dict(rows)[one["question"]] == one["choices"][one["gold"]] for one in task()[1])


def test_an_answer_is_chosen_among_those_of_other_rows(init: Init) -> None:
    init("a.jsonl", jsonl([chat(*row) for row in QUESTIONS]))
    _, documents = task()
    answers = dict(QUESTIONS)
    assert {len(set(one["choices"])) for one in documents} == {4}
    assert all(answers[one["question"]] == one["choices"][one["gold"]] for one in documents)
    assert len({one["gold"] for one in documents}) > 1


def test_plain_text_has_no_task(init: Init) -> None:
    recipe = init("a.jsonl", jsonl([{"text": f"Once upon a time there were {n} boats."} for n in range(60)]))
    assert recipe.data.held_out
    assert recipe.eval.tasks == ()


def test_a_system_message_of_all_rows_is_that_of_the_evaluation(init: Init) -> None:
    system = {"role": "system", "content": "Be brief."}
    recipe = init("a.jsonl", jsonl([chat(*pair, system) for pair in QUESTIONS]))
    assert recipe.eval.system_instruction == "Be brief."


# The eval split


def test_rows_of_the_eval_split_are_rows_of_the_data(init: Init) -> None:
    rows = [chat(*pair) for pair in QUESTIONS]
    recipe = init("a.jsonl", jsonl(rows))
    held_out = [json.loads(line) for line in Path(str(recipe.data.held_out)).read_text().splitlines()]
    assert len(held_out) == 12
    assert all(row in rows for row in held_out)


@pytest.mark.parametrize("count", [1, 19])
def test_few_rows_are_all_trained(init: Init, count: int) -> None:
    recipe = init("a.csv", csv("prompt,completion", QUESTIONS[:count]))
    assert (recipe.data.held_out, recipe.eval.tasks) == (None, ())
    assert not Path("recipe_eval").exists()


# What the user has said


def test_a_given_key_holds_and_what_follows_from_it_follows(init: Init) -> None:
    recipe = init("a.csv", csv("prompt,completion", QUESTIONS), "train.num_train_epochs=9", "data.max_length=100")
    assert (recipe.train.num_train_epochs, recipe.data.max_length) == (9, 100)
    assert "x 9 epochs" in Path("recipe.yaml").read_text()


def test_a_given_eval_split_is_not_drawn(init: Init) -> None:
    recipe = init("a.csv", csv("prompt,completion", QUESTIONS), "data.held_out=0.1")
    assert (recipe.data.held_out, recipe.eval.tasks) == (0.1, ())


def test_columns_can_be_named(init: Init) -> None:
    rows = [("x", *pair, "y") for pair in QUESTIONS]
    recipe = init("a.csv", csv("a,b,c,d", rows), columns="prompt=b, completion=c")
    assert recipe.sources[0].columns == {"prompt": "b", "completion": "c"}


# The tokenizer


def test_a_tokenizer_without_template_and_padding_gets_both(init: Init, demo: Demo, tmp_path: Path) -> None:
    model = shutil.copytree(demo.model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["pad_token"] = None
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    recipe = init("a.csv", csv("prompt,completion", QUESTIONS), model=str(model))
    assert (recipe.model.chat_template, recipe.model.pad_token) == ("chatml", "<|endoftext|>")


def test_a_template_that_renders_no_row_is_not_replaced_in_silence(init: Init, demo: Demo, tmp_path: Path) -> None:
    model = shutil.copytree(demo.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
        + (model / "chat_template.jinja").read_text()
    )
    content = jsonl([chat(*pair, {"role": "system", "content": "Be brief."}) for pair in QUESTIONS])
    with pytest.raises(UserError, match=r"(?s)row 1.*No system"):
        init("a.jsonl", content, model=str(model))
    assert init("a.jsonl", content, "model.chat_template=chatml", model=str(model)).model.chat_template == "chatml"


def test_a_few_bad_rows_are_left_out_and_named(init: Init) -> None:
    recipe = init("a.jsonl", jsonl([chat(*pair) for pair in QUESTIONS]) + "{broken\n")
    assert recipe.data.on_bad_row == "drop"
    assert "1 of 61 rows cannot be used (the first: row 61: line 61 is not JSON" in Path("recipe.yaml").read_text()


# What is missing


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "prompt,completion\n", ["holds no rows"]),
        ("a.csv", csv("a,b,c", [("x", "y", "z")]), ["Found: a, b, c", "--columns prompt=NAME"]),
        ("missing.csv", None, ["no file or folder missing.csv"]),
        ("a.jsonl", jsonl([{"chosen": "x", "rejected": "y"}]), ["preference data"]),
        ("a.jsonl", jsonl([chat("Hola", "Buenas", roles=("usuario", "asistente"))] * 3), ["row 1: unknown role 'usuario'"]),
        ("a.csv", csv("text,label", [(q, "yes") for q, _ in QUESTIONS]), ["the same answer", "data.allow=[same_answer]"]),
        ("a.jsonl", jsonl([chat("Hi", "")] * 3), ["all 3 rows were dropped", "no answer"]),
        ("a.jsonl", "{\n" * 3, ["holds no rows that can be read", "line 1"]),
        ("a.jsonl", jsonl([{"text": "x", "n": 1}] * 2) + "{broken\n" * 2, ["2 of 4 rows (50.0%) were dropped", "2 bad row", "line 3"]),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_one_message_and_no_file(
    init: Init, tmp_path: Path, name: str, content: str | bytes | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as raised:
        init(name, content)
    assert not [word for word in [name, *words] if word not in str(raised.value)], str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if content is not None else [])


def test_all_that_is_missing_is_said_at_once(init: Init) -> None:
    Path("there.yaml").touch()
    options = {"model": "./nowhere", "gpus": "80GBx8", "columns": "prompt", "output": Path("there.yaml")}
    with pytest.raises(UserError) as raised:
        init("missing.csv", None, "train.lr=1", **options)
    named = ["there.yaml exists", "--gpus 80GBx8", "train.lr", "--columns prompt:", "missing.csv", "./nowhere"]
    assert not [word for word in named if word not in str(raised.value)], str(raised.value)


def test_what_would_not_start_is_not_left_behind(init: Init, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="global_batch_size=3"):
        init("a.csv", csv("prompt,completion", QUESTIONS), "train.global_batch_size=3", gpus="2x80GB")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
