"""From a conversation to text, and where in the text the assistant speaks.

Templates with `{% generation %}` markers say it themselves. For known families without them TRL ships a marked version of the
same template, which also shows every turn's thoughts, where the family's own shows only the last turn's. For all others the
text is rendered once whole and once up to each assistant turn, and the turn is what lies between; a template whose parts are
not prefixes of the whole is refused. Whichever way was taken, sft/template_checks.py compares it with a second one before any row.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from sft.processor_time import limited_time
from sft.turns import Message

Span = tuple[int, int]

QUESTION, ANSWER, _THOUGHT, _TOOL, _VALUE = "Qvaa", "Avbb", "Tvcc", "tool_vdd", "Vvee"
"""Words that no template writes by itself, to find again in what it rendered."""

RENDERING_SECONDS = 10.0
"""Processor time that a template may take for one conversation; the longest take milliseconds."""

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
MARKERS = ("{% generation", "{%- generation", "{%generation", "{%-generation")


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model gets it."""

    text: str
    spans: list[Span]
    """Character ranges of the assistant's turns, each with its end-of-turn token."""


def training_template(template: str) -> str | None:
    """The template with markers: itself, or TRL's version of the same family. None: the family is unknown.

    Found by TRL's files, not by its function of the same purpose, whose import takes seconds; a test holds the two together.
    """
    if any(marker in template for marker in MARKERS):
        return template
    package = importlib.util.find_spec("trl")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "chat_templates"
    for marked in sorted(folder.glob("*_training.jinja")):
        original = marked.with_name(marked.name.replace("_training", ""))
        if original.is_file() and original.read_text(encoding="utf-8") == template:
            return marked.read_text(encoding="utf-8")
    return None


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template.

    Args:
        tokenizer: A transformers tokenizer that has a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.template: str = with_one_date(tokenizer.chat_template)
        self.marked_template = training_template(tokenizer.chat_template)
        if self.marked_template is not None:
            self.marked_template = with_one_date(self.marked_template)
        self.tokens = dict(tokenizer.special_tokens_map)
        self.added = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
        self.added += tuple(tokenizer.all_special_tokens)

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, arguments: dict[str, Any] | None = None
    ) -> Rendered:
        """Render one conversation.

        Args:
            messages: Turns in OpenAI's form.
            tools: What the assistant may call.
            arguments: Further variables of the template.

        Raises:
            ValueError: The template refuses this conversation, for example for the order of its roles, would lose its tools in
                silence, or hides where the assistant speaks.
        """
        arguments = arguments or {}
        messages = self.as_the_template_reads(messages, tools)
        if self.marked_template is None:
            return self._render_by_comparison(messages, tools, arguments)
        text, spans = self.apply(messages, tools, arguments, marked=True)
        turns = sum(message["role"] == "assistant" for message in messages)
        spans = _whole_turns(text, spans, turns, self.tokens.values(), self.added)
        return Rendered(text, [(self._behind_prompt(text, start), end) for start, end in spans])

    def apply(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        arguments: dict[str, Any],
        marked: bool = False,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """One run of the template: the text, and the marked ranges where they are asked for.

        Raises:
            ValueError: The template refuses this conversation.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limited_time(RENDERING_SECONDS):
                texts, ranges = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=self.marked_template or self.template,
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **(self.tokens | arguments),
                )
        except Exception as error:  # a template is a program of somebody else's
            raise ValueError(f"the chat template refuses it: {error}") from None
        return texts[0], [(start, end) for start, end in ranges[0]] if marked else []

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to have the assistant speak; empty where that cannot be told."""
        question: list[Message] = [{"role": "user", "content": QUESTION}]
        try:
            asked, prompted = self.apply(question, None, {})[0], self.apply(question, None, {}, prompt=True)[0]
        except ValueError:
            return ""
        return prompted.removeprefix(asked) if prompted.startswith(asked) else ""

    def _behind_prompt(self, text: str, start: int) -> int:
        """Where a turn that is marked from `start` leaves what the generation prompt writes: that is never generated."""
        if text.endswith(self.generation_prompt, 0, start):
            return start  # as with most templates
        header, thinks, _ = self.generation_prompt.partition("<think>")
        # An answer without a thought follows the header alone.
        for prompt in (self.generation_prompt, header + thinks, header):
            for inside in range(len(prompt), 0, -1):
                before = len(prompt) - inside
                if before <= start and text.startswith(prompt, start - before):
                    return start + inside
        return start

    def _render_by_comparison(
        self, messages: list[Message], tools: list[Any] | None, arguments: dict[str, Any]
    ) -> Rendered:
        text, _ = self.apply(messages, tools, arguments)
        return Rendered(text, self.compared_spans(text, messages, tools, arguments))

    def compared_spans(
        self, text: str, messages: list[Message], tools: list[Any] | None, arguments: dict[str, Any]
    ) -> list[Span]:
        """The assistant's turns in `text` by rendering it up to and including each.

        Raises:
            ValueError: A part is not a prefix of the whole.
        """
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self.apply(messages[:index], tools, arguments, prompt=True)
            # The line break after the end-of-turn token belongs to the template, not to the answer.
            upto = self.apply(messages[: index + 1], tools, arguments)[0].rstrip()
            shared = before if text.startswith(before) else os.path.commonprefix([text, before])  # noqa: RUF071 - of characters
            # Where the prompt writes an empty thought and the turn has one, the turn begins inside it.
            in_thought = "<think>" in shared[before.rfind("<think>") :] and "</think>" in before[len(shared) :]
            if not text.startswith(upto) or (shared != before and not in_thought):
                raise ValueError(
                    "the chat template renders a turn differently once others follow it, so it cannot be told which tokens "
                    "the assistant wrote. Set model.chat_template to a version with {% generation %} markers around the "
                    "assistant's turn"
                )
            spans.append((len(shared), len(upto)))
        return spans

    def as_the_template_reads(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """The messages with thoughts and arguments in the form that this template shows; once or twice is the same.

        Raises:
            ValueError: The template would lose tools, calls or arguments.
        """
        if tools and not self.shows_tools:
            raise ValueError(
                "it has tools, and the chat template shows none of them to the model. Set model.chat_template to one that does, or "
                "take the column out of the data"
            )
        read = []
        for message in messages:
            if message["role"] == "developer" and not self.shows_developer:
                message = message | {"role": "system"}  # which is what the word stands for
            if message.get("tool_calls"):
                if not self.shows_calls:
                    raise ValueError(
                        "it has calls of tools, and the chat template leaves them out. Set model.chat_template to one that writes "
                        "`tool_calls`, or have the calls in the text of the turn"
                    )
                if message["content"].strip() and not self.shows_text_beside_calls:
                    raise ValueError(
                        f"the chat template leaves out what the assistant says: {message['content'].strip()[:60]!r}. Set "
                        "model.chat_template to one that shows text beside a call of a tool, or have it in a turn of its own"
                    )
                if self.quotes_arguments:
                    message = message | {"tool_calls": [_with_parsed_arguments(call) for call in message["tool_calls"]]}
            if message.get("reasoning_content") and not self.shows_reasoning:
                thought = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n"
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                message = message | {"content": thought + message["content"]}
            read.append(message)
        return read

    def _shows(self, word: str, **turn: Any) -> bool:
        tools = turn.pop("tools", None)
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER, **turn}]
        try:
            return word in self.apply(messages, tools, {})[0]
        except ValueError:
            return False

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a conversation's tools are in its text."""
        function = {"name": _TOOL, "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
        return self._shows(_TOOL, tools=[{"type": "function", "function": function}])

    @cached_property
    def shows_developer(self) -> bool:
        """Whether the template has a place for the role `developer`."""
        messages = [{"role": "developer", "content": _TOOL}, {"role": "user", "content": QUESTION}]
        try:
            return _TOOL in self.apply(messages, None, {})[0]
        except ValueError:
            return False

    def _call(self, arguments: Any) -> dict[str, Any]:
        return {
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": _TOOL, "arguments": arguments}}],
        }

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the assistant's calls of tools are in the text."""
        return self._shows(_TOOL, **self._call({_VALUE: 1}))

    @cached_property
    def shows_text_beside_calls(self) -> bool:
        """Whether what the assistant says beside a call is in the text."""
        messages: list[Message] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", **self._call({_VALUE: 1}), "content": ANSWER},
            {"role": "tool", "name": _TOOL, "content": "1"},
            {"role": "assistant", "content": "1"},
        ]
        try:
            return ANSWER in self.apply(messages, None, {})[0]
        except ValueError:
            return False

    @cached_property
    def quotes_arguments(self) -> bool:
        """Whether arguments that are a string, as OpenAI gives them, come out quoted once more."""
        return not self._shows(f'"{_VALUE}"', **self._call(f'{{"{_VALUE}": 1}}'))

    @cached_property
    def trains_empty_thoughts(self) -> bool:
        """Whether a turn without thoughts is trained to begin with an empty one."""
        try:
            rendered = self.render([{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}])
        except ValueError:
            return False
        return any(_EMPTY_THOUGHT.search(rendered.text[start:end]) for start, end in rendered.spans)

    @cached_property
    def shows_reasoning(self) -> bool:
        """Whether a turn's `reasoning_content` is in the text."""
        return self._shows(_THOUGHT, reasoning_content=_THOUGHT)


def with_one_date(template: str) -> str:
    """A template that writes the same date every day: its rows would be other tokens tomorrow. It is Llama's own default."""
    return re.sub(
        r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
        lambda call: repr(datetime(2024, 7, 26).strftime(call[2])),
        template,
    )


def _with_parsed_arguments(call: Any) -> Any:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        arguments = json.loads(arguments)
    except ValueError as error:
        raise ValueError(f"the arguments of a tool call are no JSON ({error}): {arguments[:80]!r}") from None
    return call | {"function": call["function"] | {"arguments": arguments}}


def _whole_turns(text: str, marked: list[Span], count: int, tokens: Iterable[str], ends: tuple[str, ...]) -> list[Span]:
    """The marked ranges as turns that end with their end-of-turn token.

    Some templates mark a turn in several pieces; some the line break behind the token, or, at the end of the conversation, the
    EOS token behind that: a model that has stopped writes neither.
    """
    turns: list[Span] = []
    for start, end in marked:
        if turns and turns[-1][1] == start:
            if text[start:end].strip() in tokens and text[:start].rstrip().endswith(ends):
                continue  # the EOS behind the end of the last turn
            turns[-1] = (turns[-1][0], end)
        else:
            turns.append((start, end))
    if len(turns) > count:
        turns = [(start, end) for start, end in turns if text[start:end].strip() not in tokens]
    return [(start, start + len(text[start:end].rstrip())) for start, end in turns]
