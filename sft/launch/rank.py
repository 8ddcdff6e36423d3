"""Train one recipe, from file to report. Started by scripts/sft.sh, or by hand:

python -m sft.train recipes/tiny.yaml train.learning_rate=1e-3
torchrun --nproc-per-node 2 -m sft.train recipes/tiny.yaml
accelerate launch --multi_gpu --num_processes 2 -m sft.train recipes/tiny.yaml
deepspeed --module sft.train recipes/tiny.yaml
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

from eval.tasks.preflight import check_before_training
from sft import terminal
from sft.checkpoint.load_again import exchange_of
from sft.data.show import summary_lines
from sft.data.tokenizer import load_tokenizer
from sft.files import write_json
from sft.hub.pins import pin_lines, pinned
from sft.launch.checks import check_installed, check_rank_variables
from sft.launch.evaluation import become_evaluation, programs, unfinished_evaluation
from sft.launch.job import check_recipe, command_of, parse_command_line, plan_job
from sft.launch.open_run import OpenedRun, check_start, open_run, runs_folder
from sft.launch.preflight import check_ranks, preflight
from sft.launch.prepare import end_preparation, plan_beside_preparation, prepared_data
from sft.parallel import environment
from sft.parallel import process_group as distributed
from sft.parallel.process_group import reporting_lost_ranks
from sft.plan.job import Job
from sft.plan.optimizer import uses_bitsandbytes
from sft.plan.plan import print_plan
from sft.plan.warnings import plan_warnings
from sft.run.directory import Run, lost_folder_reported
from sft.run.record import close_session, record_end, record_interruptions
from sft.train.tracking import finish_trackers, set_up_trackers

PREFLIGHT = "--preflight"


def main(argv: Sequence[str]) -> None:
    """Train one recipe, as the only process or as one of those that a launcher has started; with --preflight, only compare the ranks."""
    check_rank_variables()
    check_installed()
    environment.settle_allocator()
    terminal.start_rank_log()
    words = [word for word in argv if word != PREFLIGHT]
    checked = check_recipe(*parse_command_line(words, "sft.train"), distributed.job_hardware())
    with uncollected():
        prepares = "WORLD_SIZE" not in os.environ and PREFLIGHT not in argv
        job, preparation = plan_beside_preparation(checked) if prepares else (plan_job(checked), None)
    if PREFLIGHT in argv:
        show_preflight(job)
    else:
        train_job(job, preparation)


def show_preflight(job: Job) -> None:
    """Compare the ranks and show the table, as one of them; trains nothing."""
    with reporting_lost_ranks(job.recipe, "the preflight ran"):
        join(job)
        check_with_frameworks(job)
        preflight(job)
    distributed.leave_group()


def train_job(job: Job, preparation: Popen[bytes] | None = None) -> None:
    """Check, open the run, train, then evaluate.

    Args:
        job: What is trained.
        preparation: The process that prepares its data; None where it is prepared, or rank 0 prepares it for several processes.
    """
    resume_evaluation(job, preparation)
    tasks = check_before_training(job.recipe) if distributed.is_rank_0() else None
    if "WORLD_SIZE" not in os.environ:
        check_start(job)
    with uncollected(), reporting_lost_ranks(job.recipe, "the processes met"):
        enter(job)
        check_with_frameworks(job)
    if preparation is not None:
        prepared_data(job.recipe, job.model, command_of(job), begun=preparation)
    if tasks is not None:
        tasks.wait()
    tokenizer = load_tokenizer(pinned(job.recipe, job.model))
    with reporting_lost_ranks(job.recipe, "rank 0 prepared the data"):
        opened = open_run(job)
    record_interruptions(opened.run)
    terminal.move_rank_log(opened.run.path)
    from sft.train.main import train

    run, planned = opened.run, opened.planned
    with recorded(run), lost_folder_reported(run.checkpoints):
        if distributed.is_rank_0():
            show_start(planned, opened, tokenizer)
        during = None
        if planned.recipe.eval.during is not None:
            from eval.harness.during_training import evaluation_during  # imports lm_eval, which takes seconds

            during = evaluation_during(planned, run, tokenizer)
        seconds = train(planned, run, opened.prepared, tokenizer, opened.choice, opened.resume_plan, during)
        if distributed.is_rank_0():
            record_end(run, seconds, bool(programs(job.recipe.eval)) or exchange_of(run).is_dir())
    finish_trackers(job.recipe.tracking)
    distributed.leave_group()
    terminal.remove_launch_folder()
    if distributed.is_rank_0():
        become_evaluation(opened.run)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collection: it would search millions of objects that stay, which takes a quarter of the time."""
    gc.disable()
    # At exit frozen objects would be reported as leaked, one by one, behind the message of a mistake.
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # before whatever the imports have registered


def enter(job: Job) -> None:
    """Join the other ranks, and compare them."""
    join(job)
    check_ranks(job)


def join(job: Job) -> None:
    """Become one of the job's ranks."""
    uses_gpu = job.hardware.gpu is not None
    if job.recipe.debug:
        environment.set_debug_environment(job.plan.engine.value == "DDP", uses_gpu, runs_folder(job))
    environment.settle_environment(job.deepspeed, uses_gpu, job.plan.precision.value)
    if not uses_bitsandbytes(job.recipe):
        # peft imports it wherever it is installed, which takes half a second.
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    environment.quiet_frameworks()
    environment.check_devices(job.hardware)
    offloads = job.fsdp is not None and job.fsdp.offload_params
    distributed.join_group(job.deepspeed is not None, uses_gpu, job.recipe.train.ddp_timeout, offloads)


def check_with_frameworks(job: Job) -> None:
    """The checks that need the frameworks imported, still before data and weights. Raises UserError."""
    from sft.model.compiled_layers import check_compiler
    from sft.model.load import check_base
    from sft.model.new_tokens import check_new_tokens
    from sft.train.arguments import check_trainer_args
    from sft.train.hooks import own_callbacks

    check_base(job)
    check_trainer_args(job)
    own_callbacks(job.recipe)
    check_new_tokens(job)
    check_compiler(job)


@contextmanager
def recorded(run: Run) -> Iterator[None]:
    """Record a failure in run.json; sft/signals.py records an interruption."""
    try:
        yield
    except Exception as error:
        if distributed.is_rank_0():
            with suppress(OSError):  # on a full disk the error itself matters more than its record
                close_session(run, "failed")
                run.update(status="failed", error=f"{type(error).__name__}: {error}"[:2000])
        raise


def resume_evaluation(job: Job, preparation: Popen[bytes] | None) -> None:
    """Resume an interrupted evaluation on rank 0; the other ranks have nothing to do, and no data is needed."""
    run = unfinished_evaluation(job)
    if run is not None:
        end_preparation(preparation)
        if distributed.is_rank_0():
            become_evaluation(run)
        raise SystemExit(0)


def show_start(job: Job, opened: OpenedRun, tokenizer: Any) -> None:
    """Write plan.json, and print what is about to happen."""
    run = opened.run
    deepspeed = job.deepspeed.config if job.deepspeed else None
    decided = {"decisions": job.plan.decisions(), "memory": job.plan.memory_bytes, "deepspeed": deepspeed}
    write_json(run.plan_file, decided)
    warnings = plan_warnings(job.recipe, job.plan, job.hardware, job.model, opened.prepared.facts())
    run.warn("plan", *warnings)
    notes = [
        *(f"Warning: {warning}" for warning in warnings),
        *summary_lines(opened.prepared),
        *set_up_trackers(job.recipe.tracking, run),
        *pin_lines(run.record["hub_revisions"]),
        *filter(None, [getattr(tokenizer, "padding_note", None)]),
        f"Run: {run.path}",
        *opened.notes,
    ]
    if not Path(job.model.path).is_dir():
        notes.append(f"Loading {job.model.path}; the first time it is downloaded, which takes a while.")
    print_plan(
        job.plan, f"{job.name}: {job.recipe.model.name_or_path} on {job.hardware.device}", notes, job.recipe.debug
    )
