"""Plan a recipe, look at its data, or start it: check it, say what will run, and start one process for each GPU.

What it starts is what anyone can start by hand; the exact command is printed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from sft.checkpoint.resume import checkpoints_of
from sft.data.findings import check_findings
from sft.data.ledger import check_limits
from sft.data.prepared import Prepared, data_key, entry_folder, find_prepared
from sft.launch.auto_tune import search
from sft.launch.checks import check_address, check_installed, check_started_once, job_and_layout, told_of_slurm
from sft.launch.finish import become_finish, evaluation_left
from sft.launch.host_facts import host_facts
from sft.launch.job import open_job, open_recipe
from sft.launch.opening import check_start, unfinished_run
from sft.launch.preflight import disk, refuse
from sft.launch.prepare import prepared_data
from sft.launch.rerun import is_run, start_again, told_differences
from sft.launch.torchrun import check_port
from sft.launch.torchrun import start as start_ranks
from sft.launch.tuning_result import find_answer, is_searched
from sft.plan.hardware import Hardware, described_hardware, detect_hardware
from sft.plan.job import Job
from sft.plan.plan import print_plan
from sft.plan.topology import Topology, read_topology, whole_number
from sft.plan.warnings import plan_warnings
from sft.recipe.changes import check_allowed_changes
from sft.run.directory import Run
from sft.visible import visible_line

DEFAULT_START_TIMEOUT = 50
"""Seconds that the machines of a job wait for each other at the start."""


def planned_job(recipe: Path, overrides: Sequence[str], on: str | None = None) -> tuple[Job, Prepared | None]:
    """Plan a recipe, with its data where that is prepared.

    Args:
        recipe: The YAML.
        overrides: `key=value` with dots.
        on: GPUs that are not here, such as `8x80GB`; None: this machine.

    Raises:
        UserError: The recipe is wrong, or does not fit the machine.
    """
    check_installed()
    hardware = described_hardware(on) if on else _hardware_here()
    job = open_job(recipe, overrides, hardware, to_run=False)
    check_allowed_changes(job.recipe.train.resume_allow_changes)
    check_trainer_arguments(job)
    prepared = judged_data(job)
    return (job.with_data(prepared.facts(), find_answer(job, prepared)), prepared) if prepared else (job, None)


def show_plan(word: str, overrides: Sequence[str], on: str | None = None) -> None:
    """Print every decision with its reason."""
    recipe, overrides = _recipe_of(word, overrides)
    job, prepared = planned_job(recipe, overrides, on)
    title = f"{job.name}: {job.recipe.model.name_or_path} on {job.hardware.device}"
    warnings = plan_warnings(job.recipe, job.plan, job.hardware, job.model, prepared.facts() if prepared else None)
    print_plan(job.plan, title, [f"Warning: {warning}" for warning in warnings])


def _recipe_of(word: str, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    return start_again(Path(word), overrides) if is_run(word) else (Path(word), list(overrides))


def start(word: str, overrides: Sequence[str], preflight: bool = False, max_restarts: int = 0) -> None:
    """Check, print, start.

    Args:
        word: A recipe, or a run's folder.
        overrides: `key=value` with dots.
        preflight: Check all machines and processes, and stop.
        max_restarts: How often all processes are started again after one has failed.
    """
    check_installed()
    recipe, overrides = _recipe_of(word, overrides)
    check_started_once()
    job, layout = job_and_layout(recipe, overrides)
    trained = None if preflight else evaluation_left(job)
    if trained is not None:
        evaluate_only(trained, layout)
        return
    with told_of_slurm(layout):
        check_address(layout)
    check_port(layout)
    check_start(job)
    for line in told_differences(job):
        print(visible_line(line), flush=True)
    if layout.nodes > 1:
        meet_machines(job, layout)
    else:
        refuse([disk(job)])
    if preflight:
        check_trainer_arguments(job)
        judged_data(job)
        set_threads(job, layout)
        start_ranks(layout, ["-m", "sft.launch.preflight", str(job.recipe_path), *overrides])
    # What goes on keeps what was found when it was started.
    goes_on = (run := unfinished_run(job)) is not None and bool(checkpoints_of(run))
    searched = job.hardware.gpu is not None and layout.nodes == 1 and is_searched(job) and not goes_on
    if layout.ranks > 1 or searched or max_restarts:
        # Before any rank is there to wait. On another machine that shares the folder, this waits for the first. A single
        # process has the data prepared while it imports.
        prepared = prepared_data(job.recipe, job.model, [str(job.recipe_path), *job.overrides])
        if searched:
            search_once(job, prepared)
    set_threads(job, layout)
    start_ranks(layout, ["-m", "sft.train", str(job.recipe_path), *overrides], restarts=max_restarts)


def check_trainer_arguments(job: Job) -> None:
    """Refuse the train.trainer_args that a start refuses; seconds, and only where there are any.

    Raises:
        RecipeError: One is unknown, decided elsewhere, or of the wrong type.
    """
    if job.recipe.train.trainer_args:
        from sft.train.arguments import check_trainer_args

        check_trainer_args(job)


def judged_data(job: Job) -> Prepared | None:
    """The data, where it is prepared, compared with the recipe's limits as a start does.

    Raises:
        DataError: A limit is passed.
    """
    prepared = find_prepared(entry_folder(job.recipe, job.model)) if Path(job.model.path).is_dir() else None
    if prepared:
        check_limits(prepared.ledger, job.recipe.data)
    return prepared


def evaluate_only(run: Run, layout: Topology) -> None:
    """Go on with the evaluation of a run that is trained; the first machine does."""
    print(f"{run.path} is trained, and its evaluation was interrupted.", flush=True)
    if layout.node_rank == 0:
        become_finish(run)


def set_threads(job: Job, layout: Topology) -> None:
    """Share the cores out among the processes of this machine."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, job.hardware.cpu_cores // layout.per_node)))
    # A thread that waits spins for microseconds only: on cores that others use too, long spinning takes them from the work.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def meet_machines(job: Job, layout: Topology) -> None:
    """Wait for the launchers of the other machines, before data is prepared or processes are started.

    Raises:
        PreflightError: One is missing, cannot be reached, or does not fit.
    """
    from sft.launch.rendezvous import Machine, meet

    timeout = whole_number("START_TIMEOUT", DEFAULT_START_TIMEOUT, 1)
    facts = host_facts(job, layout.node_rank, data_key(job.recipe, job.model))
    machine = Machine(layout.node_rank, layout.nodes, layout.per_node, facts, time.time())
    output_dir = Path(job.recipe.output_dir).expanduser().resolve()
    with told_of_slurm(layout):
        meet(machine, layout.master_address, layout.master_port, output_dir, timeout, [disk(job)])


def _hardware_here() -> Hardware:
    layout = read_topology()
    return detect_hardware(layout.ranks, layout.per_node)


def search_once(job: Job, prepared: Prepared) -> None:
    """Measure, once for a recipe and a machine, what the recipe leaves `auto`."""
    found = find_answer(job, prepared)
    if found is None or found.micro_batch_size is None:
        search(job, prepared)


def look_at_data(word: str, overrides: Sequence[str], count: int | None) -> None:
    """Prepare the data, on whatever machine, and show some of it."""
    from sft.data.show import show, summary_lines

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # rows may hold what the terminal's encoding does not

    recipe_path, overrides = _recipe_of(word, overrides)
    recipe, path, model = open_recipe(recipe_path, overrides)
    prepared = prepared_data(recipe, model, [str(path), *overrides], judge=count is None)
    if count is None:
        print("\n".join([*summary_lines(prepared), f"Prepared: {prepared.folder}"]))
        return
    from sft.data.tokenizer import load_tokenizer
    from sft.hub.pins import pinned

    show(prepared, recipe, load_tokenizer(pinned(recipe, model)), count)
    check_limits(prepared.ledger, recipe.data)
    check_findings(prepared.findings, recipe.data)
