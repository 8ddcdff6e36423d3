"""Finds the documents that only one of the two models answers right, for reading: eval/flips.jsonl, one per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.compare.pairs import Pairs
from eval.compare.results import Samples
from eval.compare.verdicts import Metric, Row
from sft.files import write_text

Sample = dict[str, Any]


def texts_in(value: object) -> Iterator[str]:
    """The texts inside a document of lm_eval."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_in(one)


def _requests(sample: Sample) -> list[list[str]]:
    """Prompt and continuation of each request, or prompt and generation settings."""
    return [[str(part) for part in request.values()] for request in sample["arguments"].values()]


def _options(sample: Sample) -> list[str]:
    """The choices of a multiple-choice document; empty where the answer was generated."""
    requests, responses = _requests(sample), sample["filtered_resps"]
    if len(requests) < 2 or not all(isinstance(one, list) and len(one) == 2 for one in responses):
        return []
    endings = [request[1].strip() for request in requests]
    # Tasks such as winogrande put the options into the prompt, and have one ending for all.
    return endings if len(set(endings)) > 1 else [request[0][-200:] for request in requests]


def question(sample: Sample) -> str:
    """The document's own texts in the prompt, without template and examples; else the prompt's end."""
    prompt = _requests(sample)[0][0] if sample["arguments"] else ""
    texts = [text.strip() for text in texts_in(sample["doc"]) if len(text.split()) > 2]
    return "\n".join(dict.fromkeys(text for text in texts if text in prompt)) or prompt[-2000:]


def _first(value: object) -> str:
    while isinstance(value, list) and value:
        value = value[0]
    return str(value)


def answer(sample: Sample, metric: str) -> str:
    """What the model answered: the likeliest option, or its words and what a filter took of them."""
    options = _options(sample)
    if options:
        lengths = [max(1, len(option)) if metric == "acc_norm" else 1 for option in options]
        chances = [float(one[0]) / length for one, length in zip(sample["filtered_resps"], lengths, strict=True)]
        return options[chances.index(max(chances))]
    answered, taken = _first(sample["resps"]), _first(sample["filtered_resps"])
    return answered if taken.strip() == answered.strip() else f"{answered}\n[taken as the answer: {taken}]"


def target(sample: Sample) -> str:
    """The right answer: the option's text, where it is given by number."""
    options, right = _options(sample), str(sample["target"])
    return options[int(right)] if options and right.isdecimal() and int(right) < len(options) else right


def _flips_of(task: str, row: Row, pairs: Pairs, sides: tuple[list[Sample], list[Sample]]) -> Iterator[Row]:
    """The documents of one task that one model has right and the other has not."""
    by_id = [{one["doc_id"]: one for one in side if one["filter"] == row["filter"]} for side in sides]
    for document, base, tuned in zip(pairs.documents, *pairs.sums.tolist(), strict=True):
        if base != tuned:
            before, after = by_id[0][document], by_id[1][document]
            yield {
                "task": row["task"],
                "subtask": None if task == row["task"] else task,
                "doc_id": document,
                "direction": "gained" if (tuned > base) == row["higher_is_better"] else "lost",
                "metric": row["metric"],
                "filter": row["filter"],
                "question": question(after),
                "target": target(after),
                "base": answer(before, row["metric"]),
                "tuned": answer(after, row["metric"]),
                "base_score": base,
                "tuned_score": tuned,
            }


def find_flips(metrics: list[Metric], samples: tuple[Samples, Samples]) -> tuple[list[Row], dict[str, Row]]:
    """Find every document that only one of the models has right: the lines of flips.jsonl, and by task the metric and the counts.

    The metric is the one that decides or, where that is not 0 or 1, the first that is.
    """
    lines: list[Row] = []
    counts: dict[str, Row] = {}
    deciding = {metric.row["task"] for metric in metrics if metric.row["decides"]}
    for row, paired in sorted(((one.row, one.paired) for one in metrics), key=lambda one: not one[0]["decides"]):
        parts = {} if paired is None else paired.parts
        known = row["task"] in deciding and row["task"] not in counts and row["higher_is_better"] is not None
        flipped: list[Row] = []
        for task, pairs in parts.items():
            if known and pairs.right_or_wrong:
                flipped += _flips_of(task, row, pairs, (samples[0][task], samples[1][task]))
        if flipped:
            lost = sum(line["direction"] == "lost" for line in flipped)
            counts[row["task"]] = {"metric": row["metric"], "gained": len(flipped) - lost, "lost": lost}
            lines += flipped
    return lines, counts


def write_flips(lines: list[Row], path: Path) -> None:
    """Write flips.jsonl; it is empty where nothing flipped."""
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
