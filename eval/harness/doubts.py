"""Warns where most of a tuned model's answers are cut off at their limit, so that the score says little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

FEWEST = 5
"""Answers below which a share of them says little."""

SHORT = 8
"""Tokens of an answer that may be meant to end at its limit, as a letter does."""


def cut_off(
    tasks: Sequence[ConfigurableTask],
    samples: dict[str, list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> str | None:
    """A sentence where most answers to a task, group or tag reach max_gen_toks; else None."""
    number = cut = 0
    for task in tasks:
        limit = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
        if task.get_config("output_type") != "generate_until" or limit < SHORT:
            continue
        of_task = samples[str(task.task_name)]
        # lm_eval has one sample for each filter.
        answers = [str(one["resps"][0][0]) for one in of_task if one["filter"] == of_task[0]["filter"]] or [""]
        number += len(answers)
        # An answer's text may have fewer tokens than were generated.
        cut += sum(len(ids) > 0.9 * limit for ids in tokenizer(answers, add_special_tokens=False)["input_ids"])
    if number < FEWEST or cut <= number / 2:
        return None
    return (
        f"{cut} of {number} answers to {name} are cut off at max_gen_toks. Raise eval.max_gen_toks, or see whether the model stops at "
        "all (docs/chat.md)."
    )
