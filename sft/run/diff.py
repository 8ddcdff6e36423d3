"""Reports what differs between two runs: python -m sft.run.diff RUN_A RUN_B

Recipe, plan, versions, program, hardware and data; then the first step whose batches differ, the first whose loss differs, and the files
of final/. Exit status: 0 the runs are the same, 1 they differ, 2 one of them is not a run.

Names, places, trackers, evaluation, and how often something is written are shown and do not count.
"""

from __future__ import annotations

import filecmp
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
    return [*facts, batches(a, b), losses(a, b), final(a, b)]


def _heading(run: Run) -> str:
    record = run.record
    sessions = len(record.get("sessions", [])) or 1
    steps = max(_by_step(run), default=0)
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
    summary = f"{count} difference{'s' if count > 1 else ''} (A -> B)" if count else "same"
    if title == "program" and one.get("dirty") and not count:
        summary = "same commit; both with uncommitted changes, which may differ"
    return Finding(title, summary, tuple(lines), count > 0)


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step, each with the step of the line before."""
    found, before = {}, 0
    for line in read_lines(run.metrics_file):
        found[line["step"]] = line | {"since": before}
        before = line["step"]
    return found


def _pairs(a: Run, b: Run, key: str) -> tuple[list[tuple[int, Any, Any]], str]:
    """Step and both values of the lines that cover the same steps in both runs; and how many lines that is, in words."""
    one, other = _by_step(a), _by_step(b)
    steps = [step for step in sorted(one) if step in other and one[step]["since"] == other[step]["since"]]
    pairs = [(step, one[step].get(key), other[step].get(key)) for step in steps]
    pairs = [pair for pair in pairs if pair[1] is not None and pair[2] is not None]
    if not pairs:
        return [], "not compared: no lines cover the same steps"
    left = max(len(one), len(other)) - len(pairs)
    others = f"; {left} cover other steps than in the other run, and are not compared" if left else ""
    return pairs, f"same, in {len(pairs)} line{'' if len(pairs) == 1 else 's'} to step {pairs[-1][0]}{others}"


def batches(a: Run, b: Run) -> Finding:
    """Compare the fingerprints of what the ranks were given."""
    pairs, same = _pairs(a, b, "batch")
    differ = [step for step, one, other in pairs if one != other]
    if not differ:
        return Finding("batches", same)
    again = next((step for step, one, other in pairs if step > differ[0] and one == other), None)
    lines = [f"differ from step {differ[0]}"] + ([f"the same again at step {again}"] if again else [])
    return Finding("batches", f"{len(differ)} of {len(pairs)} lines differ", tuple(lines), differs=True)


def losses(a: Run, b: Run) -> Finding:
    """Compare the loss of each logged step."""
    last = [max(_by_step(run), default=0) for run in (a, b)]
    length = [f"A ends at step {last[0]}, B at step {last[1]}"] if last[0] != last[1] else []
    pairs, same = _pairs(a, b, "loss")
    differ = [(step, one, other) for step, one, other in pairs if abs(one - other) > _SAME_LOSS]
    if not differ:
        return Finding("losses", same, tuple(length), bool(length))
    step, one, other = differ[0]
    largest, where = max((abs(one - other), step) for step, one, other in differ)
    lines = [
        f"differ from step {step}: {one:.6f} -> {other:.6f}",
        f"largest difference: {largest:.2e}, at step {where}",
        f"last common line, step {pairs[-1][0]}: {pairs[-1][1]:.6f} -> {pairs[-1][2]:.6f}",
    ]
    return Finding("losses", f"{len(differ)} of {len(pairs)} lines differ", (*lines, *length), differs=True)


def final(a: Run, b: Run) -> Finding:
    """Compare the files of final/, and the tensors of weights that differ."""
    exist = [run.final.is_dir() for run in (a, b)]
    if not all(exist):
        which = "neither run has one" if not any(exist) else f"only {'A' if exist[0] else 'B'} has one"
        return Finding("final", f"not compared: {which}", differs=any(exist))
    files = [{str(path.relative_to(run.final)) for path in run.final.rglob("*") if path.is_file()} for run in (a, b)]
    names, lines = files[0] | files[1], []
    for name in sorted(names):
        one, other = a.final / name, b.final / name
        if name not in files[0] & files[1]:
            lines.append(f"{name}: only in {'A' if name in files[0] else 'B'}")
        elif not filecmp.cmp(one, other, shallow=False):
            lines.append(f"{name}: {_tensors(one, other) if name.endswith('.safetensors') else 'differs'}")
    summary = f"{len(lines)} of {len(names)} files differ" if lines else f"same, {len(names)} files"
    return Finding("final", summary, tuple(lines), bool(lines))


def _tensors(one: Path, other: Path) -> str:
    """How two files of weights differ, with one pair of tensors in memory at a time."""
    from safetensors import safe_open

    with safe_open(one, "pt") as left, safe_open(other, "pt") as right:
        names, changed = sorted(left.keys()), dict[str, float]()
        if alone := sorted({*names} ^ {*right.keys()}):
            return f"only one of them has {alone[0]}"
        for name in names:
            values = left.get_tensor(name), right.get_tensor(name)
            kinds = [f"{value.dtype} {list(value.shape)}" for value in values]
            if kinds[0] != kinds[1]:
                return f"{name}: {kinds[0]} -> {kinds[1]}"
            if not values[0].equal(values[1]):
                changed[name] = float((values[0].float() - values[1].float()).abs().max())
    if not changed:
        return "the same tensors, in another layout"
    name = max(changed, key=lambda name: changed[name])
    return f"{len(changed)} of {len(names)} tensors differ, most in {name}: {changed[name]:.2e}"


if __name__ == "__main__":
    run_main(main)
