"""Law 6, before any row: what is asked of a chat template before it is trained with."""

from __future__ import annotations

import json
import re
from typing import Any

from sft.data.chat import ANSWER, QUESTION, ChatRenderer, Rendered
from sft.data.turns import Message
from sft.errors import ModelError

_PROBE = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue"}]
_HEADERS = re.compile(r"<\|(?:im_start|start_header_id|end_header_id|begin_of_text)\|>|<start_of_turn>")
"""What families write as single tokens only; `<|user|>` and its like are plain text in some."""


def end_of_turn(tokenizer: Any) -> int:
    """The id of the token that closes the assistant's turn in this chat template.

    Raises:
        ModelError: The template closes the turn with nothing that a model could stop at, has other turns than its markers say,
            or begins twice.
    """
    renderer = ChatRenderer(tokenizer)
    check_spans(renderer)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    rendered = _rendered(renderer, _PROBE * 2)
    for start, end in rendered.spans:
        ids = tokenizer(rendered.text[start:end], add_special_tokens=False)["input_ids"]
        if ids and ids[-1] in special:
            continue
        end_text = rendered.text[start:end].rpartition(_PROBE[1]["content"])[2] or rendered.text[start:end][-20:]
        add = f"Add it (model.new_tokens: [{json.dumps(end_text.strip())}])" if "<" in end_text else "Correct it"
        raise ModelError(
            f"The chat template ends the assistant's turn with {end_text!r}, which is no special token of this tokenizer: a model trained "
            f"so never learns to stop. {add}, or name another in model.chat_template (`plain` ends a turn with the tokenizer's own end)."
        )
    beginning = tokenizer(rendered.text, add_special_tokens=False)["input_ids"][:2]
    if beginning == [tokenizer.bos_token_id] * 2:
        raise ModelError(
            f"The chat template begins a conversation with {tokenizer.bos_token} twice. Correct it, or name another in model.chat_template."
        )
    return int(ids[-1])


def note_on_headers(tokenizer: Any) -> str | None:
    """Names what the chat template writes for another family's tokenizer; None where there is none."""
    if tokenizer.chat_template is None:
        return None
    written = dict.fromkeys(_HEADERS.findall(_rendered(ChatRenderer(tokenizer), _PROBE).text))
    missing = [name for name in written if name not in tokenizer.get_vocab()]
    if not missing:
        return None
    return (
        f"Note: the chat template writes {', '.join(missing)}, for which this tokenizer has no token: it reads them as plain text. The "
        "template may belong to another model. Name another in model.chat_template, or add the tokens with model.new_tokens."
    )


def check_spans(renderer: ChatRenderer) -> None:
    """Derive the turns of sample conversations a second way, from where their words come to stand, and compare.

    A turn must hold its own answer, which must stand nowhere else in the text, and no other word of the conversation; and after the
    answer there must be an end, the same for all turns but the last, to which some templates give another. It must follow what the
    generation prompt writes, reasoning aside, and not the header of a question.

    Raises:
        ModelError: The template's markers or its shape give other turns, its prompts hold the answers or differ from what is
            trained, or questions and answers have one header.
    """
    system: list[Message] = [{"role": "system", "content": "Be brief."}]
    for first, words in (([], ["1"]), ([], ["1", "2", "3"]), (system, ["1"])):
        messages = first + [
            turn
            for word in words
            for turn in (
                {"role": "user", "content": QUESTION + word},
                {"role": "assistant", "content": ANSWER + word},
            )
        ]
        try:
            rendered = _rendered(renderer, messages)
            asked = range(len(first) + 1, len(messages), 2)
            prompts = [renderer.apply(messages[:end], None, {}, prompt=True)[0] for end in asked]
        except ValueError as error:
            if first:
                continue  # not every template knows a system message; a row that has one says so
            raise ModelError(
                f"Questions and their answers cannot be rendered: {error}. Correct model.chat_template, or name another."
            ) from None
        turns = [rendered.text[start:end] for start, end in rendered.spans]
        ends = [turn.partition(ANSWER + word)[2] for turn, word in zip(turns, words[-len(turns) :], strict=True)]
        alike = all(ends) and len(set(ends[:-1])) <= 1 and not any(ANSWER in end for end in ends)
        if not alike or any(QUESTION in turn for turn in turns):
            raise ModelError(
                f"The chat template's turns are not where its answers are: of {len(words)} question{'s' if len(words) > 1 else ''} with "
                f"answers it gives the turns {turns}. Correct its {{% generation %}} markers, or name another in model.chat_template."
            )
        if any(rendered.text.count(ANSWER + word) != 1 for word in words[-len(turns) :]):
            raise ModelError(
                f"The chat template writes an answer more than once, so that it is in its own prompt: ...{rendered.text[-200:]!r}. Correct "
                "model.chat_template, or name another."
            )
        for (start, end), word, prompt in zip(
            rendered.spans, words[-len(turns) :], prompts[-len(turns) :], strict=True
        ):
            before, prompted, written = (
                text.rpartition(QUESTION + word)[2].partition("<think>")[0]
                for text in (rendered.text[:start], prompt, rendered.text[:end])
            )
            # Where a turn is trained with its header, the prompt ends inside it.
            if not prompted.startswith(before) or not written.startswith(prompted):
                raise ModelError(
                    f"The chat template writes {before!r} between a question and the answer that is trained, but its generation prompt "
                    f"writes {prompted!r}: the model would never be prompted as it was trained. Correct add_generation_prompt in "
                    "model.chat_template, or name another."
                )
        # Templates without headers, which separate turns by a token alone, are fine.
        header = _between(rendered.text, ANSWER + "1", QUESTION + "2").removeprefix(ends[0])
        header = header.removeprefix(renderer.tokens.get("bos_token") or "")
        if any(map(str.isalnum, header)) and _between(rendered.text, QUESTION + "2", ANSWER + "2").endswith(header):
            raise ModelError(
                f"The chat template writes {header!r} before questions and before answers: the model cannot see who speaks. Correct "
                "model.chat_template, or name another."
            )


def _between(text: str, left: str, right: str) -> str:
    return text.partition(left)[2].partition(right)[0]


def _rendered(renderer: ChatRenderer, messages: list[Message]) -> Rendered:
    """All turns, or where the template changes earlier ones the last: such a template can train that one."""
    try:
        return renderer.render(messages)
    except ValueError:
        return renderer.render(messages, trained=[False] * (len(messages) - 1) + [True])
