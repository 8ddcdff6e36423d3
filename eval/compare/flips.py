"""Finds the documents that only one of the two models answers right, for reading: eval/flips.jsonl, one per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.compare.contamination import texts_in
from eval.compare.pairs import pair
from eval.compare.results import Results, Samples, leaves, metric_keys
from sft.files import write_text

MOST_CHARACTERS = 4_000
"""Of a question or an answer; what is cut is said in it."""

Sample = dict[str, Any]


def shorten(text: str, keep_end: bool = False) -> str:
    """A text of at most MOST_CHARACTERS, and how much of it is not shown.

    Args:
        text: A question or an answer.
        keep_end: Keep its end: a prompt ends with the question.
    """
    more = len(text) - MOST_CHARACTERS
    if more <= 0:
        return text
    told = f"[{more:,} characters are not shown]"
    return f"{told}\n{text[-MOST_CHARACTERS:]}" if keep_end else f"{text[:MOST_CHARACTERS]}\n{told}"


def _arguments(sample: Sample) -> list[list[str]]:
    """The requests: prompt and continuation, or prompt and generation settings."""
    return [[str(part) for part in request.values()] for request in sample["arguments"].values()]


def _options(sample: Sample) -> list[str]:
    """The choices of a multiple-choice document; empty where the answer was generated."""
    requests, responses = _arguments(sample), sample["filtered_resps"]
    if len(requests) < 2 or not all(isinstance(one, list) and len(one) == 2 for one in responses):
        return []
    endings = [request[1].strip() for request in requests]
    # Tasks such as winogrande put the options into the prompt, and have one ending for all.
    return endings if len(set(endings)) > 1 else [request[0][-200:] for request in requests]


def question(sample: Sample) -> str:
    """The document's own words in the prompt, in their order there, without template and examples; else the prompt's end."""
    prompt = _arguments(sample)[0][0] if sample["arguments"] else ""
    found = {text.strip(): prompt.rfind(text.strip()) for text in texts_in(sample["doc"]) if len(text.split()) > 2}
    places = {text: place for text, place in found.items() if place >= 0}
    whole = [text for text in places if not any(text != other and text in other for other in places)]
    if whole:
        return shorten("\n".join(sorted(whole, key=places.__getitem__)), keep_end=True)
    return shorten(prompt, keep_end=True)


def _chosen(sample: Sample, options: list[str], metric: str) -> str:
    """The option that the model took: the likeliest, for acc_norm by the length of its text."""
    logprobs = [float(one[0]) for one in sample["filtered_resps"]]
    if metric == "acc_norm":
        lengths = [max(1, len(option)) for option in options]
        logprobs = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
    return options[max(range(len(options)), key=logprobs.__getitem__)]


def _first(value: object) -> str:
    while isinstance(value, list) and value:
        value = value[0]
    return str(value)


def answer(sample: Sample, metric: str) -> str:
    """What the model said: the option it chose; or its words, and what of them was taken as the answer."""
    options = _options(sample)
    if options:
        return shorten(_chosen(sample, options, metric))
    said, taken = _first(sample["resps"]), _first(sample["filtered_resps"])
    several = len(sample["resps"][0]) if sample["resps"] and isinstance(sample["resps"][0], list) else 1
    lines = [shorten(said)]
    if several > 1:
        lines.append(f"[the first of {several} answers]")
    if taken.strip() != said.strip():
        lines.append(f"[taken as the answer: {shorten(taken)}]")
    return "\n".join(lines)


def target(sample: Sample) -> str:
    """The right answer: the option's text, where it is given by number."""
    options, right = _options(sample), str(sample["target"])
    return options[int(right)] if options and right.isdecimal() and int(right) < len(options) else shorten(right)


def _flips_of(
    task: str, row: Results, key: str, sides: tuple[list[Sample], list[Sample]], results: tuple[Results, Results]
) -> list[Results]:
    pairs = pair(*sides, key, (results[0]["results"][task], results[1]["results"][task]))
    if pairs is None or not pairs.right_or_wrong:
        return []
    metric, _, filter_name = key.partition(",")
    by_id = [{one["doc_id"]: one for one in side if one["filter"] == filter_name} for side in sides]
    flipped = []
    for document, base, tuned in zip(pairs.documents, pairs.base, pairs.tuned, strict=True):
        if base == tuned:
            continue
        before, after = by_id[0][document], by_id[1][document]
        better = (tuned > base) == row["higher_is_better"]
        flipped.append(
            {
                "task": row["task"],
                "subtask": None if task == row["task"] else task,
                "doc_id": document,
                "direction": "gained" if better else "lost",
                "metric": metric,
                "filter": filter_name,
                "question": question(after),
                "target": target(after),
                "base": answer(before, metric),
                "tuned": answer(after, metric),
                "base_score": float(base),
                "tuned_score": float(tuned),
            }
        )
    return flipped


def _keys(rows: list[Results], results: Results) -> Iterator[tuple[Results, str]]:
    """For each task the metric that decides; where that is not 0 or 1, the others of the task may be."""
    for row in rows:
        if row["decides"]:
            first = f"{row['metric']},{row['filter']}"
            for key in dict.fromkeys([first, *metric_keys(results["results"][row["task"]])]):
                known = [
                    one for one in rows if one["task"] == row["task"] and f"{one['metric']},{one['filter']}" == key
                ]
                if known and known[0]["higher_is_better"] is not None:
                    yield known[0], key


def find_flips(
    rows: list[Results], base: Results, tuned: Results, base_samples: Samples, tuned_samples: Samples
) -> tuple[list[Results], dict[str, Results]]:
    """Every document that only one of the models has right.

    Args:
        rows: `metrics` of the comparison.
        base: results.json.
        tuned: results.json.
        base_samples: Per task, the lines of its samples file.
        tuned_samples: The same of the tuned model.

    Returns:
        The lines of flips.jsonl, and per task the metric and the counts: by the metric that decides or, where that is not 0 or 1,
        the first that is.
    """
    lines: list[Results] = []
    counts: dict[str, Results] = {}
    for row, key in _keys(rows, tuned):
        task = row["task"]
        if task in counts:
            continue
        parts = [leaf for leaf in leaves(tuned, task) if leaf in base["results"] and leaf in tuned_samples]
        flipped = [
            line
            for leaf in parts
            for line in _flips_of(leaf, row, key, (base_samples.get(leaf, []), tuned_samples[leaf]), (base, tuned))
        ]
        if flipped:
            lost = sum(line["direction"] == "lost" for line in flipped)
            counts[task] = {"metric": row["metric"], "gained": len(flipped) - lost, "lost": lost}
            lines += flipped
    return lines, counts


def write_flips(lines: list[Results], path: Path) -> None:
    """Write flips.jsonl; it is empty where nothing flipped."""
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
