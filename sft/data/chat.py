"""From a conversation to text, and where in the text the assistant speaks.

Templates with `{% generation %}` markers say it themselves. For known families without them TRL ships a marked version of the
same template, which also shows every turn's thoughts, where the family's own shows only the last turn's. For all others the
text is rendered once whole and once up to each assistant turn, and the turn is what lies between; a template whose parts are
not prefixes of the whole is refused. Whichever way was taken, sft/data/template_checks.py compares it with a second one before any row.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sft.data.processor_time import limited_time
from sft.data.turns import Message

Span = tuple[int, int]

QUESTION, ANSWER, _THOUGHT, _TOOL, _VALUE, _ID, _RESULT = (
    "Qvaa",
    "Avbb",
    "Tvcc",
    "tool_vdd",
    "Vvee",
    "Ivff00000",
    "Rvgg",
)
"""Words that no template writes by itself, to find again in what it rendered."""

RENDERING_SECONDS = 10.0
"""Processor time that a template may take for one conversation; the longest take milliseconds."""

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_NINE = re.compile("[A-Za-z0-9]{9}")
MARKERS = ("{% generation", "{%- generation", "{%generation", "{%-generation")


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model gets it."""

    text: str
    spans: list[Span]
    """Character ranges of the assistant's turns that were asked for, each with its end-of-turn token."""


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
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        arguments: dict[str, Any] | None = None,
        trained: Sequence[bool] | None = None,
    ) -> Rendered:
        """Render one conversation.

        Args:
            messages: Turns in OpenAI's form.
            tools: What the assistant may call.
            arguments: Further variables of the template.
            trained: Which messages are trained, one for each; None: every turn of the assistant's. Only their spans are
                looked for, so that a template that changes other turns does no harm.

        Raises:
            ValueError: The template refuses this conversation, for example for the order of its roles, would lose its tools in
                silence, or hides where the assistant speaks.
        """
        arguments = arguments or {}
        messages = self.as_the_template_reads(messages, tools)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [index for index in turns if trained is None or trained[index]]
        if self.marked_template is None:
            return self._render_by_comparison(messages, tools, arguments, wanted)
        text, spans = self.apply(messages, tools, arguments, marked=True)
        spans = _whole_turns(text, spans, len(turns), self.tokens.values(), self.added)
        if len(spans) != len(turns):
            raise ValueError(f"the chat template shows {len(spans)} of the assistant's {len(turns)} turns")
        chosen = [span for span, index in zip(spans, turns, strict=True) if index in wanted]
        return Rendered(text, [(self._behind_prompt(text, start), end) for start, end in chosen])

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
        self, messages: list[Message], tools: list[Any] | None, arguments: dict[str, Any], wanted: list[int]
    ) -> Rendered:
        text, _ = self.apply(messages, tools, arguments)
        try:
            return Rendered(text, self.compared_spans(text, messages, tools, arguments, wanted))
        except ValueError:
            if wanted == [len(messages) - 1] and any(message["role"] == "system" for message in messages):
                with suppress(ValueError):
                    return self._last_turn_behind_its_prompt(messages, tools, arguments)
            raise

    def _last_turn_behind_its_prompt(
        self, messages: list[Message], tools: list[Any] | None, arguments: dict[str, Any]
    ) -> Rendered:
        """The last turn, as it is without a system message, behind its prompt with one.

        For Mistral's templates, which write the system message into the last question and only while nothing follows it.

        Raises:
            ValueError: Without the system message the turn does not follow its prompt either.
        """
        rest = [message for message in messages if message["role"] != "system"]
        text, _ = self.apply(rest, tools, arguments)
        [(start, end)] = self.compared_spans(text, rest, tools, arguments, [len(rest) - 1])
        unused = self.apply(rest[:-1], tools, arguments, prompt=True)[0][
            start:
        ]  # of the prompt, such as an empty thought
        prompt, _ = self.apply(messages[:-1], tools, arguments, prompt=True)
        if not prompt.endswith(unused):
            raise ValueError("the prompt ends in another way without its system message")
        prompt = prompt.removesuffix(unused)
        return Rendered(prompt + text[start:end], [(len(prompt), len(prompt) + end - start)])

    def compared_spans(
        self,
        text: str,
        messages: list[Message],
        tools: list[Any] | None,
        arguments: dict[str, Any],
        wanted: list[int],
    ) -> list[Span]:
        """The turns at the indices `wanted` in `text` by rendering it up to and including each.

        Raises:
            ValueError: A part is not a prefix of the whole.
        """
        spans = []
        for index in wanted:
            before, _ = self.apply(messages[:index], tools, arguments, prompt=True)
            # The line break after the end-of-turn token belongs to the template, not to the answer.
            upto = text if index + 1 == len(messages) else self.apply(messages[: index + 1], tools, arguments)[0]
            upto = upto.rstrip()
            shared = before if text.startswith(before) else os.path.commonprefix([text, before])  # noqa: RUF071 - of characters
            # Where the prompt writes an empty thought and the turn has one, the turn begins inside it.
            follows = shared == before or (
                "<think>" in shared[before.rfind("<think>") :] and "</think>" in before[len(shared) :]
            )
            header, thinks, opened = before.rpartition("<think>")
            if not follows and thinks and not opened.strip() and text.startswith(header):
                # Where the prompt opens a thought and the turn has none, it follows the header alone.
                shared, follows = header, "</think>" not in upto[len(header) :]
            turn = upto[len(shared) :]
            if shared.rstrip().endswith("<think>"):
                # The thought that the prompt opens ends in the turn; a second one in it was never asked for.
                follows = follows and "</think>" in turn and not turn.lstrip().startswith("<think>")
            if not text.startswith(upto) or not follows:
                raise ValueError(
                    "the chat template renders a turn differently once others follow it, or otherwise than it prompts for it, so it "
                    "cannot be told which tokens the assistant wrote. Set model.chat_template to a version with {% generation %} markers "
                    "around the assistant's turn"
                    + (
                        ""
                        if index + 1 == len(messages)
                        else ", or train the last turn alone (data.loss_on=last_assistant)"
                    )
                )
            spans.append((len(shared), len(upto)))
        return spans

    def as_the_template_reads(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """The messages with thoughts and arguments in the form that this template shows; once or twice is the same.

        Raises:
            ValueError: The template would lose tools, calls, arguments or results.
        """
        if tools and not self.shows_tools:
            raise ValueError(
                "it has tools, and the chat template shows none of them to the model. Set model.chat_template to one that does, or "
                "take the column out of the data"
            )
        read = []
        for message in self.with_ids(messages):
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
                if self.wants_arguments_as_text:
                    message = message | {
                        "tool_calls": [_with_arguments_as_text(call) for call in message["tool_calls"]]
                    }
                elif self.quotes_arguments:
                    message = message | {"tool_calls": [_with_parsed_arguments(call) for call in message["tool_calls"]]}
            if message["role"] == "tool" and message["content"].strip() and not self.shows_results:
                raise ValueError(
                    f"the chat template leaves out the result of a tool call: {message['content'].strip()[:60]!r}. Set "
                    "model.chat_template to one that writes messages of the role tool, or put the result in another turn"
                )
            if message.get("reasoning_content") and not self.shows_reasoning:
                thought = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n"
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                message = message | {"content": thought + message["content"]}
            read.append(message)
        return read

    def with_ids(self, messages: list[Message]) -> list[Message]:
        """The messages, with ids for calls and results where the template refuses those they have, or that they have none."""
        if not any(message.get("tool_calls") for message in messages) or not self._refuses_no_id:
            return messages
        return _with_ids(messages, self._refuses_long_ids)

    @cached_property
    def _refuses_no_id(self) -> bool:
        return self._refuses_id()

    @cached_property
    def _refuses_long_ids(self) -> bool:
        return self._refuses_id(id="call_0123456789abcdef")

    def _refuses_id(self, **given: str) -> bool:
        [call] = self._sample_call["tool_calls"]
        other = {name: value for name, value in call.items() if name != "id"} | given
        return self._shows(_TOOL, **self._sample_call) and not self._shows(_TOOL, content="", tool_calls=[other])

    def _shows(
        self, word: str, *more: Message, tools: list[Any] | None = None, strict: bool = False, **turn: Any
    ) -> bool:
        """Whether the template shows a word of a sample conversation; no where it refuses the sample.

        Raises:
            ValueError: It refuses the sample, if `strict`; or it writes more than once what the assistant says.
        """
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER, **turn}, *more]
        try:
            text, _ = self.apply(messages, tools, {})
        except ValueError as error:
            if strict:
                raise ValueError(f"of a sample with tools, {error}") from None
            return False
        if any(text.count(said) > 1 for said in (ANSWER, _THOUGHT, _VALUE)):
            raise ValueError(f"the chat template writes more than once what the assistant says: ...{text[-200:]!r}")
        return word in text

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a conversation's tools are in its text."""
        function = {"name": _TOOL, "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
        return self._shows(_TOOL, tools=[{"type": "function", "function": function}], strict=True)

    @cached_property
    def shows_developer(self) -> bool:
        """Whether the template has a place for the role `developer`."""
        messages = [{"role": "developer", "content": _TOOL}, {"role": "user", "content": QUESTION}]
        try:
            return _TOOL in self.apply(messages, None, {})[0]
        except ValueError:
            return False

    def _call(self, arguments: Any, **given: str) -> dict[str, Any]:
        call = given | {"type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        return {"content": "", "tool_calls": [call]}

    @cached_property
    def wants_arguments_as_text(self) -> bool:
        """Whether a call's arguments must be a string, as OpenAI gives them: the template refuses an object."""
        given, text = self._call({_VALUE: 1}, id=_ID), self._call(f'{{"{_VALUE}": 1}}', id=_ID)
        return not self._shows(_TOOL, **given) and self._shows(_TOOL, **text)

    @property
    def _sample_call(self) -> dict[str, Any]:
        return self._call(f'{{"{_VALUE}": 1}}' if self.wants_arguments_as_text else {_VALUE: 1}, id=_ID)

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the assistant's calls of tools are in the text."""
        return self._shows(_TOOL, **self._sample_call, strict=True)

    @cached_property
    def shows_text_beside_calls(self) -> bool:
        """Whether what the assistant says beside a call is in the text."""
        result = {"role": "tool", "name": _TOOL, "content": "1", "tool_call_id": _ID}
        call = self._sample_call | {"content": ANSWER}
        return self._shows(ANSWER, result, {"role": "assistant", "content": "1"}, **call, strict=True)

    @cached_property
    def shows_results(self) -> bool:
        """Whether the result of a tool call is in the text; yes where the template refuses the sample, so that a row decides."""
        result = {"role": "tool", "name": _TOOL, "content": _RESULT, "tool_call_id": _ID}
        try:
            return self._shows(_RESULT, result, {"role": "assistant", "content": "1"}, **self._sample_call, strict=True)
        except ValueError:
            return True

    @cached_property
    def quotes_arguments(self) -> bool:
        """Whether arguments that are a string, as OpenAI gives them, come out quoted once more."""
        return not self._shows(f'"{_VALUE}"', **self._call(f'{{"{_VALUE}": 1}}', id=_ID))

    @cached_property
    def finding_without_thoughts(self) -> str | None:
        """The kind of finding that a turn without reasoning content is: an empty thought is trained, or the prompt opens one."""
        try:
            rendered = self.render([{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}])
        except ValueError:
            return None
        [(start, end)] = rendered.spans
        opened = self.generation_prompt.rstrip().endswith("<think>")
        if opened and not rendered.text[:start].rstrip().endswith("<think>"):
            return "prompt_thinks"
        turn = ("<think>" if opened else "") + rendered.text[start:end]
        return "empty_thought" if _EMPTY_THOUGHT.search(turn) else None

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


def _with_ids(messages: list[Message], nine: bool) -> list[Message]:
    """The messages, each call with an id, and each result with that of its call.

    A missing id is nine letters and digits computed from the call and its place, so that the same rows are the same tokens every
    day. A result without one answers the first call that has no result.

    Args:
        messages: Some with calls.
        nine: An id of another form than nine letters and digits is replaced too.
    """

    def made(name: str) -> str:
        return blake2b(name.encode(), digest_size=8).hexdigest()[:9]

    def taken(name: Any) -> str:
        return made(str(name)) if nine and not _NINE.fullmatch(str(name)) else str(name)

    read, waiting = [], []
    for at, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = [
                call | {"id": taken(call.get("id") or made(json.dumps([at, number, call["function"]], default=str)))}
                for number, call in enumerate(message["tool_calls"])
            ]
            message, waiting = message | {"tool_calls": calls}, [call["id"] for call in calls]
        elif message["role"] == "tool" and (message.get("tool_call_id") or waiting):
            answers = taken(message.get("tool_call_id") or waiting[0])
            waiting = [other for other in waiting if other != answers]
            message = message | {"tool_call_id": answers}
        read.append(message)
    return read


def _with_arguments_as_text(call: Any) -> Any:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        return call
    return call | {"function": call["function"] | {"arguments": json.dumps(arguments, ensure_ascii=False)}}


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
