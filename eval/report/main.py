"""Writes report.md and report.html from what a run directory holds. Imports no torch.

python -m eval.report outputs/qwen3b/latest                   # write them again
python -m eval.report outputs/qwen3b/a outputs/qwen3b/b       # compare 2 to 10 runs on one page, compare.html
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eval.report.charts import draw_curve
from eval.report.collect import collect_report
from eval.report.pages import as_html, as_markdown
from eval.report.run_files import read_run
from sft.credentials import redact
from sft.errors import RunError
from sft.files import write_text
from sft.run.directory import Run, find_run


def write_report(run: Run) -> Path:
    """Write report.md and report.html of any run, and loss.png beside them where steps were logged; returns the path of report.md.

    Raises:
        RunError: The directory cannot be written.
    """
    files = read_run(run)
    report = collect_report(files)
    with _one_message():
        if files.metrics:
            draw_curve(files.metrics, files.name, run.path / "loss.png")
        write_text(run.report_file, redact(as_markdown(report)))
        write_text(run.page_file, redact(as_html(report)))
    return run.report_file


@contextmanager
def _one_message() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"The report cannot be written: {error}.") from None


def compare_runs(names: list[str]) -> Path:
    """Write compare.html, which compares 2 to 10 runs with the first, into the directory that holds all of them.

    Raises:
        RunError: A name is no run, or the page cannot be written.
    """
    from eval.report.runs import LETTERS, collect_runs

    if len(names) > len(LETTERS):
        raise RunError(f"{len(names)} runs were given. Give one for its report, or 2 to {len(LETTERS)} to compare.")
    runs = [find_run(Path(name)) for name in names]
    page = Path(os.path.commonpath([run.path.parent for run in runs])) / "compare.html"
    with _one_message():
        write_text(page, redact(as_html(collect_runs([read_run(run) for run in runs], page.parent))))
    return page


def main(arguments: list[str]) -> None:
    """Write the report of one run, or the comparison of several."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="run directories: one for its report, 2 to 10 to compare")
    names = parser.parse_args(arguments).runs
    if len(names) > 1:
        print(compare_runs(names))
        return
    run = find_run(Path(names[0]))
    print(write_report(run), run.page_file, sep="\n")
