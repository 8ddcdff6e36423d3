"""Plan a recipe, show its data, or start it: check it, say what will run, and start one process for each GPU.

What it starts is what anyone can start by hand; the exact command is printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from shlex import join
from subprocess import Popen

from sft.data.findings import check_findings
from sft.data.ledger import check_limits
from sft.data.prepared import Prepared, entry_folder, find_prepared
from sft.launch.auto_tune import auto_tune
from sft.launch.checks import check_installed, check_started_once, checked_recipe_and_topology
from sft.launch.evaluation import become_evaluation, unfinished_evaluation
from sft.launch.job import command_of, open_job, open_recipe, plan_job
from sft.launch.open_run import check_start, unfinished_run
from sft.launch.preflight import disk, refuse
from sft.launch.prepare import end_preparation, plan_beside_preparation, prepared_data
from sft.launch.rank import PREFLIGHT, train_job, uncollected
from sft.launch.rerun import differences_to_report, recipe_of
from sft.launch.topology import Topology, read_topology
from sft.launch.torchrun import check_rendezvous, clear_environment
from sft.launch.torchrun import start as start_ranks
from sft.launch.tuning_result import find_result, is_tuned
from sft.parallel.environment import settle_allocator
from sft.plan.hardware import cpu_cores, described_hardware, detect_hardware
from sft.plan.job import Job
from sft.plan.plan import print_plan
from sft.plan.time import check_price, cost_line, time_json
from sft.plan.warnings import plan_warnings
from sft.recipe.changes import check_allowed_changes
from sft.terminal import visible_line


def planned_job(recipe: Path, overrides: Sequence[str], on: str | None = None) -> tuple[Job, Prepared | None]:
    """Plan a recipe, with its data if that is prepared; `on` names GPUs that are not here, such as `8x80GB`. Raises UserError."""
    check_installed()
    topology = read_topology()
    hardware = described_hardware(on) if on else detect_hardware(topology.ranks, topology.per_node)
    job = open_job(recipe, overrides, hardware, to_run=False)
    check_allowed_changes(job.recipe.train.resume_allow_changes)
    check_trainer_arguments(job)
    check_tokenizer(job)
    prepared = checked_data(job)
    return (job.with_data(prepared.facts(), find_result(job, prepared)), prepared) if prepared else (job, None)


def show_plan(
    word: str, overrides: Sequence[str], on: str | None = None, price: float | None = None, as_json: bool = False
) -> None:
    """Print every decision with its reason, or the plan as JSON; with the price of a GPU-hour what the training costs. Raises UserError."""
    if price is not None:
        check_price(price)
    job, prepared = planned_job(*recipe_of(word, overrides), on)
    title = f"{job.name}: {job.recipe.model.name_or_path} on {job.hardware.device}"
    warnings = plan_warnings(job.recipe, job.plan, job.hardware, job.model, prepared.facts() if prepared else None)
    if as_json:
        numbers = job.plan.as_json(time=time_json(job, price), warnings=list(warnings))
        print(json.dumps(numbers, indent=2, default=str))
        return
    cost = [] if price is None else [cost_line(job, price)]
    print_plan(job.plan, title, [*cost, *(f"Warning: {warning}" for warning in warnings)])


def start(word: str, overrides: Sequence[str], preflight: bool = False, max_restarts: int = 0) -> None:
    """Check a recipe or a run's folder, and train it: in this process if one is enough, else in one process for each GPU."""
    check_installed()
    settle_allocator()
    recipe, overrides = recipe_of(word, overrides)
    check_started_once()
    checked, topology = checked_recipe_and_topology(recipe, overrides)
    _set_threads(topology)
    # Of several nodes rank 0 prepares the data, once they have met.
    prepares = topology.nodes == 1 and not preflight
    with uncollected():
        job, preparation = plan_beside_preparation(checked) if prepares else (plan_job(checked), None)
    trained = None if preflight else unfinished_evaluation(job)
    if trained is not None:
        end_preparation(preparation)
        print(f"{trained.path} is trained, and its evaluation was interrupted.", flush=True)
        if topology.node_rank == 0:
            become_evaluation(trained)
        return
    check_rendezvous(topology)
    check_start(job)
    for line in differences_to_report(job):
        print(visible_line(line), flush=True)
    refuse([disk(job)])
    program = ["-m", "sft.train", *command_of(job)]
    if preflight:
        check_trainer_arguments(job)
        checked_data(job)
        start_ranks(topology, [*program, PREFLIGHT])
    alone = topology.ranks == 1 and not max_restarts
    if topology.nodes == 1:
        _prepare_and_tune(job, alone, preparation)
    if not alone:
        start_ranks(topology, program, max_restarts, job.recipe.train.ddp_timeout)
    print(f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {join([sys.executable, *program])}", flush=True)
    clear_environment()
    train_job(job, preparation)


def _prepare_and_tune(job: Job, alone: bool, preparation: Popen[bytes] | None) -> None:
    """Prepare the data before any rank waits for it, and measure once what the recipe leaves `auto`.

    A process that trains alone waits for its data once it has imported what it trains with (sft/launch/rank.py).
    """
    # A run that resumes keeps what it was started with.
    resumes = (run := unfinished_run(job)) is not None and run.last_checkpoint() is not None
    tunes = job.hardware.gpu is not None and is_tuned(job) and not resumes
    if alone and not tunes:
        return
    prepared = prepared_data(job.recipe, job.model, command_of(job), begun=preparation)
    if tunes and find_result(job, prepared) is None:
        auto_tune(job, prepared)


def check_trainer_arguments(job: Job) -> None:
    """Refuse trainer_args, callbacks, adapters and frozen parameters as a start does (UserError); imports no trainer without them."""
    if job.recipe.train.callbacks:
        from sft.train.hooks import own_callbacks

        own_callbacks(job.recipe)
    model = job.recipe.model
    if job.model.model_type is not None and (model.lora is not None or model.freeze):
        from sft.model.load import check_trained

        check_trained(job)
    if job.recipe.train.trainer_args:
        from sft.train.arguments import check_trainer_args

        check_trainer_args(job)


def check_tokenizer(job: Job) -> None:
    """Refuse the tokens and the chat template that the preparation refuses (UserError), where the model is at hand."""
    from sft.data.tokenizer import check_vocabulary, load_tokenizer
    from sft.hub.pins import pinned

    recipe, model = job.recipe, job.model
    if Path(model.path).is_dir():
        tokenizer = load_tokenizer(pinned(recipe, model))
        if model.vocab_size is not None:
            check_vocabulary(tokenizer, recipe.model.new_tokens, model.vocab_size, recipe.model.name_or_path)


def checked_data(job: Job) -> Prepared | None:
    """The data, if it is prepared, compared with the recipe's limits as a start does. Raises DataError."""
    prepared = find_prepared(entry_folder(job.recipe, job.model)) if Path(job.model.path).is_dir() else None
    if prepared:
        check_limits(prepared.ledger, job.recipe.data)
    return prepared


def _set_threads(topology: Topology) -> None:
    """Divide the cores among the processes of this node; torch reads it when it is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // topology.per_node)))
    # A waiting thread spins for microseconds only: long spinning takes cores from other processes' work.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def look_at_data(word: str, overrides: Sequence[str], count: int | None) -> None:
    """Prepare the data, on whatever machine, and show some of it."""
    from sft.data.show import show, summary_lines

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # rows may hold what the terminal's encoding does not

    recipe_path, overrides = recipe_of(word, overrides)
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
