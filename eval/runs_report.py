"""Several runs in one page, compare.html: what differs in what was asked for, how they went, what they scored.

The first run named is the one that the others are compared with. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.blocks import (
    MISSING,
    Block,
    Charts,
    Code,
    Key,
    Line,
    Link,
    Notice,
    Page,
    Paragraph,
    Section,
    Table,
    code,
    duration,
    joined,
    number,
    words,
)
from eval.chart import Chart, Series, draw
from eval.curve import SMOOTH_FROM, running_mean
from eval.environment_report import hardware_line
from eval.evaluation_report import flattened, interval_of, metric_name, score_of, shown_interval
from eval.html_report import as_html
from eval.recorded import Recorded, entries, get, mapping, read_run
from eval.speed_report import mean_rate
from eval.training_report import column, data_line, method, model_line, series_of
from eval.write import write_page
from sft.diff import counts_not
from sft.errors import RunError
from sft.recipe_changes import MISSING as NOT_THERE
from sft.recipe_changes import differences
from sft.run_directory import find_run

MOST_RUNS = 10
LETTERS = "ABCDEFGHIJ"
USAGE = (
    "python -m eval.report RUN writes the report of one run; python -m eval.report RUN_A RUN_B ... [--output compare.html] "
    f"compares 2 to {MOST_RUNS}"
)

Runs = Sequence[Recorded]


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


def make_comparison(runs: Runs, folder: Path) -> Page:
    """The page, in no format yet.

    Args:
        runs: At least two.
        folder: Where the page will be: links start there.
    """
    names = dict.fromkeys(of.record.get("recipe") or of.run.path.parent.name for of in runs)
    sections = [
        Section("Runs", _runs(runs, folder)),
        Section("What differs", _differs(runs)),
        Section("Evaluation", _evaluation(runs)),
        Section("Curves", _curves(runs)),
        Section("Final numbers", _final(runs)),
    ]
    return Page(f"{len(runs)} runs compared", [", ".join(map(words, names))], _attention(runs), sections)


def _key(place: int) -> Key:
    return Key(LETTERS[place], f"c{place}")


def _keys(runs: Runs) -> list[tuple[Key, Recorded]]:
    return [(_key(place), of) for place, of in enumerate(runs)]


def _attention(runs: Runs) -> list[Block]:
    lines: list[Line] = []
    for key, of in _keys(runs):
        if of.record.get("status") != "finished":
            lines.append((key, f" is not finished ({words(of.record.get('status'))}): its numbers are those so far."))
        if of.comparison and (mapping(of.comparison, "not_measured") or not of.comparison.get("complete")):
            lines.append((key, " has an incomplete evaluation."))
    for key, of in _keys(runs):
        if of.comparison and _reference(runs) is not None and not _alike(of, runs):
            lines.append((key, " was measured under other settings: its scores are not comparable with the others'."))
    return [Notice("warning", "Worth knowing", lines)] if lines else []


def _runs(runs: Runs, folder: Path) -> list[Block]:
    rows: list[list[Line]] = []
    for key, of in _keys(runs):
        page = of.run.page_file
        report: Line = "not written yet"
        if page.is_file():
            report = Link("report.html", os.path.relpath(page, folder))
        method_line = method(of.recipe)
        status = words(of.record.get("status"))
        rows.append(
            [key, of.name, status, model_line(of), method_line, data_line(of), words(of.record.get("started")), report]
        )
    head = ["", "Run", "Status", "Model", "Trained", "Data", "Started", "Report"]
    return [Table(head, rows)]


def _values(of: Recorded) -> dict[str, dict[str, Any]]:
    """What two runs may differ in, by what it is about."""
    recipe = mapping(of.record, "recipe_values")
    if not recipe and of.recipe is not None:
        recipe = of.recipe.model_dump(mode="json")
    decisions = {str(one.get("name")): one.get("value") for one in of.decisions}
    return {
        "Recipe": recipe,
        "Plan": decisions,
        "Data": {"fingerprint": of.record.get("data_fingerprint"), **mapping(of.ledger, "total")},
        "Hardware": mapping(of.record, "hardware"),
        "Versions": mapping(of.record, "versions"),
        "Program": mapping(of.record, "git"),
    }


def _differs(runs: Runs) -> list[Block]:
    values = [_values(of) for of in runs]
    blocks: list[Block] = []
    same: list[str] = []
    for name in values[0]:
        rows, unknown = _differing([one[name] for one in values], name == "Recipe")
        if rows:
            blocks += [Paragraph(f"{name}:"), Table(["Key", *LETTERS[: len(runs)]], rows)]
        elif not unknown:
            same.append(name.lower())
        if unknown:
            letters = joined([_key(place) for place in unknown])
            blocks.append(Paragraph(joined([f"{name}: not recorded for", letters], " ")))
    if same:
        blocks.append(Paragraph(f"The same in all: {', '.join(same)}."))
    return blocks


def _differing(values: list[dict[str, Any]], is_recipe: bool) -> tuple[list[list[Line]], list[int]]:
    """A row for each key that is not the same in all, and the places of the runs that have none recorded."""
    unknown = [place for place, one in enumerate(values) if not one]
    known = [place for place in range(len(values)) if place not in unknown]
    found: dict[str, dict[int, Any]] = {}
    for place in known[1:]:
        for change in differences(values[known[0]], values[place]):
            found.setdefault(change.key, {known[0]: change.old})[place] = change.new
    rows: list[list[Line]] = []
    for key, by_place in sorted(found.items()):
        cells: list[Line] = []
        for place in range(len(values)):
            value = by_place.get(place, by_place[known[0]])
            cells.append(MISSING if place in unknown else _cell(value))
        beside = " (does not count)" if is_recipe and counts_not(key) else ""
        rows.append([(Code(key), beside), *cells])
    return rows, unknown


def _cell(value: Any) -> str:
    if value == NOT_THERE:
        return "-"
    return "none" if value is None else str(value) if not isinstance(value, bool) else words(value)


def _reference(runs: Runs) -> Recorded | None:
    """The first run that was evaluated: the others are comparable where their settings are its."""
    return next((of for of in runs if of.comparison), None)


def _alike(of: Recorded, runs: Runs) -> bool:
    reference = _reference(runs)
    hashes = [get(one and one.comparison, "settings_hash") for one in (of, reference)]
    return hashes[0] is not None and hashes[0] == hashes[1]


def _evaluation(runs: Runs) -> list[Block]:
    measured = [(key, of) for key, of in _keys(runs) if of.comparison]
    if not measured:
        return [Paragraph("None of the runs has a comparison of base and tuned.")]
    blocks: list[Block] = [_scores(measured, runs)]
    blocks.append(
        Paragraph(
            "Scores with their standard errors; difference is tuned - base of the same run, with its 95% interval."
        )
    )
    missing = [key for key, of in _keys(runs) if not of.comparison]
    if missing:
        blocks.append(Paragraph(joined([joined(list(missing)), "not evaluated"], ": ")))
    reference = measured[0][1]
    for key, of in measured[1:]:
        if not _alike(of, runs):
            settings = [flattened(mapping(one.comparison, "settings")) for one in (reference, of)]
            changes = differences(settings[0], settings[1])
            rows: list[list[Line]] = [[Code(change.key), _cell(change.old), _cell(change.new)] for change in changes]
            told: Line = (key, " is not comparable with ", measured[0][0], ": it was measured under other settings.")
            blocks += (
                [Paragraph(told), Table(["Setting", measured[0][0].text, key.text], rows)]
                if rows
                else [Paragraph(told)]
            )
    return blocks


def _scores(measured: list[tuple[Key, Recorded]], runs: Runs) -> Table:
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, of in measured:
        for entry in entries(of.comparison, "metrics"):
            found.setdefault((words(entry.get("task")), metric_name(entry)), {})[key.text] = entry
    rows: list[list[Line]] = []
    for (task, metric), by_run in found.items():
        for key, of in measured:
            if key.text not in by_run:
                continue
            entry = by_run[key.text]
            name: Line = (key, "" if _alike(of, runs) else " not comparable")
            scores = [score_of(entry, "base"), score_of(entry, "tuned")]
            difference = number(entry.get("difference"), "+.4f")
            interval = shown_interval(interval_of(entry))
            documents, verdict = number(entry.get("documents")), words(entry.get("verdict"))
            rows.append([task, metric, name, documents, *scores, difference, interval, verdict])
    head = ["Task", "Metric", "Run", "Documents", "Base", "Tuned", "Difference", "95% interval", "Verdict"]
    return Table(head, rows, numbers=range(3, 8))


def _curve(of: Recorded, key: str, place: int, over: str) -> Series:
    """One run's curve; of many points their mean, as ten faint curves would hide each other."""
    one = series_of(of.metrics, key, LETTERS[place], f"c{place}", over)
    if key in ("loss", "tokens_per_second", "grad_norm") and len(one.x) >= SMOOTH_FROM:
        return Series(one.name, one.x, running_mean(one.y, len(one.x) // 20), one.style)
    return one


def _curves(runs: Runs) -> list[Block]:
    charts: list[Chart] = []
    for title, unit, key, over in (
        ("Loss", "by step", "loss", "step"),
        ("Loss", "by tokens seen", "loss", "tokens_seen"),
        ("Held-out loss", "by step", "held_out_loss", "step"),
        ("Held-out loss", "by tokens seen", "held_out_loss", "tokens_seen"),
        ("Learning rate", "by step", "learning_rate", "step"),
        ("Gradient norm", "before clipping", "grad_norm", "step"),
        ("Throughput", "tokens/s", "tokens_per_second", "step"),
        ("Peak memory", "GiB, first rank", "peak_memory_gib", "step"),
    ):
        curves = [one for place, of in enumerate(runs) if len((one := _curve(of, key, place, over)).x)]
        if curves:
            x_label = "optimizer steps" if over == "step" else "tokens"
            charts.append(draw(title, unit, curves, x_label=x_label, from_zero=key not in ("loss", "held_out_loss")))
    if not charts:
        return [Paragraph("None of the runs has logged an optimizer step.")]
    note = "Loss, gradient norm and throughput of 60 or more logged steps are means over the last twentieth of them."
    return [Charts(charts, note)]


def _final(runs: Runs) -> list[Block]:
    rows: dict[str, list[Line]] = {
        "Last logged step": [number(_last(of).get("step")) for of in runs],
        "Tokens seen": [number(_last(of).get("tokens_seen"), ",.0f") for of in runs],
        "Loss at the last logged step": [_at_last(of, "loss") for of in runs],
        "Mean loss of the training": [number(of.record.get("train_loss"), ".4f") for of in runs],
        "Loss on held-out rows, the last": [_at_last(of, "held_out_loss") for of in runs],
        "Tokens per second": [number(mean_rate(of.metrics), ",.0f") for of in runs],
        "Peak memory, GiB": [number(max(column(of.metrics, "peak_memory_gib"), default=None), ".2f") for of in runs],
        "Time to train": [duration(get(of.record, "timings", "train_seconds")) for of in runs],
        "Sessions": [number(len(entries(of.record, "sessions")) or None) for of in runs],
        "Hardware": [hardware_line(of.record.get("hardware")) for of in runs],
        "Settings of the evaluation": [
            code((str(of.comparison.get("settings_hash") or ""))[:12] or None) for of in runs
        ],
    }
    head = ["", *LETTERS[: len(runs)]]
    return [Table(head, [[name, *cells] for name, cells in rows.items()], numbers=range(1, len(head)))]


def _last(of: Recorded) -> dict[str, Any]:
    return of.metrics[-1] if of.metrics else {}


def _at_last(of: Recorded, key: str) -> str:
    values = column(of.metrics, key)
    return number(values[-1] if values else None, ".4f")
