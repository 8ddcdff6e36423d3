"""The report's sections on where a run was made, and how to make it again."""

from __future__ import annotations

import shlex
from pathlib import Path

from eval.report.blocks import (
    MISSING,
    Block,
    Code,
    Commands,
    Line,
    Link,
    Paragraph,
    Table,
    code,
    duration,
    facts,
    joined,
    number,
    words,
)
from eval.report.results import Recorded, entries, get, listed, mapping
from sft.recipe.schema import REPOSITORY


def plan_section(of: Recorded) -> list[Block]:
    """Every decision with its reason."""
    if not of.decisions:
        return [Paragraph(("The plan, ", Code("plan.json"), ", is missing."))]
    rows = [[code(one.get("name")), words(one.get("value")), words(one.get("reason"))] for one in of.decisions]
    return [Table(["Decision", "Value", "Why"], rows)]


def hardware_line(hardware: object) -> str:
    """GPUs and machine in words."""
    if not isinstance(hardware, dict):
        return MISSING
    gpu = hardware.get("gpu")
    gpus = f"{number(hardware.get('ranks'))} x {words(get(gpu, 'name'))} ({number(get(gpu, 'memory_gib'), '.0f')} GiB)"
    memory = hardware.get("cpu_memory_gib")
    machine = f"{number(hardware.get('cpu_cores'))} CPU cores" + (f", {number(memory, '.0f')} GiB" if memory else "")
    return f"{gpus if gpu else 'no GPU'}; {machine} on each machine"


def _sessions(of: Recorded) -> list[Block]:
    """Where a run went on, and how each start of it ended; nothing for a run in one piece."""
    sessions = entries(of.record, "sessions")
    if len(sessions) < 2:
        return []
    rows: list[list[Line]] = [
        [
            words(one.get("started")),
            words(one.get("checkpoint") or "the first step"),
            words(one.get("status")),
            number(one.get("last_step")),
            number(one.get("ranks")),
            duration(one.get("seconds")),
            joined([Code(key) for key in mapping(one, "changes")]) or "nothing",
        ]
        for one in sessions
    ]
    head = ["Started", "From", "Ended", "At step", "Processes", "Trained for", "Changed in the recipe"]
    return [Paragraph(f"It was trained in {len(sessions)} sessions:"), Table(head, rows, numbers=(3, 4))]


def environment_section(of: Recorded) -> list[Block]:
    """Machine, program, packages."""
    record, commit = of.record, get(of.record, "git", "commit")
    on_each = number(get(record, "hardware", "ranks_per_node"))
    dirty = ", with changes that no commit holds" if get(record, "git", "dirty") else ""
    rows: dict[str, Line] = {
        "Hardware": hardware_line(record.get("hardware")),
        "Processes": f"{number(record.get('ranks'))} ({on_each} on each machine)",
        "Git commit": (code(commit), dirty),
        "Started": words(record.get("started")),
        "Finished": words(record.get("finished")),
    }
    versions = record.get("versions")
    if not isinstance(versions, dict):
        return [facts(rows), *_sessions(of), Paragraph("The versions of the packages are missing.")]
    packages = Table(["Package", "Version"], [[words(name), words(one)] for name, one in versions.items()])
    return [facts(rows), *_sessions(of), packages]


def again_section(of: Recorded) -> list[Block]:
    """The commands that make the run again."""
    record = of.record
    if not isinstance(record.get("recipe_path"), str):
        return [Paragraph("The command is missing.")]
    path = Path(record["recipe_path"])
    shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    commit = get(record, "git", "commit")
    folder, script = record.get("working_directory"), "scripts/sft.sh"
    lines = [f"git checkout {commit}"] if commit else []
    if folder and shown == path:  # a recipe of the user's, whose paths start where it was called
        lines, script = [f"cd {shlex.quote(str(folder))}"], str(REPOSITORY / script)
        lines += [f"git -C {shlex.quote(str(REPOSITORY))} checkout {commit}"] if commit else []
    lines.append(shlex.join(["bash", script, str(shown), *map(str, listed(record, "overrides"))]))
    notes: list[Line] = []
    if of.run.recipe_file.is_file():
        notes.append(("The recipe as it was read: ", Link("recipe.yaml", "recipe.yaml"), "."))
    if get(record, "git", "dirty"):
        notes.append(
            "The working tree had changes that no commit holds, so the commit alone may not give the same result."
        )
    again = Code(f"bash scripts/sft.sh {of.run.path}")
    notes.append(("Or from this folder, which tells what is no longer as it was: ", again, "."))
    measure = Code(f"bash scripts/eval.sh {of.run.path}")
    if of.comparison:
        notes.append(("To measure both models again, under the same settings: ", measure, "."))
    return [Commands(lines), Paragraph(joined(notes, " "))]
