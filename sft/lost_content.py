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
    at, flat = 0, ""
    for message, keep in zip(messages, trained, strict=True):
        if message["role"] == "tool":
            continue  # some templates write it as JSON
        contents = [message["content"]]
        if "think>" in message["content"]:
            contents = re.split("</?think>", message["content"])
            contents = contents if keep else contents[-1:]
        contents += [message["reasoning_content"]] if keep and "reasoning_content" in message else []
        start = at
        for content in contents:
            found = text.find(content.strip(), start) if not flat else -1
            if found < 0:
                if not flat:  # from here on, compared without white space
                    flat, start = "".join(text.split()), len("".join(text[:start].split()))
                    at = len("".join(text[:at].split()))
                piece = "".join(content.split())
                found = flat.find(piece, start)
                if found < 0:
                    raise ValueError(
                        f"the chat template leaves out what the {message['role']} says: {content.strip()[:60]!r}. Set "
                        "model.chat_template to one that shows it; thoughts are left out by data.reasoning=drop, and those of "
                        "earlier turns by data.loss_on=last_assistant"
                    )
                at = max(at, found + len(piece))
            else:
                at = max(at, found + len(content.strip()))
