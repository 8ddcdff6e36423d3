"""Holds rows out and makes a task of lm_eval from them: which answer the model finds likeliest to a question it has not seen."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from sft.data.formats import Conversation, Text, renamed, to_example
from sft.data.readers import Row
from sft.init.draft import Draft
from sft.init.rows import Rows
from sft.recipe.schema import Data

MOST = 200
"""Rows of the eval split: with so many, a score near one half has a 95% interval of about 0.07 to each side."""

_FEWEST, _FEWEST_QUESTIONS = 20, 10
_LABELS, _CHOICES = 20, 4
"""Distinct answers that are all offered for each question; else how many are."""

EVAL_SPLIT = "eval_split.jsonl"


class Pair(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str
    system: str


class OwnTask(NamedTuple):
    """A task over the held-out rows."""

    name: str
    metric: str
    questions: list[dict[str, Any]]


def hold_out(draft: Draft, rows: Rows, folder: Path) -> list[Row]:
    """Draw the rows of the eval split, at most a tenth or 20; none if the user has chosen one, or of too few rows."""
    distinct = list({json.dumps(row, sort_keys=True, default=str): row for row in rows.good}.values())
    if draft.has("data.held_out") or len(distinct) < _FEWEST:
        return []
    count = min(MOST, max(len(distinct) // 10, min(20, len(distinct) // 5)))
    held_out = rows.source.model_copy(update={"path": str(folder / EVAL_SPLIT)})
    draft.put("data.held_out", as_written(held_out), f"{count} rows of {rows.source.path}; training leaves them out")
    return random.Random(draft.recipe().data.seed).sample(distinct, count)


def as_written(source: Any) -> Any:
    """A source as a recipe says it: its path, unless there is more to say."""
    stated = source.model_dump(mode="json", exclude_defaults=True)
    return stated["path"] if len(stated) == 1 else [stated]


def put_task(draft: Draft, held_out: Sequence[Row], rows: Rows, folder: Path) -> OwnTask | None:
    """Make a task of the held-out rows and put it into the recipe; None where there is none, or the user has chosen tasks."""
    if draft.has("eval.tasks", "eval.suite"):
        return None
    data = draft.recipe().data
    asked, every = _pairs(held_out, rows, data), _pairs(rows.good, rows, data)
    answers = sorted({pair.answer for pair in every})
    if len(asked) < _FEWEST_QUESTIONS or len(answers) < 2:
        reason = f"no task of its own: {len(asked)} held-out rows begin with a question and a text as answer"
        draft.put("eval.tasks", [], f"{reason}, {len(answers)} answers differ; the eval loss measures the others")
        return None
    name = re.sub("[^a-z0-9]+", "_", folder.name.lower())
    task = OwnTask(name, "acc" if len(answers) <= _LABELS else "acc_norm", _questions(asked, answers, data.seed))
    which = f"{len(answers)} in the data" if len(answers) <= _LABELS else f"{_CHOICES}, three of them of other rows,"
    draft.put(
        "eval.tasks",
        [str(folder / f"{name}.yaml")],
        f"a task of its own, {len(asked)} held-out questions: which answer of the {which} the model finds likeliest. Add tasks of lm_eval, "
        "such as ifeval, to see what the model forgets",
    )
    systems = {pair.system for pair in every}
    if len(systems) == 1 and "" not in systems and draft.recipe().eval.apply_chat_template:
        draft.put("eval.system_instruction", systems.pop(), "the system message of all rows")
    return task


def _questions(asked: Sequence[Pair], answers: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Each question with all answers if there are few, else with its own and three others in random order."""
    generator, questions = random.Random(seed), []
    for pair in asked:
        choices = list(answers)
        if len(answers) > _LABELS:
            others = [answer for answer in answers if answer != pair.answer]
            choices = [pair.answer, *generator.sample(others, _CHOICES - 1)]
            generator.shuffle(choices)
        questions.append({"question": pair.question, "choices": choices, "gold": choices.index(pair.answer)})
    return questions


def _pairs(rows: Sequence[Row], read: Rows, data: Data) -> list[Pair]:
    """The first question and its answer of each row that begins so."""
    found = []
    for row in rows:
        try:
            example = to_example(renamed(row, read.source), read.format, data, read.source)
        except (ValueError, TypeError, AttributeError):
            continue
        if isinstance(example, Text):
            found.append(Pair(example.prompt, example.completion.strip(), ""))
        elif isinstance(example, Conversation) and not example.tools:
            found += _first_turns(example.messages)
    # A question with its answer must fit into the model: one token has two characters or more.
    return [pair for pair in found if pair.question and pair.answer and sum(map(len, pair)) <= 2 * data.max_length]


def _first_turns(messages: Sequence[dict[str, Any]]) -> list[Pair]:
    system = messages[0]["content"].strip() if messages and messages[0]["role"] == "system" else ""
    first = [message for message in messages if message["role"] != "system"][:2]
    if [message["role"] for message in first] != ["user", "assistant"]:
        return []
    question, answer = (message["content"].strip() for message in first)
    has_more = first[1].get("tool_calls") or first[1].get("reasoning_content") or "<think>" in answer
    return [] if has_more else [Pair(question, answer, system)]


def write_task(folder: Path, task: OwnTask) -> None:
    """Write the task's file and its questions; as parquet, since `datasets` reads texts such as 2024-01-02 in JSON as dates."""
    questions = folder / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(task.questions), questions)
    config = {
        "task": task.name,
        "dataset_path": "parquet",
        # lm_eval knows no paths that are relative to the task's file.
        "dataset_kwargs": {"data_files": {"test": str(questions.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": task.metric, "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()]
    (folder / f"{task.name}.yaml").write_text("\n".join(["# Written by `sft init`.", *lines, ""]), encoding="utf-8")


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL."""
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
