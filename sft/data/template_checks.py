"""Checks a chat template before any row is rendered, and each rendered row for lost content.

Keeps the promise that the model learns to stop: the end-of-turn token is trained and is a token of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sft.data.conversation import Message
from sft.data.render import ANSWER, QUESTION, ChatRenderer, Rendered
from sft.errors import ModelError

_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_CORRECT = "Correct model.chat_template, or name another."


@dataclass(frozen=True)
class _Turn:
    """A question and its answer as a template renders them."""

    question: str
    answer: str
    prompt: str
    """What the model is prompted with for the answer."""

    before: str
    """The text before what is trained."""

    trained: str

    @property
    def ending(self) -> str:
        """What is trained behind the answer."""
        return self.trained.partition(self.answer)[2]


def _sample(renderer: ChatRenderer, count: int, *first: Message) -> tuple[str, list[_Turn]]:
    """Some numbered questions with answers as text and turns; only the last turn if the template changes earlier ones."""
    messages = list(first)
    for number in range(1, count + 1):
        messages.append({"role": "user", "content": f"{QUESTION}{number}"})
        messages.append({"role": "assistant", "content": f"{ANSWER}{number}"})
    try:
        rendered = renderer.render(messages)
    except ValueError:
        rendered = renderer.render(messages, trained=[False] * (len(messages) - 1) + [True])
    text, turns = rendered.text, []
    for at, (start, end) in zip(
        range(len(messages) + 1 - 2 * len(rendered.spans), len(messages), 2), rendered.spans, strict=True
    ):
        question, answer = (message["content"] for message in messages[at - 1 : at + 1])
        prompt = renderer.apply(messages[:at], prompt=True)
        turns.append(_Turn(question, answer, prompt, text[:start], text[start:end]))
    return text, turns


def _check_sample(text: str, turns: list[_Turn]) -> None:
    """Check that the turns are the answers, each written once and prompted as trained."""
    endings = [turn.ending for turn in turns]
    same = all(endings) and len(set(endings[:-1])) <= 1 and not any(ANSWER in ending for ending in endings)
    if not same or any(QUESTION in turn.trained for turn in turns):
        raise ModelError(
            f"The chat template's turns are not its answers: of questions with answers it gives {[turn.trained for turn in turns]}. "
            "Correct its {% generation %} markers, or name another in model.chat_template."
        )
    if any(text.count(turn.answer) != 1 for turn in turns):
        raise ModelError(
            f"The chat template writes an answer more than once, so it is in its own prompt: ...{text[-200:]!r}. {_CORRECT}"
        )
    for turn in turns:
        before, prompted, written = (
            part.rpartition(turn.question)[2].partition("<think>")[0]
            for part in (turn.before, turn.prompt, turn.before + turn.trained)
        )
        # If a turn is trained with its header, the prompt ends inside it.
        if not prompted.startswith(before) or not written.startswith(prompted):
            raise ModelError(
                f"The chat template writes {before!r} between a question and the answer that is trained, but its generation prompt "
                f"writes {prompted!r}: the model would never be prompted as it was trained. Correct add_generation_prompt in "
                "model.chat_template, or name another."
            )


def checked_sample(renderer: ChatRenderer) -> tuple[str, list[_Turn]]:
    """Check a template on samples; returns the one of three questions.

    Raises ModelError where its trained turns are not the answers, or differ from what the model is prompted with.
    """
    try:
        samples = [_sample(renderer, 3), _sample(renderer, 1)]
    except ValueError as error:
        raise ModelError(f"Questions and their answers cannot be rendered: {error}. {_CORRECT}") from None
    with suppress(ValueError):  # not every template knows a system message; a row that has one says so
        samples.append(_sample(renderer, 1, _SYSTEM))
    for text, turns in samples:
        _check_sample(text, turns)
    return samples[0]


def end_of_turn(tokenizer: Any) -> int:
    """The id of the token that closes the assistant's turn in the tokenizer's chat template.

    Raises ModelError where the template fails a check, closes the turn with nothing that a model could stop at, or
    begins twice.
    """
    text, turns = checked_sample(ChatRenderer(tokenizer))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids: list[int] = []
    for turn in turns:
        ids, ending = tokenizer(turn.trained, add_special_tokens=False)["input_ids"], turn.ending
        if ids and ids[-1] in special:
            continue
        add = f"Add it (model.new_tokens: [{json.dumps(ending.strip())}])" if "<" in ending else "Correct it"
        raise ModelError(
            f"The chat template ends the assistant's turn with {ending!r}, which is not a special token of this tokenizer: the model "
            f"would never learn to stop. {add}, or name another in model.chat_template (`plain` ends a turn with the tokenizer's own EOS)."
        )
    beginning = tokenizer(text, add_special_tokens=False)["input_ids"][:2]
    if beginning == [tokenizer.bos_token_id] * 2:
        raise ModelError(f"The chat template begins a conversation with {tokenizer.bos_token} twice. {_CORRECT}")
    return int(ids[-1])


# What a rendered row must hold


def check_nothing_is_lost(messages: list[Message], trained: Sequence[bool], text: str) -> None:
    """Check that what the messages say is in the rendered text, in order, white space aside. Raises ValueError where it is not.

    Some templates leave out a second system message, text beside a tool call, calls, or the reasoning of earlier turns. Reasoning
    of a turn that is not trained may be left out: it is when the model answers.
    """
    order = list(zip(messages, trained, strict=True))
    try:
        _find_all(order, text)
    except ValueError:
        # Mistral's templates write the system message into the last question.
        system = [pair for pair in order if pair[0]["role"] == "system"]
        last = max((at for at, (message, _) in enumerate(order) if message["role"] == "user"), default=0)
        moved = [pair for pair in order[:last] if pair not in system] + system + order[last:]
        if moved == order or len(moved) != len(order):
            raise
        with suppress(ValueError):
            return _find_all(moved, text)
        raise


def _find_all(order: list[tuple[Message, bool]], text: str) -> None:
    at, text = 0, "".join(text.split())
    for message, is_trained in order:
        for said in _parts(message, is_trained):
            said_flat = "".join(said.split())
            at = text.find(said_flat, at) + len(said_flat)
            if at < len(said_flat):
                raise ValueError(
                    f"the chat template leaves out what the {message['role']} says: {said[:60]!r}. Set model.chat_template to one that "
                    "shows it; data.reasoning=drop drops reasoning, and data.loss_on=last_assistant needs none of earlier turns"
                )


def _parts(message: Message, is_trained: bool) -> Iterator[str]:
    """What a message says, in the order that templates write it."""
    if message["role"] == "tool":
        # Some templates write a result as JSON: its longest word stands for it.
        yield from sorted(re.findall("[A-Za-z0-9]+", message["content"]), key=len)[-1:]
        return
    parts = [message["reasoning_content"]] if is_trained and "reasoning_content" in message else []
    content = re.split("</?think>", message["content"]) if "think>" in message["content"] else [message["content"]]
    parts += content if is_trained else content[-1:]
    parts += [call["function"]["name"] for call in message.get("tool_calls") or []]
    yield from (part.strip() for part in parts if part.strip())


def check_turns_are_closed(rendered: Rendered, added: tuple[str, ...]) -> None:
    """Raise ValueError where a trained turn does not end with one of the tokenizer's added tokens."""
    for _, end in rendered.spans:
        if not rendered.text.endswith(added, 0, end):
            raise ValueError(f"the chat template leaves the assistant's turn open: {rendered.text[end - 20 : end]!r}")
