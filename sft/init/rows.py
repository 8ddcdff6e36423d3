"""Looks at the rows of a dataset: which format they are, which columns hold prompt and answer, who speaks in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sft.data.conversation import ROLES, TEXT_KEYS
from sft.data.formats import row_format
from sft.data.readers import BadRow, Row
from sft.data.sources import open_source
from sft.errors import DataError
from sft.hub.names import is_on_hub
from sft.recipe.schema import Source

MOST_ROWS, _MOST_CHARACTERS = 20_000, 40_000_000
"""What is read and tokenized, from the first row on."""

_GUESSED = "guessed"

_HEAD = 200
"""Rows that columns and roles are recognized from."""

_QUESTIONS = (
    "prompt question query instruction input source src user human request task review sentence text document article message utterance "
    "tweet comment email post title pregunta entrada frage eingabe domanda pergunta вопрос 问题 输入 质問 質問 질문"
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

_SPEAKERS = {
    "user": "usuario usuária usuário benutzer nutzer utilisateur utente пользователь 用户 使用者 ユーザー 사용자 customer client "
    "question q prompter speaker1 student".split(),
    "assistant": "asistente assistent assistente ассистент помощник 助手 アシスタント 도우미 ai agent answer a llm speaker2 tutor "
    "respuesta".split(),
    "system": "sistema système система 系统 システム 시스템 instructions context".split(),
}
"""Role names that rows may not have, and the role that each most likely is."""


@dataclass(frozen=True)
class Rows:
    """The rows that were read, and how they are to be read."""

    source: Source
    format: str
    numbered: list[tuple[int, Row | BadRow]]
    is_all: bool
    """Whether that is all there are."""

    reason: str
    """How the columns were recognized."""

    @property
    def is_guessed(self) -> bool:
        """Whether a person should look at it."""
        return self.reason.startswith(_GUESSED)

    @property
    def good(self) -> list[Row]:
        """The rows that can be read."""
        return [row for _, row in self.numbered if not isinstance(row, BadRow)]


def read_sample(source: Source, columns: Mapping[Any, str] | None, output_dir: str) -> Rows:
    """Read a dataset's first rows, and recognize its format.

    Args:
        source: A file, folder, pattern or hub id.
        columns: Renamed columns, ours to theirs; None: recognized by their names.
        output_dir: Where `builtin:demo` is made.

    Raises:
        DataError: It cannot be read, or nothing in it can be trained on as it is.
    """
    data = source.path
    streamed = source.model_copy(update={"streaming": is_on_hub(source)})
    stream = open_source(streamed, output_dir).rows
    numbered = list(_first(stream))
    good = [row for _, row in numbered[:_HEAD] if not isinstance(row, BadRow)]
    if not good:
        bad = next((row.reason for _, row in numbered if isinstance(row, BadRow)), None)
        raise DataError(f"{data} holds no rows{f' that can be read: {bad}' if bad else ''}.")
    columns, reason = (columns, "as given") if columns is not None else _recognized(good, data)
    source = source.model_copy(update={"columns": columns})
    format = row_format(good, source)
    _check_roles(good, format, columns, data)
    return Rows(source, format, numbered, next(stream, None) is None, reason)


def _first(stream: Iterator[tuple[int, Row | BadRow]]) -> Iterator[tuple[int, Row | BadRow]]:
    characters = 0
    for numbered in islice(stream, MOST_ROWS):
        yield numbered
        characters += len(str(numbered[1]))
        if characters > _MOST_CHARACTERS:
            return


def _recognized(rows: Sequence[Row], data: str) -> tuple[dict[str, str], str]:
    """Columns to rename, ours to theirs, and how they were recognized; none where the rows are of a known format.

    Raises:
        DataError: No column is known, or what holds the answer is not clear.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = [name for name in names if _is_text(rows, name)]
    try:
        format = row_format(rows, Source(path=data))
    except DataError:
        if {"chosen", "rejected"} <= set(names):
            raise
        return _by_name(rows, names, texts, data)
    if format == "text" and (answer := _named(_ANSWERS, [name for name in names if name != "text"])):
        if answer in texts:
            return {"prompt": "text", "completion": answer}, f"{_GUESSED}, since `{answer}` stands beside `text`"
        raise DataError(
            f"{data}: is `text` to be trained as it is (--columns text=text), or is `{answer}` the answer to it? That holds numbers: add a "
            "column that says in words what they mean, and name it: --columns prompt=text,completion=NAME."
        )
    beside: dict[str, str] = {}
    if format in ("alpaca", "prompt_completion"):
        beside = _beside(names, texts, _CONTEXTS if format == "alpaca" and "input" not in names else [])
    return beside, "by its columns"


def _by_name(rows: Sequence[Row], names: list[str], texts: list[str], data: str) -> tuple[dict[str, str], str]:
    how = "by the names of its columns"
    chat = _named(_CONVERSATIONS, [name for name in names if _is_conversation(rows, name)])
    if chat is not None:
        return {"messages": chat}, how
    answer = _named(_ANSWERS, texts)
    question = _named([*_QUESTIONS, *_CONTEXTS], [name for name in texts if name != answer])
    if question is not None and answer is not None:
        beside = _beside(names, [name for name in texts if name not in (question, answer)], [*_CONTEXTS, "input"])
        if "input" in beside:
            return {"instruction": question, "output": answer} | beside, how
        return {"prompt": question, "completion": answer} | beside, how
    if len(names) == len(texts) == 2:
        if any(len(name) > 40 or name.rstrip().endswith((".", "?", "!")) for name in names):
            raise DataError(
                f"{data}: its first line reads like a row and not like the names of columns: {names}. Write a line above it: "
                "prompt,completion."
            )
        return {"prompt": names[0], "completion": names[1]}, f"{_GUESSED} from the order of the columns"
    raise DataError(
        f"{data}: it is not clear which columns hold the prompt and the answer. Found: {', '.join(names[:20])}. Name them: "
        "--columns prompt=NAME,completion=NAME (or instruction=, input=, output=; messages=; text=)."
    )


def _beside(names: list[str], texts: list[str], contexts: Sequence[str]) -> dict[str, str]:
    """What a question may come with: a context, and a system message."""
    found = {"input": _named(contexts, texts), "system": None if "system" in names else _named(_SYSTEMS, texts)}
    return {ours: theirs for ours, theirs in found.items() if theirs is not None}


def _named(known: Sequence[str], names: Sequence[str]) -> str | None:
    """The column whose name is the most telling, in any case and with any separators.

    >>> _named(["question", "input"], ["question_id", "The Question"])
    'The Question'
    """
    words = {name: re.sub(r"\W+|_", " ", name.lower()).split() for name in names}
    for one in known:
        for name, parts in words.items():
            if parts == one.split("_"):
                return name
    for one in known:
        for name, parts in words.items():
            if len(one) > 3 and one in parts and parts[-1] not in _ABOUT:
                return name
    return None


def _is_text(rows: Sequence[Row], name: str) -> bool:
    values = [row[name] for row in rows if row.get(name) not in (None, "")]
    return bool(values) and all(isinstance(value, str) for value in values)


def _is_conversation(rows: Sequence[Row], name: str) -> bool:
    first = next((row[name] for row in rows if row.get(name)), None)
    return isinstance(first, list) and isinstance(first[0], dict) and any(key in first[0] for key in TEXT_KEYS)


def _check_roles(rows: Sequence[Row], format: str, columns: Mapping[Any, str], data: str) -> None:
    """Refuse role names that nothing here knows, all at once, each with what it most likely means."""
    if format not in ("messages", "sharegpt"):
        return
    ours = "messages" if format == "messages" else "conversations"
    column = columns.get(ours, ours)
    found = Counter(_roles(row.get(column) for row in rows))
    unknown = {role: count for role, count in found.items() if role.lower() not in ROLES}
    if not unknown:
        return
    likely = {
        role: next((ours for ours, words in _SPEAKERS.items() if role.lower() in words), None) for role in unknown
    }
    renamed = [
        f"{role} ({count}){f', most likely {likely[role]}' if likely[role] else ''}" for role, count in unknown.items()
    ]
    raise DataError(
        f"{data}: its messages have roles that are not known: {'; '.join(renamed)}. Rename them in the data to user, assistant, system or "
        f"tool; also known: {', '.join(sorted(set(ROLES) - set(ROLES.values())))}."
    )


def _roles(conversations: Any) -> list[str]:
    messages = [
        message for turns in conversations if isinstance(turns, list) for message in turns if isinstance(message, dict)
    ]
    return [str(message[key]) for message in messages for key in TEXT_KEYS if message.get(key) is not None]
