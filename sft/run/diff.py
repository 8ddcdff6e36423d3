"""Reports what differs between two runs: python -m sft.run.diff RUN_A RUN_B

Recipe, plan, versions, program, hardware and data; then the first step whose batches differ, the first whose loss differs, and the files
of final/. Exit status: 0 the runs are the same, 1 they differ, 2 one of them is not a run.

Names, places, trackers, evaluation, and how often something is written are shown and do not count.
"""

from __future__ import annotations

import filecmp
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import RecipeError
from sft.files import read_json
from sft.program import run_main
from sft.recipe.changes import differences, is_same_training
from sft.run.directory import Run, find_run, read_lines
from sft.terminal import visible_line

_SAME_LOSS = 1e-12


@dataclass(frozen=True)
class Finding:
    """One section of the comparison."""

    title: str
    summary: str
    lines: tuple[str, ...] = ()
    differs: bool = False


def main(argv: Sequence[str]) -> None:
    """Compare, print, and exit."""
    if len(argv) != 2 or any(word.startswith("-") for word in argv):
        raise RecipeError(
            "usage: python -m sft.run.diff RUN_A RUN_B, for example outputs/tiny/latest outputs/tiny/first"
        )
    a, b = (find_run(Path(word)) for word in argv)
    print(f"A: {visible_line(_heading(a))}\nB: {visible_line(_heading(b))}\n")
    findings = compare(a, b)
    for finding in findings:
        lines = [f"{finding.title:<10}{finding.summary}", *(f"  {visible_line(line)}" for line in finding.lines)]
        print("\n".join(lines), flush=True)
    differ = any(finding.differs for finding in findings)
    print(f"\n{'The runs differ.' if differ else 'The runs are the same.'}")
    sys.exit(int(differ))


def compare(a: Run, b: Run) -> list[Finding]:
    """What differs between two runs, section by section."""
    one, other = _facts(a), _facts(b)
    facts = [_compared(title, one[title], other[title]) for title in one]
    return [*facts, steps(a, b), final(a, b)]


def _heading(run: Run) -> str:
    record = run.record
    sessions = len(record.get("sessions", [])) or 1
    steps = max((line["step"] for line in read_lines(run.metrics_file)), default=0)
    return f"{run.path} ({record['status']}, {steps} steps{f', in {sessions} sessions' if sessions > 1 else ''})"


def _facts(run: Run) -> dict[str, dict[str, Any]]:
    """What a run was made of, by section."""
    record, plan = run.record, read_json(run.plan_file)
    decisions = {row["name"]: row["value"] for row in plan["decisions"]}
    ledger = read_json(run.ledger_file).get("total", {}) if run.ledger_file.exists() else {}
    return {
        "recipe": record.get("recipe_values") or run.recipe().model_dump(mode="json"),
        "plan": decisions | {"deepspeed": plan.get("deepspeed")},
        "versions": record.get("versions", {}),
        "program": record.get("git") or {},
        "hardware": record.get("hardware", {}),
        "data": {"fingerprint": str(record.get("data_fingerprint"))[:12], **ledger},
    }


def _compared(title: str, one: dict[str, Any], other: dict[str, Any]) -> Finding:
    changes = differences(one, other)
    free = [title == "recipe" and is_same_training(change.key) for change in changes]
    lines = [f"{change}{' (does not count)' if no else ''}" for change, no in zip(changes, free, strict=True)]
    count = free.count(False)
    return Finding(title, f"{count} differences (A -> B)" if count else "same", tuple(lines), count > 0)


def _lines(run: Run) -> dict[tuple[int, int], dict[str, Any]]:
    """The lines of metrics.jsonl, each by the step of the line before and its own: a line is the mean over those in between."""
    lines = read_lines(run.metrics_file)
    starts = [0, *(line["step"] for line in lines)]
    return {(start, line["step"]): line for start, line in zip(starts, lines, strict=False)}


def steps(a: Run, b: Run) -> Finding:
    """Compare the fingerprints of the batches, and the losses, of the logged lines that cover the same steps."""
    one, other = _lines(a), _lines(b)
    both = sorted(one.keys() & other.keys())
    last = [max(one, default=(0, 0))[1], max(other, default=(0, 0))[1]]
    length = [f"A ends at step {last[0]}, B at step {last[1]}"] if last[0] != last[1] else []
    if not both:
        return Finding("steps", "not compared: no lines cover the same steps", tuple(length), bool(length))
    batches = [place[1] for place in both if one[place].get("batch") != other[place].get("batch")]
    gaps = {place[1]: _gap(one[place].get("loss"), other[place].get("loss")) for place in both}
    parted = [step for step, gap in gaps.items() if gap > _SAME_LOSS]
    lines = [*length, *([f"batches differ from step {batches[0]}"] if batches else [])]
    if parted:
        largest = max(gaps, key=lambda step: gaps[step])
        lines += [f"losses differ from step {parted[0]}, most at step {largest}: by {gaps[largest]:.2e}"]
    compared = f"{'differ' if lines else 'same'}, in {len(both)} lines that cover the same steps"
    return Finding("steps", compared, tuple(lines), bool(lines))


def _gap(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def final(a: Run, b: Run) -> Finding:
    """Compare the files of final/."""
    exist = [run.final.is_dir() for run in (a, b)]
    if not all(exist):
        which = "neither run has one" if not any(exist) else f"only {'A' if exist[0] else 'B'} has one"
        return Finding("final", f"not compared: {which}", differs=any(exist))
    names = sorted(
        {str(path.relative_to(run.final)) for run in (a, b) for path in run.final.rglob("*") if path.is_file()}
    )
    same, *others = filecmp.cmpfiles(a.final, b.final, names, shallow=False)
    differ = sorted(name for some in others for name in some)
    summary = f"{len(differ)} of {len(names)} files differ" if differ else f"same, {len(same)} files"
    return Finding("final", summary, tuple(differ), bool(differ))


if __name__ == "__main__":
    run_main(main)
