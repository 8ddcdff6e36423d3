"""What a row says must stand in what the chat template makes of it."""

from __future__ import annotations

import re

from sft.turns import Message


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
    at = 0
    flat: str | None = None  # the text without white space, once that is needed
    for message, keep in zip(messages, trained, strict=True):
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
