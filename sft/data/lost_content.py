"""What a row says must stand in what the chat template makes of it."""

from __future__ import annotations

import re
from contextlib import suppress

from sft.data.turns import Message


def check_nothing_is_lost(messages: list[Message], trained: list[bool], text: str) -> None:
    """See that all that is said stands in the text, in its order, white space aside.

    Some templates leave out a second system message, what is said beside a tool call, or thoughts of earlier turns. Those of a
    turn that is not trained may be left out: so it is when the model answers.

    Args:
        messages: As they were rendered.
        trained: Whether a turn is trained, for each.
        text: What the template made of them.

    Raises:
        ValueError: Something is not there; the text says what.
    """
    order = list(zip(messages, trained, strict=True))
    try:
        _find_all(order, text)
    except ValueError:
        # Mistral's templates write the system message into the last question.
        system = [pair for pair in order if pair[0]["role"] == "system"]
        last = max((index for index, (message, _) in enumerate(order) if message["role"] == "user"), default=0)
        moved = [pair for pair in order[:last] if pair not in system] + system + order[last:]
        if len(moved) != len(order) or moved == order:
            raise
        with suppress(ValueError):
            return _find_all(moved, text)
        raise


def _find_all(said_by: list[tuple[Message, bool]], text: str) -> None:
    at = 0
    flat: str | None = None  # the text without white space, once that is needed
    for message, keep in said_by:
        if message["role"] == "tool":
            continue  # some templates write it as JSON
        for said in _pieces(message, keep):
            found = text.find(said, at) if flat is None else -1
            if found >= 0:
                at = found + len(said)
                continue
            if flat is None:
                flat, at = "".join(text.split()), len("".join(text[:at].split()))
            piece = "".join(said.split())
            found = flat.find(piece, at)
            if found < 0:
                raise ValueError(
                    f"the chat template leaves out what the {message['role']} says: {said[:60]!r}. Set model.chat_template to one that "
                    "shows it; thoughts are left out by data.reasoning=drop, and those of earlier turns by data.loss_on=last_assistant"
                )
            at = found + len(piece)


def _pieces(message: Message, trained: bool) -> list[str]:
    """What a message says, in the order in which templates write it: thoughts first."""
    pieces = [message["reasoning_content"]] if trained and "reasoning_content" in message else []
    content = re.split("</?think>", message["content"]) if "think>" in message["content"] else [message["content"]]
    pieces += content if trained else content[-1:]
    return [piece.strip() for piece in pieces if piece.strip()]
