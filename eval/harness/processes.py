"""Decide together what the processes of an evaluation do: how many there are, where they log, which tasks all of them have."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from eval import ranks
from eval.models.backends import place_backend
from eval.models.placement import Placement, place_model
from eval.quiet import LOG
from eval.reference import Reference
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.settings import Settings
from eval.tasks.suites import TaskSelection, describe_suite
from sft.errors import EvaluationError
from sft.plan.hardware import cpu_cores
from sft.recipe.schema import Evaluation
from sft.signals import held_back

PLACEMENT = "SFT_EVAL_PLACEMENT"
"""Environment variable: what the process that starts the others has decided. They would find each other's memory on the GPUs."""


class NeedsProcesses(Exception):
    """The documents are shared by more processes than are there."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement


def become_launcher(placement: Placement, arguments: list[str]) -> NoReturn:
    """Replace this process by one that starts the others: its look at the GPUs leaves memory of this one on them.

    Args:
        placement: How many there are.
        arguments: Of eval/run.py.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // placement.processes)))
    layout = json.dumps({"per_node": placement.processes})
    os.environ[PLACEMENT] = json.dumps(asdict(placement))
    sys.stdout.flush()
    sys.stderr.flush()
    with held_back():
        os.execv(
            sys.executable,
            [sys.executable, "-m", "sft.launch.torchrun", layout, "0", "0", "-m", "eval.run", *arguments],
        )


def decided_placement() -> Placement | None:
    """What the launcher has decided; None where this process was not started by it."""
    decided = os.environ.get(PLACEMENT)
    return Placement(**json.loads(decided)) if decided else None


def place(evaluation: Evaluation, reference: Reference, settings: Settings, trust_remote_code: bool) -> Placement:
    """Decide where the layers go and how many processes share the documents.

    Raises:
        NeedsProcesses: They are not there yet.
    """
    number = ranks.launched()
    placement = place_backend(evaluation) or (decided_placement() if number > 1 else None)
    if placement is None:
        wanted = evaluation.parallelize, evaluation.processes
        placement = ranks.from_first(
            lambda: place_model(*wanted, number, reference.config, settings.dtype, trust_remote_code)
        )
    if placement.processes > number:
        raise NeedsProcesses(placement)
    if placement.spread or placement.processes > 1:
        print(f"Placement: {placement}", flush=True)
    if placement.processes < number:  # a launcher of the user's started several, and one uses all GPUs
        if not ranks.is_first():
            sys.exit(0)
        ranks.leave()
    return placement


def log_in(folder: Path) -> Path:
    """The file for the libraries' output in a folder, which is made.

    Raises:
        EvaluationError: It cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"Results cannot be written: {error}.") from None
    return folder / (LOG if ranks.is_first() else LOG.replace(".log", f".rank-{ranks.rank()}.log"))


def load_tasks_together(selection: TaskSelection, settings: Settings, evaluation: Evaluation, log: Path) -> LoadedTasks:
    """Load the same tasks on every process."""
    if ranks.is_first() and (suite := describe_suite(evaluation)) is not None:
        print(suite, flush=True)
    tasks = ranks.first_then_others(lambda: load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, log))
    for missing in ranks.exchange(tasks.missing):
        tasks.missing.update(missing)
    for name in tasks.missing:
        tasks.by_name.pop(name, None)
    return tasks
