"""Warns of tasks that measure nothing, by the answers that lm_eval returns: most are cut, empty, or not read by any filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

Sample = dict[str, Any]

FEWEST = 5
"""Answers below which a share of them says little."""

SHORT = 8
"""Tokens of an answer that may be meant to end at its limit, as a letter does."""


def doubts(
    tasks: Sequence[ConfigurableTask],
    samples: dict[str, list[Sample]],
    tokenizer: PreTrainedTokenizerBase,
    label: str,
    name: str,
) -> list[str]:
    """What can hardly be meant in a task, group or tag that was measured, as sentences; the label is the model's."""
    found: list[str] = []
    counts: Counter[str] = Counter()
    for task in tasks:
        if task.get_config("output_type") == "generate_until":
            counts += _count_answers(task, samples[str(task.task_name)], tokenizer)
    number = counts["answers"]
    if number < FEWEST:
        return found
    # A base model seldom stops: that is what training teaches.
    if counts["cut"] > number / 2 and label != "base":
        found.append(
            f"{label}: {counts['cut']} of {number} answers to {name} are cut off at max_gen_toks. Raise eval.max_gen_toks, or see "
            "whether the model stops at all (docs/chat.md)."
        )
    if counts["empty"] >= 0.9 * number:
        found.append(
            f"{label}: {counts['empty']} of {number} answers to {name} are empty. Check its prompt and its `until`."
        )
    elif counts["unread"] >= 0.9 * counts["documents"]:
        found.append(
            f"{label}: the filters of {name} find nothing in {counts['unread']} of {counts['documents']} answers. Check filter_list, and "
            "how the prompt asks for the answer's form."
        )
    return found


def _count_answers(
    task: ConfigurableTask, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase
) -> Counter[str]:
    """How many answers there are, and how many are cut off, empty, or not read by any filter."""
    first = _once(samples)
    answers = [str(answer) for sample in first for answer in sample["resps"][0]]
    limit = (task.get_config("generation_kwargs") or {}).get("max_gen_toks")
    counts = Counter(answers=len(answers), documents=len(first), unread=_unread(samples))
    counts["empty"] = sum(not answer.strip() for answer in answers)
    if isinstance(limit, int) and limit >= SHORT and answers:
        lengths = [len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"]]
        counts["cut"] = sum(length > 0.9 * limit for length in lengths)  # decoded, it may have fewer tokens
    return counts


def _unread(samples: Sequence[Sample]) -> int:
    """Documents in whose answers no regular expression of the filters finds anything: lm_eval writes `[invalid]`."""
    unread: dict[Any, bool] = {}
    for sample in samples:
        unread[sample["doc_id"]] = unread.get(sample["doc_id"], True) and "[invalid]" in str(
            sample["filtered_resps"][0]
        )
    return sum(unread.values())


def _once(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each document: lm_eval has one for each filter."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
