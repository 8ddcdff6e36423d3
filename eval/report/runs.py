"""Several runs in one page, compare.html: what differs in what was asked for, how they went, what they scored.

The first run named is the one that the others are compared with. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.compare.gate import gate_in_words
from eval.report.blocks import (
    Block,
    Code,
    Key,
    Line,
    Link,
    Notice,
    Page,
    Paragraph,
    Section,
    Strong,
    Table,
    facts,
    joined,
    words,
)
from eval.report.html import as_html
from eval.report.results import Recorded, mapping, read_run
from eval.report.runs_evaluation import Keyed, cell, evaluation_part, not_comparable
from eval.report.runs_training import curves_part, final_part
from eval.report.training import data_line, method, model_line
from eval.report.write import write_page
from sft.errors import RunError
from sft.recipe.changes import differences, is_same_training
from sft.run.directory import find_run

MOST_RUNS = 10
COUNTS_NOT = (
    "“Does not count”: the training is the same with another value, as such a key says where the run is written, how it is watched, "
    "saved, resumed or evaluated, or when it ends for lack of time."
)
LETTERS = "ABCDEFGHIJ"
USAGE = (
    "python -m eval.report RUN writes the report of one run; python -m eval.report RUN_A RUN_B ... [--output compare.html] "
    f"compares 2 to {MOST_RUNS}"
)


def compare_runs(arguments: Sequence[str]) -> Path:
    """Write the page that compares the runs that the arguments name.

    Args:
        arguments: 2 to 10 folders of runs; `--output FILE.html` for another place than the folder that holds them all.

    Returns:
        The page.

    Raises:
        RunError: The command line, a folder, or where the page should be written.
    """
    names, output = _parse(arguments)
    if not 2 <= len(names) <= MOST_RUNS:
        raise RunError(f"{len(names)} runs are named. {USAGE}.")
    found = [find_run(Path(name)) for name in names]
    for place, run in enumerate(found):
        if run in found[:place]:
            first = names[found.index(run)]
            raise RunError(f"{first} and {names[place]} are the same run, {run.path}. Name each run once.")
    common = Path(os.path.commonpath([run.path.parent for run in found]))
    page = (output or common / "compare.html").expanduser().absolute()
    if page.suffix != ".html":
        raise RunError(f"--output {page} does not end in .html: what is written there is a page.")
    if not page.parent.is_dir():
        raise RunError(f"{page} cannot be written: there is no folder {page.parent}.")
    write_page(page, as_html(make_comparison([read_run(run) for run in found], page.parent)))
    return page


def _parse(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    names, output, rest = [], None, list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--output="):
            output = Path(word.removeprefix("--output="))
        elif word == "--output" and rest:
            output = Path(rest.pop(0))
        elif word.startswith("-"):
            raise RunError(f"'{word}' is no option, or lacks its value. {USAGE}.")
        else:
            names.append(word)
    return names, output


def make_comparison(runs: Sequence[Recorded], folder: Path) -> Page:
    """The page, in no format yet.

    Args:
        runs: At least two.
        folder: Where the page will be: links start there.
    """
    keyed = [(Key(LETTERS[place], f"c{place}"), of) for place, of in enumerate(runs)]
    names = dict.fromkeys(words(of.record.get("recipe") or of.run.path.parent.name) for of in runs)
    sections = [
        Section("Runs", _runs(keyed, folder)),
        Section("What differs", _differs(keyed)),
        Section("Evaluation", evaluation_part(keyed)),
        Section("Curves", curves_part(keyed)),
        Section("Final numbers", final_part(keyed)),
    ]
    return Page(f"{len(runs)} runs compared", [", ".join(names)], _attention(keyed), sections)


def _attention(runs: Keyed) -> list[Block]:
    told: dict[str, list[Line]] = {}
    for key, of in runs:
        if of.record.get("status") != "finished":
            ended = words(of.record.get("status"))
            told.setdefault(f"not finished ({ended}): the numbers are those so far.", []).append(key)
        if of.comparison and (mapping(of.comparison, "not_measured") or not of.comparison.get("complete")):
            told.setdefault("the evaluation is incomplete.", []).append(key)
    others: list[Line] = list(not_comparable(runs))
    if others:
        told["measured under other settings than the first: the scores are not comparable."] = others
    lines = [joined([joined(keys), sentence], ": ") for sentence, keys in told.items()]
    return [Notice("warning", "Worth knowing", lines)] if lines else []


TOLD: dict[str, Callable[[Recorded], Line]] = {
    "Model": model_line,
    "Trained": lambda of: method(of.recipe),
    "Data": data_line,
}
"""What is said once where it is the same in all runs."""


def _runs(runs: Keyed, folder: Path) -> list[Block]:
    own = {name: told for name, told in TOLD.items() if any(told(of) != told(runs[0][1]) for _, of in runs)}
    rows: list[list[Line]] = []
    for key, of in runs:
        page = of.run.page_file
        report: Line = Link("report.html", os.path.relpath(page, folder)) if page.is_file() else "not written yet"
        started = words(of.record.get("started"))[:16].replace("T", " ")
        rows.append(
            [key, of.name, words(of.record.get("status")), started, *(told(of) for told in own.values()), report]
        )
    same: dict[str, Line] = {name: told(runs[0][1]) for name, told in TOLD.items() if name not in own}
    table = Table(["", "Run", "Status", "Started", *own, "Report"], rows)
    return [table, Paragraph("The same in all:"), facts(same)] if same else [table]


def _values(of: Recorded) -> dict[str, dict[str, Any]]:
    """What two runs may differ in, by what it is about; empty where it is not recorded."""
    recipe = mapping(of.record, "recipe_values")
    if not recipe and of.recipe is not None:
        recipe = of.recipe.model_dump(mode="json")
    fingerprint = of.record.get("data_fingerprint")
    prepared = {"fingerprint": str(fingerprint)[:12]} if fingerprint else {}
    return {
        "Recipe": recipe,
        "Plan": {words(one.get("name")): one.get("value") for one in of.decisions},
        "Data": prepared | mapping(of.ledger, "total"),
        "Hardware": mapping(of.record, "hardware"),
        "Versions": mapping(of.record, "versions"),
        "Program": mapping(of.record, "git"),
    }


def _differs(runs: Keyed) -> list[Block]:
    values = [_values(of) for _, of in runs]
    blocks: list[Block] = []
    same: list[str] = []
    for name in values[0]:
        known = [(key, one[name]) for (key, _), one in zip(runs, values, strict=True) if one[name]]
        rows = _differing(known, name == "Recipe")
        if rows:
            blocks += [Paragraph(Strong(name)), Table(["Key", *(key for key, _ in known)], rows)]
            blocks += (
                [Paragraph(COUNTS_NOT)]
                if name == "Recipe" and any(isinstance(row[0], tuple) and row[0][1] for row in rows)
                else []
            )
        elif len(known) == len(runs):
            same.append(name.lower())
        unknown: list[Line] = [key for key, _ in runs if key not in [one for one, _ in known]]
        if unknown:
            blocks.append(Paragraph(joined([f"{name}: not recorded for", joined(unknown)], " ")))
    if same:
        blocks.append(Paragraph(f"The same in all: {', '.join(same)}."))
    return blocks


def _differing(known: Sequence[tuple[Key, dict[str, Any]]], is_recipe: bool) -> list[list[Line]]:
    """A row for each key that is not the same in all."""
    found: dict[str, dict[Key, Any]] = {}
    for key, values in known[1:]:
        for change in differences(known[0][1], values):
            found.setdefault(change.key, {known[0][0]: change.old})[key] = change.new
    rows: list[list[Line]] = []
    for name, by_run in sorted(found.items()):
        beside = " (does not count)" if is_recipe and is_same_training(name) else ""
        rows.append([(Code(name), beside), *(_told(name, by_run.get(key, by_run[known[0][0]])) for key, _ in known)])
    return rows


def _told(name: str, value: object) -> str:
    return gate_in_words(value) if name == "eval.gate" and isinstance(value, dict) else cell(value)
