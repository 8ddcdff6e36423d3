"""Plan a recipe, look at its data, or start it: check it, say what will run, and start one process for each GPU.

What it starts is what anyone can start by hand; the exact command is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from shlex import join

from sft.data.findings import check_findings
from sft.data.ledger import check_limits
from sft.data.prepared import Prepared, entry_folder, find_prepared
from sft.launch.auto_tune import search
from sft.launch.checks import check_address, check_installed, check_started_once, job_and_topology, told_of_slurm
from sft.launch.evaluation import become_evaluation, unfinished_evaluation
from sft.launch.job import open_job, open_recipe
from sft.launch.preflight import disk, refuse
from sft.launch.prepare import prepared_data
from sft.launch.rank import PREFLIGHT, train_job
from sft.launch.rerun import differences_to_report, is_run, rerun_arguments
from sft.launch.run_directory import check_start, unfinished_run
from sft.launch.topology import Topology, read_topology
from sft.launch.torchrun import check_port, clear_environment
from sft.launch.torchrun import start as start_ranks
from sft.launch.tuning_result import find_answer, is_searched
from sft.plan.hardware import Hardware, cpu_cores, described_hardware, detect_hardware
from sft.plan.job import Job
from sft.plan.plan import print_plan
from sft.plan.warnings import plan_warnings
from sft.recipe.changes import check_allowed_changes
from sft.visible import visible_line


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
    return rerun_arguments(Path(word), overrides) if is_run(word) else (Path(word), list(overrides))


def start(word: str, overrides: Sequence[str], preflight: bool = False, max_restarts: int = 0) -> None:
    """Check a recipe, and train it: here where it is one process, else in one process for each GPU.

    Args:
        word: A recipe, or a run's folder.
        overrides: `key=value` with dots.
        preflight: Check all machines and processes, and stop.
        max_restarts: How often all processes restart after one has failed.
    """
    check_installed()
    recipe, overrides = _recipe_of(word, overrides)
    check_started_once()
    job, topology = job_and_topology(recipe, overrides)
    trained = None if preflight else unfinished_evaluation(job)
    if trained is not None:
        print(f"{trained.path} is trained, and its evaluation was interrupted.", flush=True)
        if topology.node_rank == 0:
            become_evaluation(trained)
        return
    with told_of_slurm(topology):
        check_address(topology)
    check_port(topology)
    check_start(job)
    for line in differences_to_report(job):
        print(visible_line(line), flush=True)
    refuse([disk(job)])
    set_threads(topology)
    words = [str(job.recipe_path), *overrides]
    if preflight:
        check_trainer_arguments(job)
        judged_data(job)
        with told_of_slurm(topology):
            start_ranks(topology, ["-m", "sft.train", *words, PREFLIGHT])
    if topology.nodes == 1:
        _prepare_and_tune(job, topology, words, wait=topology.ranks > 1 or max_restarts > 0)
    if topology.ranks == 1 and not max_restarts:
        print(
            f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {join([sys.executable, '-m', 'sft.train', *words])}",
            flush=True,
        )
        clear_environment()
        train_job(job)
        return
    with told_of_slurm(topology):
        start_ranks(topology, ["-m", "sft.train", *words], max_restarts, job.recipe.train.ddp_timeout)


def _prepare_and_tune(job: Job, topology: Topology, words: Sequence[str], wait: bool) -> None:
    """Prepare the data before any rank waits for it, and measure once what the recipe leaves `auto`.

    A single process has its data prepared while it imports. On several machines rank 0 prepares it, once they have met.
    """
    # A run that resumes keeps what was found when it was started.
    resumes = (run := unfinished_run(job)) is not None and run.last_checkpoint() is not None
    tunes = job.hardware.gpu is not None and is_searched(job) and not resumes
    if not (wait or tunes):
        return
    prepared = prepared_data(job.recipe, job.model, words)
    found = find_answer(job, prepared) if tunes else None
    if tunes and (found is None or found.micro_batch_size is None):
        search(job, prepared)


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


def set_threads(topology: Topology) -> None:
    """Divide the cores among the processes of this machine; before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // topology.per_node)))
    # A thread that waits spins for microseconds only: on cores that others use too, long spinning takes them from the work.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _hardware_here() -> Hardware:
    topology = read_topology()
    return detect_hardware(topology.ranks, topology.per_node)


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
