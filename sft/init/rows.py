"""Reads the first rows of a dataset, and recognizes which columns hold the prompt and the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sft.data.conversation import TEXT_KEYS
from sft.data.formats import row_format
from sft.data.readers import BadRow, Row
from sft.data.sources import Numbered, open_source
from sft.errors import DataError
from sft.hub.names import is_on_hub
from sft.recipe.schema import Source

MOST_ROWS = 20_000
"""What is read and tokenized, from the first row on."""

_HEAD = 200
"""Rows that columns are recognized from."""

_QUESTIONS = (
    "prompt question query instruction input source src user human request task review sentence text document article message utterance "
    "tweet comment email post title pregunta entrada frage eingabe domanda pergunta вопрос 问题 输入 質問 質問 질문"
).split()
_ANSWERS = (
    "completion answer response output reply target tgt assistant bot expected solution summary highlights translation label category "
    "class sentiment intent respuesta salida antwort ausgabe risposta resposta réponse reponse ответ 回答 答案 输出 答え 답변"
).split()
_CONTEXTS = "context passage background contexto kontext contexte".split()
_SYSTEMS = ["system_prompt", "system", "system_message"]
_CONVERSATIONS = "messages conversations conversation dialogue dialog chat turns history".split()
"""Names that columns have elsewhere, the most telling first."""

_ABOUT = "id ids url uri index idx date time type kind lang language score length tokens count number".split()
"""Last words of names of columns that are about a text and not the text."""


@dataclass(frozen=True)
class Rows:
    """The rows that were read, and how they are to be read."""

    source: Source
    format: str
    numbered: list[Numbered]
    is_all: bool
    """Whether that is all there are."""

    @property
    def good(self) -> list[Row]:
        """The rows that can be read."""
        return [row for _, row in self.numbered if isinstance(row, dict)]


def read_sample(data: str, columns: Mapping[Any, str] | None, output_dir: str) -> Rows:
    """Read a dataset's first rows, and recognize its format.

    Args:
        data: A file, folder, pattern or hub id.
        columns: Renamed columns, ours to theirs; None: recognized by their names.
        output_dir: Where `builtin:demo` is made.

    Raises:
        DataError: It cannot be read, or it is not clear what to train on.
    """
    source = Source(path=data)
    stream = open_source(source.model_copy(update={"streaming": is_on_hub(source)}), output_dir).rows
    numbered = list(islice(stream, MOST_ROWS))
    head = [row for _, row in numbered[:_HEAD]]
    good = [row for row in head if isinstance(row, dict)]
    if not good:
        reason = "".join(f": {row.reason}" for row in head[:1] if isinstance(row, BadRow))
        raise DataError(f"{data} holds no rows that can be read{reason}.")
    source = source.model_copy(update={"columns": _recognized(good, data) if columns is None else columns})
    return Rows(source, row_format(good, source), numbered, next(stream, None) is None)


def _recognized(rows: Sequence[Row], data: str) -> dict[str, str]:
    """Columns to rename, ours to theirs. Raises DataError where none is known to hold the answer."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = [name for name in names if _is_text(rows, name)]
    answer = _named(_ANSWERS, texts)
    try:
        format = row_format(rows, Source(path=data))
        unknown = None
    except DataError as error:
        format, unknown = "", error
    if format in ("messages", "sharegpt", "tokens") or (format == "text" and answer is None):
        return {}
    if not format and (chat := _named(_CONVERSATIONS, [name for name in names if _is_conversation(rows, name)])):
        return {"messages": chat}
    found = {"system": None if "system" in names else _named(_SYSTEMS, texts)}
    context = _named(_CONTEXTS, texts)
    if format == "alpaca":
        found["input"] = None if "input" in names else context
    elif format != "prompt_completion":
        question = _named(_QUESTIONS, [name for name in texts if name not in (answer, context)])
        if question is None:
            question, context = context, None
        if question is None or answer is None:
            raise DataError(f"{unknown} With `sft init`: --columns prompt=NAME,completion=NAME.")
        if context is None:
            found |= {"prompt": question, "completion": answer}
        else:
            found |= {"instruction": question, "input": context, "output": answer}
    return {ours: theirs for ours, theirs in found.items() if theirs is not None and ours != theirs}


def _named(known: Sequence[str], names: Sequence[str]) -> str | None:
    """The column whose name is the most telling, in any case and with any separators.

    >>> _named(["question", "input"], ["question_id", "The Question"])
    'The Question'
    """
    words = {name: re.sub(r"\W+|_", " ", name.lower()).split() for name in names}
    whole = [name for one in known for name in names if words[name] == one.split("_")]
    part = [
        name for one in known if len(one) > 3 for name in names if one in words[name] and words[name][-1] not in _ABOUT
    ]
    return next(iter(whole + part), None)


def _is_text(rows: Sequence[Row], name: str) -> bool:
    values = [row[name] for row in rows if row.get(name) not in (None, "")]
    return bool(values) and all(isinstance(value, str) for value in values)


def _is_conversation(rows: Sequence[Row], name: str) -> bool:
    first = next((row[name] for row in rows if row.get(name)), None)
    return isinstance(first, list) and isinstance(first[0], dict) and any(key in first[0] for key in TEXT_KEYS)
