"""`sft init`: a file of any kind becomes a recipe that starts, or one message."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
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
        ("a.csv", csv("left,right", QUESTIONS), {"prompt": "left", "completion": "right"}),
        ("a.json", json.dumps([{"context": "A map.", "question": q, "answer": a} for q, a in QUESTIONS]),
         {"instruction": "question", "input": "context", "output": "answer"}),
        ("a.jsonl", jsonl([{"instruction": q, "input": "", "output": a} for q, a in QUESTIONS]), {}),
        ("a.jsonl", jsonl([{"instruction": q, "context": "A map.", "response": a, "category": "x"} for q, a in QUESTIONS]),
         {"input": "context"}),
        ("a.jsonl", jsonl([{"id": q, "system_prompt": "Hi.", "question": q, "response": a} for q, a in QUESTIONS]),
         {"prompt": "question", "completion": "response", "system": "system_prompt"}),
        ("a.csv", csv("prompt_id,instruction_text,answer_text", [("x", *pair) for pair in QUESTIONS]),
         {"prompt": "instruction_text", "completion": "answer_text"}),
        ("a.jsonl", jsonl([{"dialog": chat(q, a)["messages"]} for q, a in QUESTIONS]), {"messages": "dialog"}),
    ],
)  # fmt: skip
def test_the_columns_are_found(init: Init, name: str, content: str, columns: dict[str, str]) -> None:
    recipe = init(name, content)
    assert recipe.sources[0].columns == columns
    assert recipe.held_out_sources[0].columns == columns


def test_parquet_is_read(init: Init, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([chat(*pair) for pair in QUESTIONS]), tmp_path / "a.parquet")
    assert init("a.parquet").data.train == "a.parquet"


def test_a_label_beside_a_text_is_the_answer_and_the_task_chooses_among_the_labels(init: Init) -> None:
    rows = [(f"Review {number}", ("good", "bad")[number % 2]) for number in range(60)]
    recipe = init("a.csv", csv("text,label", rows))
    assert recipe.sources[0].columns == {"prompt": "text", "completion": "label"}
    config, documents = task()
    assert (config["output_type"], documents[0]["choices"]) == ("multiple_choice", ["bad", "good"])
    assert all(dict(rows)[one["question"]] == one["choices"][one["gold"]] for one in documents)


def test_short_answers_are_compared_as_they_are(init: Init) -> None:
    init("a.csv", csv("question,answer", QUESTIONS))
    config, documents = task()
    assert config["metric_list"][0]["metric"] == "exact_match"
    assert all((one["question"], one["answer"]) in QUESTIONS for one in documents)


def test_dates_stay_texts(init: Init) -> None:
    rows = [(f"When was meeting {number}?", f"2024-01-{number % 28 + 1:02}") for number in range(60)]
    init("a.csv", csv("question,answer", rows))
    assert all(dict(rows)[one["question"]] == one["answer"] for one in task()[1])


def test_long_answers_are_chosen_among_those_of_other_rows(init: Init) -> None:
    rows = [(question, f"{answer} is far away. " * 4) for question, answer in QUESTIONS]
    init("a.jsonl", jsonl([chat(*row) for row in rows]))
    _, documents = task()
    answers = {question: answer.strip() for question, answer in rows}
    assert {len(set(one["choices"])) for one in documents} == {4}
    assert all(answers[one["question"]] == one["choices"][one["gold"]] for one in documents)
    assert len({one["gold"] for one in documents}) > 1


def test_plain_text_is_measured_in_bits_per_byte(init: Init) -> None:
    recipe = init("a.jsonl", jsonl([{"text": f"Once upon a time there were {n} boats."} for n in range(60)]))
    assert task()[0]["output_type"] == "loglikelihood_rolling"
    assert recipe.eval.tasks


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


def test_a_folder_with_a_validation_file_brings_its_own_split(init: Init, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "validation.csv").write_text(csv("prompt,completion", QUESTIONS[:12]))
    (tmp_path / "d" / "train.csv").write_text(csv("prompt,completion", QUESTIONS[12:]))
    recipe = init("d")
    assert recipe.held_out_sources[0].split == "validation"
    assert {one["question"] for one in task()[1]} == {question for question, _ in QUESTIONS[:12]}


@pytest.mark.parametrize("count", [1, 2, 19])
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


def test_a_guess_is_said(init: Init, capsys: pytest.CaptureFixture[str]) -> None:
    init("a.csv", csv("left,right", QUESTIONS))
    assert "Check data.train: format prompt_completion, guessed" in capsys.readouterr().out


# The tokenizer


def test_a_tokenizer_without_template_and_padding_gets_both(init: Init, demo: Demo, tmp_path: Path) -> None:
    model = shutil.copytree(demo.model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["pad_token"] = None
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    recipe = init("a.csv", csv("prompt,completion", QUESTIONS), model=str(model))
    assert (recipe.model.chat_template, recipe.model.pad_token) == ("chatml", "<|endoftext|>")


def test_a_template_that_shows_only_the_last_turns_reasoning_trains_the_last_turn(
    init: Init, demo: Demo, tmp_path: Path
) -> None:
    model = shutil.copytree(demo.model, tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    thinks = "{% generation %}{% if loop.last and message['reasoning_content'] %}{{ message['reasoning_content'] }}{% endif %}"
    (model / "chat_template.jinja").write_text(template.replace("{% generation %}", thinks))
    turns = [[*chat("Hi", "Hello")["messages"], *chat(*pair)["messages"]] for pair in QUESTIONS]
    thought = [
        [turn | ({"reasoning_content": "Hm."} if at % 2 else {}) for at, turn in enumerate(row)] for row in turns
    ]
    recipe = init("a.jsonl", jsonl([{"messages": row} for row in thought]), model=str(model))
    assert (recipe.model.chat_template, recipe.data.loss_on) == (None, "last_assistant")


def test_a_template_that_renders_no_row_is_not_replaced_in_silence(init: Init, demo: Demo, tmp_path: Path) -> None:
    model = shutil.copytree(demo.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
        + (model / "chat_template.jinja").read_text()
    )
    content = jsonl([chat(*pair, {"role": "system", "content": "Be brief."}) for pair in QUESTIONS])
    with pytest.raises(UserError, match=r"row 1.*No system.*model\.chat_template=plain"):
        init("a.jsonl", content, model=str(model))
    assert init("a.jsonl", content, "model.chat_template=chatml", model=str(model)).model.chat_template == "chatml"


def test_rows_that_are_too_long_are_cut_and_those_whose_answer_is_far_behind_split(init: Init) -> None:
    long = "a word " * 900
    rows = [{"prompt": f"{number}?", "completion": f"{long}{number}"} for number in range(30)]
    recipe = init("a.jsonl", jsonl(rows))
    assert (recipe.data.max_length, recipe.data.overlong) == (1024, "truncate")
    rows = [{"prompt": f"{number}? {long}", "completion": f"Yes {number}."} for number in range(30)]
    assert init("b.jsonl", jsonl(rows), output=Path("b.yaml")).data.overlong == "split"


def test_a_few_bad_rows_are_left_out_and_named(init: Init) -> None:
    recipe = init("a.jsonl", jsonl([chat(*pair) for pair in QUESTIONS]) + "{broken\n")
    assert recipe.data.on_bad_row == "drop"
    assert "1 of 61 rows cannot be used (the first: row 61: line 61 is not JSON" in Path("recipe.yaml").read_text()


# What is missing


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "", ["holds no rows"]),
        ("a.csv", "prompt,completion\n", ["holds no rows"]),
        ("a.csv", 'prompt,completion\n"a,b\nc,d\n', ["cannot be read as csv", "quote"]),
        ("a.csv", "prompt,prompt\na,b\n", ["more than one column prompt"]),
        ("a.csv", ",prompt,completion\n0,a,b\n", ["column 1", "no name"]),
        ("a.csv", "What is 2+2?,It is four.\nWhy?,Because.\n", ["reads like a row", "prompt,completion"]),
        ("a.csv", "In which city does the tower of Eiffel stand,Paris it is of course\nAnd Big Ben,London\n", ["reads like a row"]),
        ("a.jsonl", jsonl([{"text": "x", "label": 1}]), ["--columns text=text", "`label`", "numbers"]),
        ("a.csv", csv("a,b,c", [("x", "y", "z")]), ["Found: a, b, c", "--columns prompt=NAME"]),
        ("a.csv", "prompt,completion\nCaf\xe9,x\n".encode("latin-1"), ["not UTF-8"]),
        ("a.jsonl", b"\x89PNG\r\n\x1a\n\x00\x00", ["a.jsonl"]),
        ("a.xlsx", b"PK\x03\x04", ["not a data file", ".csv"]),
        ("missing.csv", None, ["no file or folder missing.csv"]),
        ("a.jsonl", jsonl([{"chosen": "x", "rejected": "y"}]), ["preference data"]),
        ("a.jsonl", jsonl([chat("Hola", "Buenas", roles=("usuario", "asistente"))] * 3),
         ["usuario (3), most likely user", "asistente (3), most likely assistant"]),
        ("a.jsonl", jsonl([chat(*pair) | {"images": ["a.png"]} for pair in QUESTIONS]), ["60 of its first 60 rows", "images are not"]),
        ("a.jsonl", jsonl([chat("Hi", "Hello")] * 30), ["identical to an earlier one", "data.allow="]),
        ("a.csv", csv("text,label", [(q, "yes") for q, _ in QUESTIONS]), ["the same answer", "data.allow=[same_answer]"]),
        ("a.jsonl", jsonl([chat("Hi", "")] * 3), ["none of its 3 rows can be trained", "no answer"]),
        ("a.jsonl", "{\n" * 3, ["holds no rows that can be read", "line 1"]),
        ("a.jsonl", jsonl([{"text": "x", "n": 1}] * 2) + "{broken\n" * 2, ["too many of its 4 rows", "2 x bad row", "line 3"]),
        ("a.jsonl", jsonl([chat(q, f"Dear {{{{name}}}}, {a}") for q, a in QUESTIONS]), ["placeholder", "data.allow=[placeholder]"]),
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


def test_nothing_is_overwritten(init: Init) -> None:
    content = csv("prompt,completion", QUESTIONS)
    init("a.csv", content)
    before = Path("recipe.yaml").read_text()
    with pytest.raises(UserError, match=r"recipe.yaml and recipe_eval exist already"):
        init("a.csv", content)
    assert Path("recipe.yaml").read_text() == before


def test_what_would_not_start_is_not_left_behind(init: Init, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="global_batch_size=3"):
        init("a.csv", csv("prompt,completion", QUESTIONS), "train.global_batch_size=3", gpus="2x80GB")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_the_data_is_the_argument(init: Init) -> None:
    with pytest.raises(UserError, match=r"data\.train: leave it out"):
        init("a.csv", csv("prompt,completion", QUESTIONS), "data.train=b.csv")
