"""Looks at the rows of a dataset: which format they are, which columns hold prompt and answer, who speaks in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
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

MOST_ROWS = 20_000
"""Rows that are read and tokenized, from the first on."""

_GUESSED = "guessed"

_HEAD = 200
"""Rows that columns and roles are recognized from."""

_QUESTIONS = (
    "prompt question query instruction input source src user human request task review sentence text document article message utterance "
    "tweet_text pregunta entrada frage eingabe domanda pergunta вопрос 问题 输入 质問 質問 질문"
).split()
_ANSWERS = (
    "completion answer response output reply target tgt assistant bot expected solution summary translation label category class "
    "sentiment intent respuesta salida antwort ausgabe risposta resposta réponse reponse ответ 回答 答案 输出 答え 답변"
).split()
_CONTEXTS = "context passage background contexto kontext contexte".split()
_CONVERSATIONS = "messages conversations conversation dialogue dialog chat turns history".split()
"""Names that columns have elsewhere, the most telling first."""

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
    numbered = list(islice(open_source(streamed, output_dir).rows, MOST_ROWS + 1))
    good = [row for _, row in numbered[:_HEAD] if not isinstance(row, BadRow)]
    if not good:
        bad = next((row.reason for _, row in numbered if isinstance(row, BadRow)), None)
        raise DataError(f"{data} holds no rows{f' that can be read: {bad}' if bad else ''}.")
    columns, reason = (columns, "as given") if columns is not None else _recognized(good, data)
    source = source.model_copy(update={"columns": columns})
    format = row_format(good, source)
    _check_roles(good, format, columns, data)
    return Rows(source, format, numbered[:MOST_ROWS], len(numbered) <= MOST_ROWS, reason)


def _recognized(rows: Sequence[Row], data: str) -> tuple[dict[str, str], str]:
    """Columns to rename, ours to theirs, and how they were recognized; none where the rows are of a known format.

    Raises:
        DataError: No column is known, or what holds the answer is not clear.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    known: DataError | None = None
    try:
        format = row_format(rows, Source(path=data))
        if format != "text" or _named(_ANSWERS, [name for name in names if name != "text"]) is None:
            return {}, "by its columns"
    except DataError as error:
        known = error
    if known is not None and {"chosen", "rejected"} <= set(names):
        raise known
    chat = _named(_CONVERSATIONS, [name for name in names if _is_conversation(rows, name)])
    if chat is not None:
        return {"messages": chat}, f"`{chat}` holds lists of messages"
    texts = [name for name in names if _is_text(rows, name)]
    question, answer = _named(_QUESTIONS, texts), _named(_ANSWERS, names)
    if question is not None and answer == question:
        answer = _named(_ANSWERS, [name for name in names if name != question])
    if question is not None and answer is not None:
        context = _named([*_CONTEXTS, "input"], [name for name in texts if name not in (question, answer)])
        if context is not None:
            return {"instruction": question, "input": context, "output": answer}, "by the names of its columns"
        return {"prompt": question, "completion": answer}, "by the names of its columns"
    if len(names) == 2 and len(texts) == 2:
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


def _named(known: Sequence[str], names: Sequence[str]) -> str | None:
    """The column whose name is the most telling, in any case and with any separators.

    >>> _named(["question", "input"], ["ID", "The Question"])
    'The Question'
    """
    simple = {name: re.sub(r"\W+", "_", name.strip().lower()) for name in names}
    for word in known:
        for name, plain in simple.items():
            if plain == word:
                return name
    for word in known:
        for name, plain in simple.items():
            if len(word) > 3 and word in plain.split("_"):
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
