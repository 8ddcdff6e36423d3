"""What the processes of an evaluation decide together: how many they are, and which tasks there are to measure."""

from __future__ import annotations

import sys
from pathlib import Path

from eval import ranks
from eval.harness.launch import decided_placement
from eval.models.backends import place_backend
from eval.models.placement import Placement, place_model
from eval.quiet import LOG
from eval.reference import Reference
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.settings import Settings
from eval.tasks.suites import TaskSelection, describe_suite
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation


class NeedsProcesses(Exception):
    """More than this one are to share the documents."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement


def place(evaluation: Evaluation, reference: Reference, settings: Settings, trust_remote_code: bool) -> Placement:
    """Where the layers go and how many processes share the documents, said where there is anything to say.

    Raises:
        NeedsProcesses: They are not there yet.
    """
    number = ranks.launched()

    def decide() -> Placement:
        wanted = evaluation.parallelize, evaluation.processes
        return place_model(*wanted, number, reference.config, settings.dtype, trust_remote_code)

    placement = place_backend(evaluation) or (decided_placement() if number > 1 else None)
    placement = placement or ranks.from_first(decide)
    if placement.processes > number:
        raise NeedsProcesses(placement)
    if placement.spread or placement.processes > 1:
        print(f"Placement: {placement}", flush=True)
    if placement.processes < number:  # a launcher of the user's has started several, and one spreads the layers
        if not ranks.is_first():
            sys.exit(0)
        ranks.leave()
    return placement


def log_in(folder: Path) -> Path:
    """The file for the libraries' words in a folder, which is made.

    Raises:
        EvaluationError: It cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"Results cannot be written: {error}.") from None
    return folder / (LOG if ranks.is_first() else LOG.replace(".log", f".rank-{ranks.rank()}.log"))


def load_tasks_together(selection: TaskSelection, settings: Settings, evaluation: Evaluation, log: Path) -> LoadedTasks:
    """The same tasks on every process."""
    consent = evaluation.confirm_run_unsafe_code
    if ranks.is_first() and (suite := describe_suite(evaluation)) is not None:
        print(suite, flush=True)
    tasks = ranks.first_then_others(lambda: load_tasks(selection, settings, consent, log))
    for missing in ranks.exchange(tasks.missing):
        tasks.missing.update(missing)
    here = [set(names) for names in ranks.exchange(list(tasks.by_name))]
    for name in here[0].union(*here) - here[0].intersection(*here):  # one process got a group, another only its parts
        tasks.missing.setdefault(name, "not every process of the evaluation could load it")
    for name in tasks.missing:
        tasks.by_name.pop(name, None)
    return tasks
