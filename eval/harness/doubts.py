"""Warns of tasks that measure nothing, by the samples that lm_eval returns: cut, empty or unread answers, one answer that is always right.

Nothing is refused here: eval/tasks/load.py refuses what can only be a mistake. lm_eval's own tasks are warned of by their answers alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eval.tasks.load import compares_choices, is_own

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

Sample = dict[str, Any]

FEWEST = 5
"""Answers below which a share of them says little."""

FEWEST_ALIKE = 8
"""Documents that are not of one class by chance."""

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
    found = [doubt for task in tasks if is_own(task) for doubt in _document_doubts(task, samples[str(task.task_name)])]
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


def _document_doubts(task: ConfigurableTask, samples: Sequence[Sample]) -> list[str]:
    """What the documents of a user's task can hardly mean."""
    samples = _once(samples)
    name, number = task.task_name, len(samples)
    found = []
    copies = number - len({str(sample["arguments"]) for sample in samples})
    if number >= FEWEST and copies >= 0.1 * number:
        found.append(f"{name}: {copies} of {number} documents repeat an earlier one. Remove the copies.")
    if compares_choices(task) and number >= FEWEST_ALIKE:
        targets = [(sample["target"], task.doc_to_choice(sample["doc"])) for sample in samples]
        right = {str(choices[target] if isinstance(target, int) else target) for target, choices in targets}
        if len(right) == 1:
            found.append(
                f"{name}: {right.pop()!r} is right in all {number} documents, so that one answer to everything scores 1. Check "
                "doc_to_target and the order of the documents."
            )
    return found


def _count_answers(
    task: ConfigurableTask, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase
) -> Counter[str]:
    """How many answers there are, and how many are cut off, empty, or not read by any filter."""
    first = _once(samples)
    answers = [str(answer) for sample in first for answer in sample["resps"][0]]
    limit = (task.get_config("generation_kwargs") or {}).get("max_gen_toks")
    counts = Counter(answers=len(answers), documents=len(first), unread=_unread(task, samples))
    counts["empty"] = sum(not answer.strip() for answer in answers)
    if isinstance(limit, int) and limit >= SHORT and answers:
        lengths = [len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"]]
        counts["cut"] = sum(length > 0.9 * limit for length in lengths)  # decoded, it may have fewer tokens
    return counts


def _unread(task: ConfigurableTask, samples: Sequence[Sample]) -> int:
    """Documents in whose answers no regular expression of the filters finds anything."""
    fallbacks = {
        str(one.get("name")): {
            str(step.get("fallback", "[invalid]"))
            for step in one.get("filter") or []
            if "regex" in str(step.get("function"))
        }
        for one in task.get_config("filter_list") or []
    }
    unread: dict[Any, bool] = {}
    for sample in samples:
        found = sample["filtered_resps"][0]
        found = found[0] if isinstance(found, list) and found else found
        nothing = str(found) in fallbacks.get(str(sample["filter"]), ())
        unread[sample["doc_id"]] = unread.get(sample["doc_id"], True) and nothing
    return sum(unread.values())


def _once(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each document: lm_eval has one for each filter."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
