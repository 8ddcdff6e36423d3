"""report.md and report.html: what a person reads of a run. Everything in them is read from the run's folder.

    python -m eval.report outputs/qwen3b/latest                   # write them again
    python -m eval.report outputs/qwen3b/a outputs/qwen3b/b       # compare 2 to 10 runs in one page, compare.html
    python -m eval.report outputs/a/1 outputs/b/1 --output x.html # the page somewhere else

What the folder does not hold is said to be missing. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eval.report.answers import chat_failed, chat_section, flips_section
from eval.report.blocks import Block, Line, Notice, Page, Section, joined, number, words
from eval.report.curve import draw_curve
from eval.report.data import adds_up, balance_line, data_section
from eval.report.environment import again_section, environment_section, hardware_line, plan_section
from eval.report.evaluation import contaminated, evaluation_section, settings_section, verdict_head
from eval.report.html import as_html
from eval.report.markdown import as_markdown
from eval.report.results import Recorded, entries, get, is_number, listed, mapping, read_run
from eval.report.training import data_line, during_section, model_line, training_section, what_section
from eval.report.write import write_page
from sft.errors import RunError
from sft.run.directory import Run, find_run

ENDINGS = {
    "running": "has not finished; this is what it has recorded so far",
    "failed": "failed; this is what it had recorded by then",
    "interrupted": "was interrupted; this is what it had recorded by then",
}

SECTIONS: dict[str, Callable[[Recorded], list[Block]]] = {
    "Evaluation": evaluation_section,
    "What was trained": what_section,
    "Chat samples": chat_section,
    "Documents that flipped": flips_section,
    "Training": training_section,
    "Evaluation during training": during_section,
    "Data": data_section,
    "Plan": plan_section,
    "Environment": environment_section,
    "Settings of the evaluation": settings_section,
    "To run it again": again_section,
}
"""A section without anything to say is left out."""


def _ending(of: Recorded) -> list[Block]:
    if of.record.get("status") == "finished":
        return []
    told = ENDINGS.get(str(of.record.get("status")), "has no status on record; this is what its folder holds")
    return [Notice("bad", f"The run {told}.", [words(of.record["error"])] if of.record.get("error") else [])]


def _attention(of: Recorded) -> list[Block]:
    """What is easily overlooked further down, in one place; nothing where all is well."""
    comparison, tokens = of.comparison, mapping(of.ledger, "total", "tokens")
    lines: list[Line] = [
        words(message) for key in mapping(of.record, "warnings") for message in listed(of.record, "warnings", key)
    ]
    if comparison and (mapping(comparison, "not_measured") or not comparison.get("complete")):
        names = ", ".join(mapping(comparison, "not_measured")) or "not recorded"
        lines.append(f"The evaluation is incomplete; not measured: {names}.")
    cut = ", ".join(map(words, listed(comparison, "prompts_cut")))
    if cut:
        lines.append(f"Prompts lost their beginning, as they were longer than the context: {cut}.")
    row = f"{number(get(comparison, 'contamination', 'ngram'))} words in a row"
    found = {task: counts for task, counts in contaminated(comparison).items() if counts[0]}
    lines += [
        f"{found:,} of {documents:,} documents of {task} share {row} with the training data."
        for task, (found, documents) in found.items()
    ]
    if chat_failed(of.chat):
        lines.append(
            "The tuned model's answers to the fixed prompts did not all end by themselves, or were empty, or looped."
        )
    faults = entries(of.record, "nonfinite")
    if faults:
        lines.append(f"The loss or gradient was not finite at {len(faults)} step{'s' if len(faults) > 1 else ''}.")
    counts = [count for fate in ("in", "truncated", "dropped") if is_number(count := tokens.get(fate))]
    if len(counts) == 3 and sum(counts[1:]) > 0.01 * counts[0]:
        lines.append(f"{sum(counts[1:]):,} of {counts[0]:,} tokens were cut off or dropped: see Data.")
    if adds_up(of.ledger) is False:
        lines.append(balance_line(of.ledger))
    passed_over = [name for one in entries(of.record, "sessions") for name in mapping(one, "passed_over")]
    if passed_over:
        lines.append(f"Checkpoints that were damaged and passed over: {', '.join(passed_over)}.")
    return [Notice("warning", "Worth knowing", lines)] if lines else []


def make_page(of: Recorded) -> Page:
    """The whole report, in no format yet."""
    started = words(of.record.get("started"))[:10]
    under = joined([model_line(of), data_line(of), hardware_line(of.record.get("hardware")), started], " · ")
    sections = [Section(title, blocks) for title, section in SECTIONS.items() if (blocks := section(of))]
    return Page(of.name, [under], [*_ending(of), *verdict_head(of), *_attention(of)], sections)


def write_report(run: Run) -> Path:
    """Write report.md and report.html, and loss.png beside them where there are logged steps.

    Args:
        run: Any run, finished or not.

    Returns:
        The path of report.md.

    Raises:
        RunError: The folder cannot be written.
    """
    of = read_run(run)
    page = make_page(of)
    try:
        if of.metrics:
            draw_curve(of.metrics, of.name, run.path / "loss.png")
    except OSError as error:
        raise RunError(f"The report cannot be written: {error}.") from None
    write_page(run.report_file, as_markdown(page))
    write_page(run.page_file, as_html(page))
    return run.report_file


def main(arguments: list[str]) -> None:
    """Write the report of one run, or the comparison of several."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        from eval.report.runs import compare_runs

        print(compare_runs(arguments))
        return
    run = find_run(Path(arguments[0]))
    print(write_report(run), run.page_file, sep="\n")
