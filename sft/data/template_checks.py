"""Checks a chat template before any row is rendered, and each rendered row for lost content.

Keeps the promise that the model learns to stop: the end-of-turn token is trained and is a token of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from sft.data.conversation import Message
from sft.data.render import ANSWER, QUESTION, ChatRenderer, Rendered
from sft.errors import ModelError

_SAMPLE = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue"}]
_HEADERS = re.compile(r"<\|(?:im_start|start_header_id|end_header_id|begin_of_text)\|>|<start_of_turn>")
"""What families write as single tokens only; `<|user|>` and the like are plain text in some."""

_CORRECT = "Correct model.chat_template, or name another."


def end_of_turn(tokenizer: Any) -> int:
    """The id of the token that closes the assistant's turn in the tokenizer's chat template.

    Raises:
        ModelError: The template closes the turn with nothing that a model could stop at, has other turns than its markers say,
            or begins twice.
    """
    renderer = ChatRenderer(tokenizer)
    _check_turns(renderer)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    rendered = _rendered(renderer, _SAMPLE * 2)
    for start, end in rendered.spans:
        ids = tokenizer(rendered.text[start:end], add_special_tokens=False)["input_ids"]
        if ids and ids[-1] in special:
            continue
        closing = rendered.text[start:end].rpartition(_SAMPLE[1]["content"])[2] or rendered.text[start:end][-20:]
        add = f"Add it (model.new_tokens: [{json.dumps(closing.strip())}])" if "<" in closing else "Correct it"
        raise ModelError(
            f"The chat template ends the assistant's turn with {closing!r}, which is not a special token of this tokenizer: the model "
            f"would never learn to stop. {add}, or name another in model.chat_template (`plain` ends a turn with the tokenizer's own EOS)."
        )
    beginning = tokenizer(rendered.text, add_special_tokens=False)["input_ids"][:2]
    if beginning == [tokenizer.bos_token_id] * 2:
        raise ModelError(f"The chat template begins a conversation with {tokenizer.bos_token} twice. {_CORRECT}")
    return int(ids[-1])


def note_on_headers(tokenizer: Any) -> str | None:
    """A warning about headers that the chat template writes for another family's tokenizer; None if there are none."""
    if tokenizer.chat_template is None:
        return None
    written = dict.fromkeys(_HEADERS.findall(_rendered(ChatRenderer(tokenizer), _SAMPLE).text))
    missing = [name for name in written if name not in tokenizer.get_vocab()]
    if not missing:
        return None
    return (
        f"Note: the chat template writes {', '.join(missing)}, for which this tokenizer has no token: it reads them as plain text. The "
        "template may belong to another model. Name another in model.chat_template, or add the tokens with model.new_tokens."
    )


def _check_turns(renderer: ChatRenderer) -> None:
    """Compare the turns that are trained with what they should hold and with the generation prompt, on samples.

    Raises:
        ModelError: They are not the answers, differ from what the model is prompted with, or questions and answers have one header.
    """
    system: list[Message] = [{"role": "system", "content": "Be brief."}]
    for first, numbers in (([], "1"), ([], "123"), (system, "1")):
        messages = first + [
            {"role": role, "content": word + number}
            for number in numbers
            for role, word in (("user", QUESTION), ("assistant", ANSWER))
        ]
        try:
            rendered = _rendered(renderer, messages)
            prompts = [
                renderer.apply(messages[:end], None, {}, prompt=True)[0]
                for end in range(len(first) + 1, len(messages), 2)
            ]
        except ValueError as error:
            if first:
                continue  # not every template knows a system message; a row that has one says so
            raise ModelError(f"Questions and their answers cannot be rendered: {error}. {_CORRECT}") from None
        text, spans = rendered.text, rendered.spans
        numbers, prompts = numbers[-len(spans) :], prompts[-len(spans) :]
        turns = [text[start:end] for start, end in spans]
        endings = [turn.partition(ANSWER + number)[2] for turn, number in zip(turns, numbers, strict=True)]
        same = all(endings) and len(set(endings[:-1])) <= 1 and not any(ANSWER in ending for ending in endings)
        if not same or any(QUESTION in turn for turn in turns):
            raise ModelError(
                f"The chat template's turns are not its answers: of {len(messages) // 2} questions with answers it gives {turns}. "
                "Correct its {% generation %} markers, or name another in model.chat_template."
            )
        if any(text.count(ANSWER + number) != 1 for number in numbers):
            raise ModelError(
                f"The chat template writes an answer more than once, so it is in its own prompt: ...{text[-200:]!r}. {_CORRECT}"
            )
        for (start, end), number, prompt in zip(spans, numbers, prompts, strict=True):
            _check_prompt(QUESTION + number, text[:start], prompt, text[:end])
        _check_headers(text, endings[0], renderer.special_tokens.get("bos_token", ""))


def _check_prompt(question: str, before: str, prompt: str, upto: str) -> None:
    """Compare what stands between a question and its trained answer with what the generation prompt writes there."""
    before, prompted, written = (
        part.rpartition(question)[2].partition("<think>")[0] for part in (before, prompt, upto)
    )
    # If a turn is trained with its header, the prompt ends inside it.
    if not prompted.startswith(before) or not written.startswith(prompted):
        raise ModelError(
            f"The chat template writes {before!r} between a question and the answer that is trained, but its generation prompt writes "
            f"{prompted!r}: the model would never be prompted as it was trained. Correct add_generation_prompt in model.chat_template, or "
            "name another."
        )


def _check_headers(text: str, ending: str, bos_token: str) -> None:
    """Refuse a template that writes the same words before questions and answers; one that separates turns by a token is fine."""
    header = _between(text, ANSWER + "1", QUESTION + "2").removeprefix(ending).removeprefix(bos_token)
    if any(map(str.isalnum, header)) and _between(text, QUESTION + "2", ANSWER + "2").endswith(header):
        raise ModelError(
            f"The chat template writes {header!r} before questions and before answers: the model cannot see who speaks. {_CORRECT}"
        )


def _between(text: str, left: str, right: str) -> str:
    return text.partition(left)[2].partition(right)[0]


def _rendered(renderer: ChatRenderer, messages: list[Message]) -> Rendered:
    """All turns; only the last, which can still be trained, if the template changes earlier ones."""
    try:
        return renderer.render(messages)
    except ValueError:
        return renderer.render(messages, trained=[False] * (len(messages) - 1) + [True])


def check_nothing_is_lost(messages: list[Message], trained: Sequence[bool], text: str) -> None:
    """Check that what the messages say is in the rendered text, in order, white space aside.

    Some templates leave out a second system message, text beside a tool call, calls, or the reasoning of earlier turns. Reasoning
    of a turn that is not trained may be left out: it is when the model answers.

    Args:
        messages: As they were rendered.
        trained: Whether each message is trained.
        text: What the template made of them.

    Raises:
        ValueError: Something is missing; the message says what.
    """
    order = list(zip(messages, trained, strict=True))
    # Mistral's templates write the system message into the last question.
    system = [pair for pair in order if pair[0]["role"] == "system"]
    last = max((index for index, (message, _) in enumerate(order) if message["role"] == "user"), default=0)
    moved = [pair for pair in order[:last] if pair not in system] + system + order[last:]
    try:
        _find_all(order, text)
    except ValueError:
        if len(moved) == len(order) and moved != order:
            with suppress(ValueError):
                return _find_all(moved, text)
        raise


def _find_all(order: list[tuple[Message, bool]], text: str) -> None:
    at = 0
    flat: str | None = None  # the text without white space, once it is needed
    for message, is_trained in order:
        for said in _parts(message, is_trained):
            found = text.find(said, at) if flat is None else -1
            if found >= 0:
                at = found + len(said)
                continue
            if flat is None:
                flat, at = "".join(text.split()), len("".join(text[:at].split()))
            said_flat = "".join(said.split())
            found = flat.find(said_flat, at)
            if found < 0:
                raise ValueError(
                    f"the chat template leaves out what the {message['role']} says: {said[:60]!r}. Set model.chat_template to one that "
                    "shows it; data.reasoning=drop drops reasoning, and data.loss_on=last_assistant needs none of earlier turns"
                )
            at = found + len(said_flat)


def _parts(message: Message, is_trained: bool) -> Iterator[str]:
    """What a message says, in the order that templates write it."""
    if message["role"] == "tool":
        # Some templates write a result as JSON: its longest word stands for it.
        yield from sorted(re.findall("[A-Za-z0-9]+", message["content"]), key=len)[-1:]
        return
    parts = [message["reasoning_content"]] if is_trained and "reasoning_content" in message else []
    content = re.split("</?think>", message["content"])
    parts += content if is_trained else content[-1:]
    parts += [call["function"]["name"] for call in message.get("tool_calls") or []]
    yield from (part.strip() for part in parts if part.strip())
