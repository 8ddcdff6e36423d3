"""Renders conversations with a tokenizer's chat template, and finds where in the text the assistant speaks.

Templates with `{% generation %}` markers say it themselves. For known families without them TRL ships a marked version of the
same template, which also shows the reasoning of every turn where the family's own shows only the last turn's. For all others the
text is rendered once whole and once up to each assistant turn: the turn is what lies between. A template whose parts are not
prefixes of the whole is refused. sft/data/template_checks.py checks either way on samples before any row is rendered.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from sft.data.conversation import Message, parsed, with_call_ids

Span = tuple[int, int]
Arguments = dict[str, Any]

QUESTION, ANSWER, _REASONING, _TOOL, _ARGUMENT = "Qvaa", "Avbb", "Tvcc", "tool_vdd", "Vvee"
"""Words of samples that no template writes by itself, to find again in what it rendered."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model sees it."""

    text: str
    spans: list[Span]
    """Character ranges of the requested assistant turns, each with its end-of-turn token."""


def training_template(template: str) -> str | None:
    """The template with markers: itself, or TRL's version of the same family; None if the family is unknown.

    Compares TRL's files: importing trl.chat_template_utils, which does the same, takes seconds.
    """
    if re.search(r"\{%-? *generation", template):
        return template
    package = importlib.util.find_spec("trl")
    assert package is not None
    assert package.origin is not None
    for marked in sorted((Path(package.origin).parent / "chat_templates").glob("*_training.jinja")):
        original = marked.with_name(marked.name.replace("_training", ""))
        if original.is_file() and original.read_text(encoding="utf-8") == template:
            return marked.read_text(encoding="utf-8")
    return None


def with_fixed_date(template: str) -> str:
    """A template that writes the same date every day (Llama's own default): tomorrow its rows would be other tokens."""
    return re.sub(
        r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
        lambda call: repr(datetime(2024, 7, 26).strftime(call[2])),
        template,
    )


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        marked = training_template(tokenizer.chat_template)
        self.is_marked = marked is not None
        self.template = with_fixed_date(marked or tokenizer.chat_template)
        self.special_tokens: dict[str, str] = dict(tokenizer.special_tokens_map)
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self.added = (*added, *tokenizer.all_special_tokens)

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        arguments: Arguments | None = None,
        trained: Sequence[bool] | None = None,
    ) -> Rendered:
        """Render one conversation. `tools` is what the assistant may call, `arguments` further variables of the template.

        Only the spans of messages that are `trained` (None: every turn of the assistant) are looked for, so a template may change other
        turns. Raises ValueError where the template refuses this conversation, for example for the order of its roles, or hides where
        the assistant speaks.
        """
        self._check_arguments(arguments or {})
        messages = self.adapted(messages, tools)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [index for index in turns if trained is None or trained[index]]
        if not self.is_marked:
            return self._render_by_prefixes(messages, tools, arguments, wanted)
        text, marked = self._run(messages, tools, arguments, marked=True)
        spans = self._whole_turns(text, marked, len(turns))
        if len(spans) != len(turns):
            raise ValueError(f"the chat template shows {len(spans)} of the assistant's {len(turns)} turns")
        chosen = [span for span, index in zip(spans, turns, strict=True) if index in wanted]
        return Rendered(text, [(self._after_prompt(text, start), end) for start, end in chosen])

    def _check_arguments(self, arguments: Arguments) -> None:
        """Raise ValueError for text that the template would never show; a flag that it does not know changes nothing."""
        texts = [name for name, value in arguments.items() if value and isinstance(value, str | list | dict)]
        if lost := [name for name in texts if not re.search(rf"\b{re.escape(name)}\b", self.template)]:
            raise ValueError(
                f"`chat_template_kwargs` has {', '.join(lost)}, and the chat template does not read it, so that the model would never see "
                "it. Set model.chat_template to one that does, or remove it from the column"
            )

    def apply(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        arguments: Arguments | None = None,
        prompt: bool = False,
    ) -> str:
        """What the template makes of messages; with `prompt`, and the generation prompt. Raises ValueError where it refuses them."""
        return self._run(messages, tools, arguments, prompt=prompt)[0]

    def _run(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        arguments: Arguments | None,
        prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        """Run the template once: the text, and the marked ranges if they are wanted."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, ranges = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **(self.special_tokens | (arguments or {})),
            )
        except Exception as error:  # a template is a foreign program
            raise ValueError(f"the chat template refuses it: {error}") from None
        return texts[0], [(start, end) for start, end in ranges[0]] if marked else []

    # With markers

    def _whole_turns(self, text: str, marked: list[Span], count: int) -> list[Span]:
        """The marked ranges as turns that end with their end-of-turn token.

        Some templates mark a turn in several pieces; some also mark the line break behind the token, or at the end of the
        conversation the EOS token behind that. A model that has stopped writes neither.
        """
        special, turns = set(self.special_tokens.values()), list[Span]()
        for start, end in marked:
            if not turns or turns[-1][1] != start:
                turns.append((start, end))
            elif not (text[start:end].strip() in special and text[:start].rstrip().endswith(self.added)):
                turns[-1] = (turns[-1][0], end)
        if len(turns) > count:
            turns = [(start, end) for start, end in turns if text[start:end].strip() not in special]
        return [(start, start + len(text[start:end].rstrip())) for start, end in turns]

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to make the assistant speak; empty if it cannot be told."""
        question: list[Message] = [{"role": "user", "content": QUESTION}]
        try:
            asked, prompted = self.apply(question), self.apply(question, prompt=True)
        except ValueError:
            return ""
        return prompted.removeprefix(asked) if prompted.startswith(asked) else ""

    def _after_prompt(self, text: str, start: int) -> int:
        """Where a turn that is marked from `start` leaves the generation prompt, which the model never generates."""
        if text.endswith(self.generation_prompt, 0, start):
            return start  # as with most templates
        header, thinks, _ = self.generation_prompt.partition("<think>")
        # An answer without reasoning follows the header alone.
        for prompt in (self.generation_prompt, header + thinks, header):
            for inside in range(len(prompt), 0, -1):
                before = len(prompt) - inside
                if before <= start and text.startswith(prompt, start - before):
                    return start + inside
        return start

    # Without markers

    def _render_by_prefixes(
        self, messages: list[Message], tools: list[Any] | None, arguments: Arguments | None, wanted: list[int]
    ) -> Rendered:
        text = self.apply(messages, tools, arguments)
        try:
            return Rendered(text, self.prefix_spans(text, messages, wanted, tools, arguments))
        except ValueError:
            if wanted == [len(messages) - 1] and any(message["role"] == "system" for message in messages):
                with suppress(ValueError):
                    return self._last_turn_after_prompt(messages, tools, arguments)
            raise

    def _last_turn_after_prompt(
        self, messages: list[Message], tools: list[Any] | None, arguments: Arguments | None
    ) -> Rendered:
        """The last turn as it is without a system message, after its prompt with one.

        Mistral's templates write the system message into the last question, and only while nothing follows it.
        """
        rest = [message for message in messages if message["role"] != "system"]
        text = self.apply(rest, tools, arguments)
        [(start, end)] = self.prefix_spans(text, rest, [len(rest) - 1], tools, arguments)
        prompt = self.apply(messages[:-1], tools, arguments, prompt=True)
        if text[:start] != self.apply(rest[:-1], tools, arguments, prompt=True):
            raise ValueError("the turn does not follow its prompt without the system message either")
        return Rendered(prompt + text[start:end], [(len(prompt), len(prompt) + end - start)])

    def prefix_spans(
        self,
        text: str,
        messages: list[Message],
        wanted: list[int],
        tools: list[Any] | None = None,
        arguments: Arguments | None = None,
    ) -> list[Span]:
        """The turns at the indices `wanted` of a rendered text, by rendering it up to and including each.

        Raises ValueError where a part is not a prefix of the whole.
        """
        spans = []
        for index in wanted:
            prompt = self.apply(messages[:index], tools, arguments, prompt=True)
            is_last = index + 1 == len(messages)
            # The line break after the end-of-turn token belongs to the template, not to the answer.
            upto = (text if is_last else self.apply(messages[: index + 1], tools, arguments)).rstrip()
            start = _end_of_prompt(text, upto, prompt)
            if start is None or not text.startswith(upto):
                last = "" if is_last else ", or train the last turn alone (data.loss_on=last_assistant)"
                raise ValueError(
                    "the chat template renders a turn differently once others follow it, or differently from its generation prompt, so "
                    "the tokens that the assistant wrote cannot be told. Set model.chat_template to a version with {% generation %} "
                    f"markers around the assistant's turn{last}"
                )
            spans.append((start, len(upto)))
        return spans

    # What this template shows, and in which form

    def adapted(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """The messages in the form that this template shows: reasoning, arguments and roles. Adapting twice changes nothing.

        Raises ValueError where the template would leave out the tools.
        """
        if tools and not self._shows_tools:
            raise ValueError(
                "it has tools, and the chat template does not show them to the model. Set model.chat_template to one that does, or remove "
                "the column"
            )
        adapted = []
        for message in messages:
            if message.get("tool_calls"):
                message = message | {"tool_calls": list(map(self._adapted_call, message["tool_calls"]))}
            if message.get("reasoning_content") and not self._shows_reasoning:
                reasoning = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n"
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                message = message | {"content": reasoning + message["content"]}
            adapted.append(message)
        demands_ids = any(message.get("tool_calls") for message in messages) and self._demands_call_ids
        return with_call_ids(adapted) if demands_ids else adapted

    def _adapted_call(self, call: Any) -> Any:
        arguments = call["function"].get("arguments")
        if self._wants_arguments_as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif self._quotes_arguments:
            arguments = parsed(arguments, "`arguments` of a tool call")
        else:
            return call
        return call | {"function": call["function"] | {"arguments": arguments}}

    def _shows(self, word: str, tools: list[Any] | None = None, **turn: Any) -> bool:
        """Whether the template shows a word of a sample conversation; no if it refuses the sample."""
        answer = {"role": "assistant", "content": ANSWER, **turn}
        with suppress(ValueError):
            return word in self.apply([{"role": "user", "content": QUESTION}, answer], tools)
        return False

    @cached_property
    def _shows_tools(self) -> bool:
        function = {"name": _TOOL, "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
        return self._shows(_TOOL, tools=[{"type": "function", "function": function}])

    @cached_property
    def _shows_reasoning(self) -> bool:
        return self._shows(_REASONING, reasoning_content=_REASONING)

    def _shows_call(self, word: str, arguments: Any) -> bool:
        call = {"id": "Ivff00000", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        return self._shows(word, content="", tool_calls=[call])

    @cached_property
    def _demands_call_ids(self) -> bool:
        """Whether calls need an id of nine letters and digits, as Mistral's templates do."""
        call = {"type": "function", "function": {"name": _TOOL, "arguments": {_ARGUMENT: 1}}}
        without_id, longer = [call], [call | {"id": "call_" + "0" * 24}]
        shows_any = [self._shows(_TOOL, content="", tool_calls=calls) for calls in (without_id, longer)]
        return not all(shows_any) and self._shows_call(_TOOL, {_ARGUMENT: 1})

    @cached_property
    def _wants_arguments_as_text(self) -> bool:
        """Whether a call's arguments must be a string, as OpenAI gives them: the template refuses an object."""
        return not self._shows_call(_TOOL, {_ARGUMENT: 1}) and self._shows_call(_TOOL, f'{{"{_ARGUMENT}": 1}}')

    @cached_property
    def _quotes_arguments(self) -> bool:
        """Whether arguments that are a string come out quoted once more."""
        return not self._shows_call(f'"{_ARGUMENT}"', f'{{"{_ARGUMENT}": 1}}')


def _end_of_prompt(text: str, upto: str, prompt: str) -> int | None:
    """Where in a text the generation prompt of its last turn ends; None if the turn does not follow the prompt.

    `upto` ends with the turn; `prompt` is what precedes it, with the generation prompt.
    """
    shared = prompt if text.startswith(prompt) else os.path.commonprefix([text, prompt])  # noqa: RUF071 - of characters
    # If the prompt writes empty reasoning and the turn has some, the turn begins inside it.
    opens = "<think>" in shared[prompt.rfind("<think>") :] and "</think>" in prompt[len(shared) :]
    follows = shared == prompt or opens
    header, thinks, behind = prompt.rpartition("<think>")
    if not follows and thinks and not behind.strip() and text.startswith(header):
        # If the prompt opens reasoning and the turn has none, it follows the header alone.
        shared, follows = header, "</think>" not in upto[len(header) :]
    turn = upto[len(shared) :]
    if shared.rstrip().endswith("<think>"):
        # The reasoning that the prompt opens ends in the turn; a second block in it was never asked for.
        follows = follows and "</think>" in turn and not turn.lstrip().startswith("<think>")
    return len(shared) if follows else None
