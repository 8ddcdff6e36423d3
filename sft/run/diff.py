"""What differs between two runs: python -m sft.run.diff RUN_A RUN_B

Recipe, plan, versions, program, hardware, data; then, where the runs have parted: the first step with other batches, the first with
another loss, and the tensors of final/. Exit status: 0 they are the same, 1 they differ, 2 one of them is no run.

Names, places, trackers, evaluation, how often something is written: such keys are shown, and do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from sft.errors import RecipeError
from sft.files import read_json
from sft.program import run_main
from sft.recipe.changes import differences, is_same_training
from sft.run.directory import Run, find_run, read_lines
from sft.visible import visible_line

_EDGE = 1e-12


@dataclass(frozen=True)
class Finding:
    """One section of the answer."""

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
    print(f"A: {visible_line(_told(a))}\nB: {visible_line(_told(b))}\n")
    differs = False
    for section in SECTIONS:
        finding = section(a, b)
        differs = differs or finding.differs
        print(
            f"{finding.title:<10}{finding.summary}",
            *(f"  {visible_line(line)}" for line in finding.lines),
            sep="\n",
            flush=True,
        )
    print(f"\n{'The runs differ.' if differs else 'The runs are the same.'}")
    sys.exit(int(differs))


def _told(run: Run) -> str:
    record = run.record
    sessions = len(record.get("sessions", [])) or 1
    steps = max(_by_step(run), default=0)
    return f"{run.path} ({record['status']}, {steps} steps{f', in {sessions} sessions' if sessions > 1 else ''})"


def _compared(title: str, a: Any, b: Any, same: str = "same") -> Finding:
    lines = tuple(map(str, differences(a, b)))
    return Finding(title, _number(len(lines)) if lines else same, lines, bool(lines))


def _number(count: int) -> str:
    return f"{count} difference{'s' if count > 1 else ''} (A -> B)"


def recipe(a: Run, b: Run) -> Finding:
    """The recipes with all defaults."""
    values = [run.record.get("recipe_values") or run.recipe().model_dump(mode="json") for run in (a, b)]
    changes = differences(values[0], values[1])
    beside = [change for change in changes if is_same_training(change.key)]
    count = len(changes) - len(beside)
    lines = [f"{change}{' (does not count)' if change in beside else ''}" for change in changes]
    return Finding("recipe", _number(count) if count else "same", tuple(lines), count > 0)


def plan(a: Run, b: Run) -> Finding:
    """The decisions of plan.json."""
    decisions = [{row["name"]: row["value"] for row in read_json(run.plan_file)["decisions"]} for run in (a, b)]
    files = [{"deepspeed": read_json(run.plan_file).get("deepspeed")} for run in (a, b)]
    return _compared("plan", decisions[0] | files[0], decisions[1] | files[1], f"same, {len(decisions[0])} decisions")


def versions(a: Run, b: Run) -> Finding:
    """Of the packages."""
    return _compared("versions", *(run.record.get("versions", {}) for run in (a, b)))


def program(a: Run, b: Run) -> Finding:
    """The commit of this program. Changes that no commit holds cannot be compared."""
    states = [run.record.get("git") or {} for run in (a, b)]
    finding = _compared("program", states[0], states[1])
    if finding.differs or not any(state.get("dirty") for state in states):
        return finding
    return Finding("program", "same commit; both with changes that no commit holds, which may differ")


def hardware(a: Run, b: Run) -> Finding:
    """The machine, and the processes."""
    return _compared("hardware", *(run.record.get("hardware", {}) for run in (a, b)))


def data(a: Run, b: Run) -> Finding:
    """The prepared sequences, and where the rows went."""
    prints = [str(run.record.get("data_fingerprint")) for run in (a, b)]
    if prints[0] == prints[1]:
        return Finding("data", f"same, fingerprint {prints[0][:12]}")
    totals = [read_json(run.ledger_file).get("total", {}) if run.ledger_file.exists() else {} for run in (a, b)]
    lines = [f"fingerprint: {prints[0][:12]} -> {prints[1][:12]}", *map(str, differences(*totals))]
    return Finding("data", "other sequences (A -> B)", tuple(lines), differs=True)


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step, each with the step of the line before."""
    found, before = {}, 0
    for line in read_lines(run.metrics_file):
        found[line["step"]] = line | {"since": before}
        before = line["step"]
    return found


def _common(a: Run, b: Run, key: str) -> list[tuple[int, Any, Any]]:
    """Step and both values of the lines that are about the same steps in both runs."""
    one, other = _by_step(a), _by_step(b)
    steps = [step for step in sorted(one) if step in other and one[step]["since"] == other[step]["since"]]
    pairs = [(step, one[step].get(key), other[step].get(key)) for step in steps]
    return [pair for pair in pairs if pair[1] is not None and pair[2] is not None]


def _lines(a: Run, b: Run, pairs: Sequence[tuple[int, Any, Any]]) -> str:
    """How many lines were compared; and how many could not be, as where train.logging_steps differs."""
    left = max(len(_by_step(run)) for run in (a, b)) - len(pairs)
    other = f"; {left} are about other steps than in the other run, and are not compared" if left else ""
    return f"{len(pairs)} line{'' if len(pairs) == 1 else 's'} to step {pairs[-1][0]}{other}"


def batches(a: Run, b: Run) -> Finding:
    """The fingerprints of what the ranks were given."""
    pairs = _common(a, b, "batch")
    if not pairs:
        return Finding("batches", "not compared: no line of both has a fingerprint of the same steps")
    parted = [step for step, one, other in pairs if one != other]
    if not parted:
        return Finding("batches", f"same, in {_lines(a, b, pairs)}")
    again = next((step for step, one, other in pairs if step > parted[0] and one == other), None)
    lines = [f"part at step {parted[0]}"] + ([f"the same again at step {again}"] if again else [])
    return Finding("batches", f"{len(parted)} of {len(pairs)} lines differ", tuple(lines), differs=True)


def losses(a: Run, b: Run) -> Finding:
    """The loss of each logged step."""
    last = [max(_by_step(run), default=0) for run in (a, b)]
    length = [f"A ends at step {last[0]}, B at step {last[1]}"] if last[0] != last[1] else []
    pairs = _common(a, b, "loss")
    if not pairs:
        told = "not compared: no lines are about the same steps"
        return Finding("losses", told, tuple(length), bool(length))
    apart = [(step, one, other) for step, one, other in pairs if abs(one - other) > _EDGE]
    if not apart:
        return Finding("losses", f"same, in {_lines(a, b, pairs)}", tuple(length), bool(length))
    step, one, other = apart[0]
    largest, where = max((abs(one - other), step) for step, one, other in apart)
    lines = [
        f"part at step {step}: {one:.6f} -> {other:.6f}",
        f"largest difference: {largest:.2e}, at step {where}",
        f"last common line, step {pairs[-1][0]}: {pairs[-1][1]:.6f} -> {pairs[-1][2]:.6f}",
    ]
    return Finding("losses", f"{len(apart)} of {len(pairs)} lines differ", (*lines, *length), differs=True)


def final(a: Run, b: Run) -> Finding:
    """The files of final/; of weights the tensors."""
    there = [run.final.is_dir() for run in (a, b)]
    if not all(there):
        which = "neither run has one" if not any(there) else f"only {'A' if there[0] else 'B'} has one"
        return Finding("final", f"not compared: {which}", differs=any(there))
    files = [{str(path.relative_to(run.final)): path for path in _files(run.final)} for run in (a, b)]
    lines = []
    for name in sorted({*files[0], *files[1]}):
        one, other = files[0].get(name), files[1].get(name)
        if one is None or other is None:
            lines.append(f"{name}: only in {'A' if one else 'B'}")
        elif _sum(one) != _sum(other):
            lines.append(f"{name}: {_tensors(one, other) if name.endswith('.safetensors') else 'differs'}")
    told = f"{len(lines)} of {len({*files[0], *files[1]})} files differ" if lines else f"same, {len(files[0])} files"
    return Finding("final", told, tuple(lines), bool(lines))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _sum(file: Path) -> str:
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()


def _tensors(one: Path, other: Path) -> str:
    """How two files of weights differ, one tensor in memory at a time."""
    from safetensors import safe_open

    with safe_open(one, "pt") as left, safe_open(other, "pt") as right:
        names = sorted({*left.keys(), *right.keys()})
        changed: dict[str, float] = {}
        for name in names:
            if name not in left.keys() or name not in right.keys():  # noqa: SIM118 - they are no dictionaries
                return f"only one of them has {name}"
            values = left.get_tensor(name), right.get_tensor(name)
            if values[0].shape != values[1].shape or values[0].dtype != values[1].dtype:
                shapes = [f"{value.dtype} {list(value.shape)}" for value in values]
                return f"{name}: {shapes[0]} -> {shapes[1]}"
            difference = (values[0].float() - values[1].float()).abs()
            if difference.numel() and not (difference == 0).all():
                changed[name] = float(difference.max())
    if not changed:
        return "the same tensors, written otherwise"
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
