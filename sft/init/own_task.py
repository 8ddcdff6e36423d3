"""Holds rows out and makes a task of lm_eval from them: what the model was trained for, asked about rows that it has not seen."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from sft.data.conversation import text_of
from sft.data.formats import Conversation, Text, renamed, to_example
from sft.data.readers import Row
from sft.errors import DataError
from sft.init.draft import Draft
from sft.init.rows import Rows, read_sample
from sft.recipe.schema import Data, Recipe, Source

MOST = 200
"""Rows of the eval split: with so many, a score near one half has a 95% interval of about 0.07 to each side."""

_FEWEST, _FEWEST_QUESTIONS = 20, 10
_LABELS, _SHORT, _CHOICES = 20, 80, 4
"""Distinct answers that are labels; characters of an answer that a model can be expected to give exactly; choices of a question."""

EVAL_SPLIT = "eval_split.jsonl"


@dataclass(frozen=True)
class OwnTask:
    """A task over the held-out rows."""

    config: dict[str, Any]
    questions: list[dict[str, Any]]
    reason: str
    """What it measures, for the recipe."""

    system: str | None = None
    """The system message that all rows share."""


@dataclass(frozen=True)
class Pair:
    """A question and its answer."""

    question: str
    answer: str
    system: str = ""

    @property
    def length(self) -> int:
        """Characters of all of it."""
        return len(self.question) + len(self.answer) + len(self.system)


@dataclass(frozen=True)
class EvalSplit:
    """Rows that are held out, and how the recipe says so."""

    reason: str
    drawn: list[Row] = field(default_factory=list)
    """Rows of the training data, which are to be written to a file."""

    source: Source | None = None
    """Where they are, if the data brings them."""

    brought: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Rows to ask about."""
        return self.drawn or self.brought


def eval_split(rows: Rows, draft: Draft, output_dir: str) -> EvalSplit:
    """The eval split: the user's, or what a folder brings, or a tenth of the distinct rows; none of too few rows.

    Raises:
        DataError: The user's cannot be read.
    """
    recipe, source, columns = draft.recipe(), rows.source, rows.source.columns
    if draft.has("data.held_out"):
        theirs = recipe.held_out_sources
        brought = read_sample(theirs[0], theirs[0].columns, output_dir).good[:MOST] if theirs else []
        return EvalSplit("as given", source=theirs[0] if theirs else None, brought=brought)
    for split in ("validation", "test") if Path(source.path).is_dir() else ():
        with suppress(DataError):
            other = source.model_copy(update={"split": split})
            good = read_sample(other, columns, output_dir).good
            return EvalSplit(f"the split `{split}` in {source.path}", source=other, brought=good[:MOST])
    distinct = list({json.dumps(row, sort_keys=True, default=str): row for row in rows.good}.values())
    if len(distinct) < _FEWEST:
        return EvalSplit(f"no eval split and no task of its own: {len(distinct)} rows are too few to hold any out")
    count = min(MOST, max(len(distinct) // 10, min(20, len(distinct) // 5)))
    of = f"{len(rows.good):,} rows" if rows.is_all else f"the first {len(rows.good):,} rows"
    drawn = random.Random(recipe.data.seed).sample(distinct, count)
    return EvalSplit(f"{count} rows, drawn from {of} of {source.path}; training leaves them out", drawn)


def put_task(draft: Draft, split: EvalSplit, rows: Rows, folder: Path) -> OwnTask | None:
    """Make the task and put it into the recipe; None where there is none, or the user has chosen tasks."""
    if draft.has("eval.tasks", "eval.suite"):
        return None
    name = re.sub(r"[^a-z0-9]+", "_", folder.name.lower())
    task = _make(name, split, rows, draft.recipe()) if split.rows else split.reason
    if isinstance(task, str):
        draft.put("eval.tasks", [], task)
        return None
    more = "Add tasks of lm_eval, such as ifeval, to see what the model forgets"
    draft.put("eval.tasks", [str(folder / f"{name}.yaml")], f"{task.reason}. {more}")
    if task.system is not None and draft.recipe().eval.apply_chat_template:
        draft.put("eval.system_instruction", task.system, "the system message of all rows")
    return task


def _make(name: str, split: EvalSplit, rows: Rows, recipe: Recipe) -> OwnTask | str:
    """A task over the held-out rows, or why there is none."""
    data = recipe.data
    if rows.format == "text":
        return _perplexity(name, split, rows)
    if rows.format == "tokens":
        return "no task of its own: tokens have no question and answer"
    # A question with its answer must fit into the model: one token has two characters or more.
    held_out = [pair for pair in pairs(split.rows, rows, data) if pair.length <= 2 * data.max_length]
    every = pairs(rows.good, rows, data)
    if len(held_out) < _FEWEST_QUESTIONS:
        return f"no task of its own: {len(held_out)} held-out rows begin with a question and a text as answer, short enough to compare"
    systems = {pair.system for pair in every}
    system = systems.pop() or None if len(systems) == 1 else None
    answers = Counter(pair.answer for pair in every)
    exact = [
        pair for pair in held_out if "\n" not in pair.answer and (len(pair.answer) <= _SHORT or pair.answer[0] in "{[")
    ]
    if 1 < len(answers) <= _LABELS and len(every) >= 5 * len(answers):
        labels = sorted(answers)
        questions = [
            {"question": pair.question, "choices": labels, "gold": labels.index(pair.answer)}
            for pair in held_out
            if pair.answer in answers
        ]
        config, what = _choice(name, "acc"), f"which of the {len(labels)} answers in the data the model finds likeliest"
    elif len(exact) >= 0.9 * len(held_out):
        questions = [{"question": pair.question, "answer": pair.answer} for pair in exact]
        config, what = _exact(name), "whether the model's answer equals the row's"
    else:
        pool = sorted(answer for answer in answers if len(answer) <= data.max_length)
        if len(pool) < _CHOICES:
            return "no task of its own: the answers are too long or too alike to compare"
        questions = _among_others(held_out, pool, data.seed)
        config, what = (
            _choice(name, "acc", "acc_norm"),
            f"which of {_CHOICES} answers, three of them of other rows, the model finds likeliest",
        )
    return OwnTask(config, questions, f"a task of its own, {len(questions)} held-out questions: {what}", system)


def pairs(rows: Sequence[Row], read: Rows, data: Data) -> list[Pair]:
    """The first question and its answer of each row that begins so."""
    found = []
    for row in rows:
        try:
            example = to_example(renamed(row, read.source), read.format, data, read.source)
        except (ValueError, TypeError, AttributeError):
            continue
        if pair := _pair(example):
            found.append(pair)
    return found


def _pair(example: Any) -> Pair | None:
    if isinstance(example, Text):
        return (
            Pair(example.prompt, example.completion.strip()) if example.prompt and example.completion.strip() else None
        )
    if not isinstance(example, Conversation) or example.tools:
        return None
    messages = example.messages
    system = text_of(messages[0]["content"]).strip() if messages and messages[0]["role"] == "system" else ""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if [message["role"] for message in rest[:2]] != ["user", "assistant"]:
        return None
    question, answer = rest[0]["content"].strip(), rest[1]["content"].strip()
    has_more = rest[1].get("tool_calls") or rest[1].get("reasoning_content") or "<think>" in answer
    return None if has_more or not question or not answer else Pair(question, answer, system)


def _config(name: str, output_type: str, metrics: Sequence[str], **more: Any) -> dict[str, Any]:
    listed = [{"metric": one, "aggregation": "mean", "higher_is_better": True} for one in metrics]
    return {
        "task": name,
        "test_split": "test",
        "output_type": output_type,
        **more,
        "metric_list": listed,
        "metadata": {"version": 1},
    }


def _exact(name: str) -> dict[str, Any]:
    return _config(
        name,
        "generate_until",
        ["exact_match"],
        doc_to_text="question",
        doc_to_target="answer",
        generation_kwargs={"until": ["\n"], "do_sample": False, "max_gen_toks": 128},
        filter_list=[{"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
    )


def _choice(name: str, *metrics: str) -> dict[str, Any]:
    texts = {"doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "gold"}
    return _config(name, "multiple_choice", metrics, **texts)


def _among_others(held_out: Sequence[Pair], pool: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Each question with its answer and three of other rows, in random order."""
    generator, questions = random.Random(seed), []
    for pair in held_out:
        others = [answer for answer in pool if answer != pair.answer]
        choices = [pair.answer, *generator.sample(others, _CHOICES - 1)]
        generator.shuffle(choices)
        questions.append({"question": pair.question, "choices": choices, "gold": choices.index(pair.answer)})
    return questions


def _perplexity(name: str, split: EvalSplit, rows: Rows) -> OwnTask:
    texts = [text_of(renamed(row, rows.source)["text"]) for row in split.rows]
    config = _config(name, "loglikelihood_rolling", [], doc_to_text="", doc_to_target="text")
    config["metric_list"] = [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}]
    return OwnTask(
        config,
        [{"text": text} for text in texts if text.strip()],
        "a task of its own: bits per byte of the held-out texts",
    )


def write_task(folder: Path, task: OwnTask) -> Path:
    """Write the task's file and its questions."""
    name = str(task.config["task"])
    questions, file = folder / "questions.jsonl", folder / f"{name}.yaml"
    write_rows(questions, task.questions)
    if _reads_dates(questions):
        import pyarrow.parquet as pq

        questions.unlink()
        questions = questions.with_suffix(".parquet")
        pq.write_table(pa.Table.from_pylist(task.questions), questions)
    # lm_eval knows no paths that are relative to the task's file.
    places = {"dataset_path": "json" if questions.suffix == ".jsonl" else "parquet"}
    config = task.config | places | {"dataset_kwargs": {"data_files": {"test": str(questions.resolve())}}}
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()]
    file.write_text("\n".join([f"# Written by `sft init`: {task.reason}.", *lines, ""]), encoding="utf-8")
    return file


def _reads_dates(questions: Path) -> bool:
    """Whether `datasets`, which reads JSON by pyarrow, would turn texts such as 2024-01-02 into dates."""
    from pyarrow.json import read_json

    return any(pa.types.is_timestamp(column.type) for column in read_json(questions).columns)


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL."""
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
