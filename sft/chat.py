"""From a conversation to text, and where in the text the assistant speaks.

Templates with `{% generation %}` markers say it themselves. For known families without them TRL has a marked version of the
same template. For all others the text is rendered once whole and once up to each assistant turn, and the turn is what lies
between; a template whose parts are not prefixes of the whole is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft.errors import ModelError
from sft.rows import Message


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model gets it."""

    text: str
    spans: list[tuple[int, int]]
    """Character ranges of the assistant's turns, each with its end-of-turn token."""


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template.

    Args:
        tokenizer: A transformers tokenizer that has a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.marked_template = _marked_template(tokenizer)

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """Render one conversation.

        Raises:
            ModelError: The template hides where the assistant speaks.
            ValueError: The template refuses this conversation, for example for the order of its roles.
        """
        if self.marked_template is None:
            return self._render_by_comparison(messages, tools)
        text, spans = self._apply(messages, tools, self.marked_template, marked=True)
        # Some mark the line break after the end-of-turn token too, which a model that has stopped never writes.
        return Rendered(text, [(start, start + len(text[start:end].rstrip())) for start, end in spans])

    def _apply(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        template: str,
        marked: bool = False,
        prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, indices = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        return texts[0], [(start, end) for start, end in indices[0]] if marked else []

    def _render_by_comparison(self, messages: list[Message], tools: list[Any] | None) -> Rendered:
        template = self.tokenizer.chat_template
        text, _ = self._apply(messages, tools, template)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._apply(messages[:index], tools, template, prompt=True)
            upto, _ = self._apply(messages[: index + 1], tools, template)
            # The line break after the end-of-turn token belongs to the template, not to the answer.
            upto = upto.rstrip()
            if not text.startswith(before) or not text.startswith(upto):
                raise ModelError(
                    "The chat template renders a turn differently once others follow it, so it cannot be told which tokens "
                    "the assistant wrote. Set model.chat_template to a version with {% generation %} markers around the "
                    "assistant's turn."
                )
            spans.append((len(before), len(upto)))
        return Rendered(text, spans)


def _marked_template(tokenizer: Any) -> str | None:
    """The template with markers, or None where its family is unknown and the turns must be found by comparison."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template: str = tokenizer.chat_template
    if has_generation_markers(template):
        return template
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except ValueError:  # TRL does not know the family
        return None
    return found


def assistant_mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens lie in the assistant's turns.

    Args:
        offsets: Character range of each token, length T, ascending.
        spans: Character ranges of the turns, ascending.

    Returns:
        Length T; a token counts where any of its characters do.

    >>> assistant_mask([(0, 4), (4, 6), (6, 9)], [(5, 9)])
    [False, True, True]
    """
    mask, turn = [], 0
    for start, end in offsets:
        while turn < len(spans) and spans[turn][1] <= start:
            turn += 1
        mask.append(turn < len(spans) and end > spans[turn][0] and start < end)
    return mask
