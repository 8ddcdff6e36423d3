"""Reports what differs between two runs: python -m sft.run.diff RUN_A RUN_B

Recipe, plan, versions, program, hardware and data; then the first step whose batches differ, the first whose loss differs, and the tensors
of final/. Exit status: 0 the runs are the same, 1 they differ, 2 one of them is not a run.

Names, places, trackers, evaluation, and how often something is written are shown and do not count.
"""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import RecipeError
from sft.files import read_json
from sft.program import run_main
from sft.recipe.changes import differences, is_same_training
from sft.run.directory import Run, find_run, read_lines
from sft.visible import visible_line

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
    differs = False
    for section in SECTIONS:
        finding = section(a, b)
        differs = differs or finding.differs
        lines = [f"{finding.title:<10}{finding.summary}", *(f"  {visible_line(line)}" for line in finding.lines)]
        print("\n".join(lines), flush=True)
    print(f"\n{'The runs differ.' if differs else 'The runs are the same.'}")
    sys.exit(int(differs))


def _heading(run: Run) -> str:
    record = run.record
    sessions = len(record.get("sessions", [])) or 1
    steps = max(_by_step(run), default=0)
    return f"{run.path} ({record['status']}, {steps} steps{f', in {sessions} sessions' if sessions > 1 else ''})"


def _compared(title: str, a: Any, b: Any, same: str = "same") -> Finding:
    lines = tuple(map(str, differences(a, b)))
    return Finding(title, _count(len(lines)) if lines else same, lines, bool(lines))


def _count(differences: int) -> str:
    return f"{differences} difference{'s' if differences > 1 else ''} (A -> B)"


def recipe(a: Run, b: Run) -> Finding:
    """Compare the recipes with all defaults."""
    values = [run.record.get("recipe_values") or run.recipe().model_dump(mode="json") for run in (a, b)]
    changes = differences(values[0], values[1])
    count = sum(not is_same_training(change.key) for change in changes)
    lines = [f"{change}{' (does not count)' if is_same_training(change.key) else ''}" for change in changes]
    return Finding("recipe", _count(count) if count else "same", tuple(lines), count > 0)


def plan(a: Run, b: Run) -> Finding:
    """Compare the decisions of plan.json."""
    plans = [read_json(run.plan_file) for run in (a, b)]
    decided = [
        {row["name"]: row["value"] for row in plan["decisions"]} | {"deepspeed": plan.get("deepspeed")}
        for plan in plans
    ]
    return _compared("plan", decided[0], decided[1], f"same, {len(plans[0]['decisions'])} decisions")


def versions(a: Run, b: Run) -> Finding:
    """Compare the versions of the packages."""
    return _compared("versions", *(run.record.get("versions", {}) for run in (a, b)))


def program(a: Run, b: Run) -> Finding:
    """Compare the commits of this program. Uncommitted changes cannot be compared."""
    states = [run.record.get("git") or {} for run in (a, b)]
    finding = _compared("program", states[0], states[1])
    if finding.differs or not any(state.get("dirty") for state in states):
        return finding
    return Finding("program", "same commit; both with uncommitted changes, which may differ")


def hardware(a: Run, b: Run) -> Finding:
    """Compare the machines and the number of processes."""
    return _compared("hardware", *(run.record.get("hardware", {}) for run in (a, b)))


def data(a: Run, b: Run) -> Finding:
    """Compare the prepared sequences and the ledgers."""
    prints = [str(run.record.get("data_fingerprint"))[:12] for run in (a, b)]
    if a.record.get("data_fingerprint") == b.record.get("data_fingerprint"):
        return Finding("data", f"same, fingerprint {prints[0]}")
    totals = [read_json(run.ledger_file).get("total", {}) if run.ledger_file.exists() else {} for run in (a, b)]
    lines = [f"fingerprint: {prints[0]} -> {prints[1]}", *map(str, differences(totals[0], totals[1]))]
    return Finding("data", "other sequences (A -> B)", tuple(lines), differs=True)


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
        return [], "no lines"
    left = max(len(one), len(other)) - len(pairs)
    others = f"; {left} cover other steps than in the other run, and are not compared" if left else ""
    return pairs, f"{len(pairs)} line{'' if len(pairs) == 1 else 's'} to step {pairs[-1][0]}{others}"


def batches(a: Run, b: Run) -> Finding:
    """Compare the fingerprints of what the ranks were given."""
    pairs, count = _pairs(a, b, "batch")
    if not pairs:
        return Finding("batches", "not compared: no line of both runs has a fingerprint of the same steps")
    differ = [step for step, one, other in pairs if one != other]
    if not differ:
        return Finding("batches", f"same, in {count}")
    again = next((step for step, one, other in pairs if step > differ[0] and one == other), None)
    lines = [f"differ from step {differ[0]}"] + ([f"the same again at step {again}"] if again else [])
    return Finding("batches", f"{len(differ)} of {len(pairs)} lines differ", tuple(lines), differs=True)


def losses(a: Run, b: Run) -> Finding:
    """Compare the loss of each logged step."""
    last = [max(_by_step(run), default=0) for run in (a, b)]
    length = [f"A ends at step {last[0]}, B at step {last[1]}"] if last[0] != last[1] else []
    pairs, count = _pairs(a, b, "loss")
    differ = [(step, one, other) for step, one, other in pairs if abs(one - other) > _SAME_LOSS]
    if not differ:
        summary = f"same, in {count}" if pairs else "not compared: no lines cover the same steps"
        return Finding("losses", summary, tuple(length), bool(length))
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
    lines = []
    for name in sorted(files[0] | files[1]):
        one, other = a.final / name, b.final / name
        if name not in files[0] & files[1]:
            lines.append(f"{name}: only in {'A' if name in files[0] else 'B'}")
        elif not filecmp.cmp(one, other, shallow=False):
            lines.append(f"{name}: {_tensors(one, other) if name.endswith('.safetensors') else 'differs'}")
    count = len(files[0] | files[1])
    summary = f"{len(lines)} of {count} files differ" if lines else f"same, {count} files"
    return Finding("final", summary, tuple(lines), bool(lines))


def _tensors(one: Path, other: Path) -> str:
    """How two files of weights differ, with one pair of tensors in memory at a time."""
    from safetensors import safe_open

    with safe_open(one, "pt") as left, safe_open(other, "pt") as right:
        for name in sorted({*left.keys()} ^ {*right.keys()}):
            return f"only one of them has {name}"
        names, changed = sorted(left.keys()), dict[str, float]()
        for name in names:
            values = left.get_tensor(name), right.get_tensor(name)
            if values[0].shape != values[1].shape or values[0].dtype != values[1].dtype:
                shapes = [f"{value.dtype} {list(value.shape)}" for value in values]
                return f"{name}: {shapes[0]} -> {shapes[1]}"
            if values[0].numel() and not values[0].equal(values[1]):
                changed[name] = float((values[0].float() - values[1].float()).abs().max())
    if not changed:
        return "the same tensors, in another layout"
    name = max(changed, key=lambda name: changed[name])
    return f"{len(changed)} of {len(names)} tensors differ, most in {name}: {changed[name]:.2e}"


SECTIONS: tuple[Callable[[Run, Run], Finding], ...] = (
    recipe,
    plan,
    versions,
    program,
    hardware,
    data,
    batches,
    losses,
    final,
)


if __name__ == "__main__":
    run_main(main)
