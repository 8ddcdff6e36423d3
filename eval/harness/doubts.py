"""Finds tasks that measure nothing: from the samples that lm_eval returns, what can hardly be meant.

Nothing is refused here: eval/tasks/load.py refuses what can only be a mistake. What is wrong with a task's documents is said
of the user's own tasks alone, since others measure lm_eval's as they are; what is wrong with the answers is said of all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from eval.tasks.load import compares_choices

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

Sample = dict[str, Any]

_FEWEST = 5
"""Documents below which a share of them says little."""

_FEWEST_ALIKE = 8
"""Documents that are not of one class by chance."""

_SHORT = 8
"""Tokens of an answer that may be meant to end at its limit, as a letter does."""


def document_doubts(task: ConfigurableTask, samples: Sequence[Sample]) -> list[str]:
    """What can hardly be meant in a task of the user's, as sentences.

    Args:
        task: As it was measured.
        samples: Its own, from lm_eval.
    """
    samples = _once(samples)
    name, number = task.task_name, len(samples)
    told = []

    def most(found: int, of_all: float = 0.9) -> bool:
        return number >= _FEWEST and found >= of_all * number

    copies = number - min(len(_distinct(samples, key)) for key in ("doc", "arguments"))
    if most(copies, 0.1):
        told.append(
            f"{name}: {copies} of {number} documents repeat an earlier one, which counts as one more. Remove the copies."
        )
    if compares_choices(task):
        told += _choice_doubts(task, samples, most)
    if task.get_config("output_type") == "generate_until":
        told += _target_doubts(task, samples, most)
    examples = task.get_config("num_fewshot")
    if examples and task.fewshot_cfg.split is not None and task.fewshot_cfg.split == task.config.test_split:
        told.append(
            f"{name}: its {examples} examples come from the documents that it measures "
            f"({task.config.test_split}). Give it a fewshot_split of others."
        )
    return told


def _choice_doubts(task: ConfigurableTask, samples: list[Sample], most: Callable[..., bool]) -> list[str]:
    choices = [[str(choice) for choice in task.doc_to_choice(sample["doc"])] for sample in samples]
    golds = [
        offered[gold] if isinstance(gold, int) else gold
        for sample, offered in zip(samples, choices, strict=True)
        if isinstance(gold := sample["target"], int | str)
    ]
    told = []
    if len(golds) == len(samples) >= _FEWEST_ALIKE and len(set(golds)) == 1:
        told.append(
            f"{task.task_name}: {golds[0]!r} is right in all {len(samples)} documents, so that one answer to everything scores 1. Check "
            "doc_to_target and the order of the documents."
        )
    twice = sum(len(set(offered)) < len(offered) for offered in choices)
    if most(twice, 0.1):
        told.append(
            f"{task.task_name}: {twice} of {len(samples)} documents offer the same choice twice, of which lm_eval takes the first. Check "
            "doc_to_choice."
        )
    return told


def _target_doubts(task: ConfigurableTask, samples: list[Sample], most: Callable[..., bool]) -> list[str]:
    name, number, given = task.task_name, len(samples), task.get_config("generation_kwargs") or {}
    told = []
    targets = [sample["target"] for sample in samples if isinstance(sample["target"], str)]
    # Few targets for many documents are labels, which a prompt may list.
    shown = sum(
        len(target := str(sample["target"]).strip()) >= _SHORT and f"\n{target}\n" in f"\n{_prompt(sample)}\n"
        for sample in samples
    )
    if most(shown) and len(set(targets)) > number / 2:
        told.append(
            f"{name}: the prompt shows the answer on a line of its own in {shown} of {number} documents. Check doc_to_text."
        )
    ends = Counter(text for target in targets for text in _until(given) if text and text in target)
    never = sum(any(text in target for text in ends) for target in targets)
    exact = [metric for metric in task.get_config("metric_list") or [] if metric.get("metric") == "exact_match"]
    computed = callable(task.get_config("process_results")) or any(metric.get("regexes_to_ignore") for metric in exact)
    if exact and not computed and most(never):
        told.append(
            f"{name}: in {never} of {number} documents the target contains a text that ends each answer (`until`: "
            f"{', '.join(repr(text) for text, _ in ends.most_common(3))}): none can equal it. Check doc_to_target."
        )
    if given.get("do_sample") and given.get("temperature") != 0 and task.get_config("repeats") in (None, 1):
        told.append(
            f"{name} samples one answer to each document (do_sample: true): each measurement gives other scores."
        )
    return told


def answer_doubts(
    tasks: Iterable[ConfigurableTask],
    samples: dict[str, list[Sample]],
    tokenizer: PreTrainedTokenizerBase,
    label: str,
    name: str,
) -> list[str]:
    """What can hardly be meant in the answers to a task or group, as sentences.

    Args:
        tasks: Of the group.
        samples: Of each task, from lm_eval.
        tokenizer: Of the model.
        label: Of the model.
        name: Of the task or group.
    """
    counts: Counter[str] = Counter()
    limits, untils = set(), set()
    for task in tasks:
        given = task.get_config("generation_kwargs") or {}
        limit = given.get("max_gen_toks")
        if task.get_config("output_type") != "generate_until" or not isinstance(limit, int):
            continue
        first = _once(samples.get(str(task.task_name), []))
        if not first:
            continue
        answers = [str(answer) for sample in first for answer in sample["resps"][0]]
        lengths = [len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"]]
        wanted = [str(sample["target"]) for sample in first]
        longer = limit >= _SHORT or sum(
            len(ids) for ids in tokenizer(wanted, add_special_tokens=False)["input_ids"]
        ) > limit * len(wanted)
        counts["all"] += len(answers)
        # The same text may have fewer tokens than were generated.
        counts["cut"] += longer and sum(length > 0.9 * limit for length in lengths)
        counts["empty"] += sum(not answer.strip() for answer in answers)
        counts["unfound"] += _unfound(task, samples.get(str(task.task_name), []))
        counts["documents"] += len(first)
        limits.add(limit)
        untils |= set(_until(given))
    number = counts["all"]
    if number < _FEWEST:
        return []
    told = []
    # A base model seldom stops: that is what the training teaches.
    if counts["cut"] > number / 2 and label != "base":
        told.append(
            f"{label}: {counts['cut']} of {number} answers to {name} are cut off at max_gen_toks={_listed(limits)}. Raise "
            "eval.max_gen_toks, or see whether the model stops at all (docs/chat.md)."
        )
    if counts["empty"] >= 0.9 * number:
        told.append(
            f"{label}: {counts['empty']} of {number} answers to {name} are empty. Check its prompt and its `until` "
            f"({_listed(map(repr, untils))})."
        )
    elif counts["unfound"] >= 0.9 * counts["documents"]:
        told.append(
            f"{label}: the filters of {name} find nothing in {counts['unfound']} of {counts['documents']} answers. Check filter_list, and "
            "how the prompt asks for the answer's form."
        )
    return told


def _unfound(task: ConfigurableTask, samples: Sequence[Sample]) -> int:
    """Documents in whose answers no filter finds anything."""
    fallbacks: dict[str, set[str]] = {}
    for one in task.get_config("filter_list") or []:
        steps = one.get("filter") or []
        finds = [step for step in steps if "regex" in str(step.get("function"))]
        fallbacks[str(one.get("name"))] = {str(step.get("fallback", "[invalid]")) for step in finds}
    by_document: dict[Any, bool] = {}
    for sample in samples:
        found = sample["filtered_resps"][0]
        found = found[0] if isinstance(found, list) and found else found
        none = str(found) in fallbacks.get(str(sample["filter"]), ())
        by_document[sample["doc_id"]] = by_document.get(sample["doc_id"], True) and none
    return sum(by_document.values())


def _once(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each document: lm_eval has one for each filter."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


def _distinct(samples: list[Sample], key: str) -> set[str]:
    return {json.dumps(sample[key], sort_keys=True, default=str) for sample in samples}


def _prompt(sample: Sample) -> str:
    return str(sample["arguments"][0][0])


def _until(given: dict[str, Any]) -> list[str]:
    until = given.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values))) or "empty"
