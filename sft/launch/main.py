"""Start a recipe: check it, say what will run, and start one process for each GPU.

Called by scripts/sft.sh. What it starts is what anyone can start by hand; the exact command is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path

from sft.checkpoint.resume import checkpoints_of
from sft.data.findings import check_findings
from sft.data.ledger import check_limits
from sft.data.prepared import Prepared, data_key, entry_folder, find_prepared
from sft.errors import RecipeError
from sft.launch.auto_tune import search
from sft.launch.checks import check_address, check_installed, check_started_once, job_and_layout, told_of_slurm
from sft.launch.finish import become_finish, evaluation_left
from sft.launch.host_facts import host_facts
from sft.launch.job import open_job, open_recipe
from sft.launch.opening import check_start, unfinished_run
from sft.launch.preflight import disk, refuse
from sft.launch.prepare import prepared_data
from sft.launch.rerun import is_run, start_again, told_differences
from sft.launch.torchrun import check_port, choose_rendezvous, start
from sft.launch.tuning_result import find_answer, is_searched
from sft.plan.hardware import Hardware, described_hardware, detect_hardware
from sft.plan.job import Job
from sft.plan.plan import plan_warnings, print_plan
from sft.plan.topology import Topology, read_topology, whole_number
from sft.recipe.changes import check_allowed_changes
from sft.run.directory import Run
from sft.visible import visible_line

DEFAULT_RECIPE = "recipes/tiny.yaml"
DEFAULT_START_TIMEOUT = 50
"""Seconds that the machines of a job wait for each other at the start."""


def main(argv: Sequence[str]) -> None:
    """Check, print, start."""
    arguments = parse_command_line(argv)
    check_installed()
    recipe = Path(arguments.recipe)
    if is_run(arguments.recipe):
        recipe, arguments.overrides = start_again(recipe, arguments.overrides)
    if arguments.plan or arguments.on:
        hardware = described_hardware(arguments.on) if arguments.on else _hardware_here()
        job = open_job(recipe, arguments.overrides, hardware, to_run=False)
        check_allowed_changes(job.recipe.train.resume_allow_changes)
        check_trainer_arguments(job)
        prepared = judged_data(job)
        job = job.with_data(prepared.facts(), find_answer(job, prepared)) if prepared else job
        title = f"{job.name}: {job.recipe.model.name_or_path} on {hardware.device}"
        warnings = plan_warnings(job.recipe, job.plan, hardware, job.model, prepared.facts() if prepared else None)
        print_plan(job.plan, title, [f"Warning: {warning}" for warning in warnings])
        return
    if arguments.prepare or arguments.show is not None:
        look_at_data(recipe, arguments.overrides, arguments.show)
        return
    check_started_once()
    job, layout = job_and_layout(recipe, arguments.overrides)
    trained = None if arguments.preflight else evaluation_left(job)
    if trained is not None:
        evaluate_only(trained, layout)
        return
    choose_rendezvous(layout, arguments.rdzv, arguments.max_restarts)
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
    if arguments.preflight:
        check_trainer_arguments(job)
        judged_data(job)
        set_threads(job, layout)
        start(layout, ["-m", "sft.launch.preflight", str(job.recipe_path), *arguments.overrides])
    # What goes on keeps what was found when it was started.
    goes_on = (run := unfinished_run(job)) is not None and bool(checkpoints_of(run))
    searched = job.hardware.gpu is not None and layout.nodes == 1 and is_searched(job) and not goes_on
    if layout.ranks > 1 or searched or arguments.max_restarts:
        # Before any rank is there to wait. On another machine that shares the folder, this waits for the first. A single
        # process has the data prepared while it imports.
        prepared = prepared_data(job.recipe, job.model, [str(job.recipe_path), *job.overrides])
        if searched:
            search_once(job, prepared)
    set_threads(job, layout)
    program = ["-m", "sft.train", str(job.recipe_path), *arguments.overrides]
    start(layout, program, arguments.rdzv, arguments.max_restarts)


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


def look_at_data(recipe_path: Path, overrides: Sequence[str], count: int | None) -> None:
    """Prepare the data, on whatever machine, and show some of it."""
    from sft.data.show import show, summary_lines

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # rows may hold what the terminal's encoding does not

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


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Recipe, overrides and switches, in any order."""
    parser = argparse.ArgumentParser(
        prog="scripts/sft.sh",
        description="Train a recipe, evaluate base and tuned model, and write a report.",
        epilog="Environment: NPROC (processes on this machine, or auto: one for each GPU), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT. "
        "Inside Slurm, a Kubernetes PyTorchJob or SkyPilot theirs are read: see scripts/slurm, scripts/kubernetes, scripts/skypilot.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default=DEFAULT_RECIPE,
        help=f"a YAML file, or the folder of a run (default: {DEFAULT_RECIPE})",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.learning_rate=1e-5")
    parser.add_argument("--plan", action="store_true", help="print every decision with its reason, and stop")
    parser.add_argument(
        "--preflight", action="store_true", help="check all machines and processes of the job, and stop"
    )
    parser.add_argument("--prepare", action="store_true", help="prepare the data for a later start, and stop")
    parser.add_argument(
        "--show",
        metavar="N",
        type=_number_of("rows"),
        help="show N rows as the model gets them, the ledger and what was found",
    )
    parser.add_argument("--on", metavar="8x80GB", help="with --plan: plan for GPUs that are not here")
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=_number_of("restarts"),
        default=0,
        help="start all processes again, from the newest checkpoint, up to N times after one has failed (default: 0)",
    )
    parser.add_argument(
        "--rdzv",
        choices=["static", "c10d"],
        help="how several machines meet: static (the default), or c10d, which --max-restarts needs and takes by itself",
    )
    arguments = parser.parse_intermixed_args(list(argv))
    if (
        "=" in arguments.recipe and not Path(arguments.recipe).exists()
    ):  # overrides alone: they change the default recipe
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = DEFAULT_RECIPE
    second = [word for word in arguments.overrides if "=" not in word]
    if second:
        raise RecipeError(f"'{second[0]}' is neither the recipe ({arguments.recipe}) nor an override. Write key=value.")
    return arguments


def _number_of(what: str) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text} is no number of {what}")
        return int(text)

    return number
