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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sft import distributed, interruption, rank_logs
from sft.checker import Checker
from sft.errors import EXIT_CRASHED, Interrupted, RecipeError, run_main
from sft.finish import become_finish, evaluation_left
from sft.inside import remove
from sft.job import Job, open_job
from sft.launch_checks import check_rank_variables
from sft.lost_ranks import told_of_lost_ranks
from sft.pins import pin_lines
from sft.plan import print_plan
from sft.preflight import check_ranks
from sft.record import close_session, record_end
from sft.rewind import become_again
from sft.run_directory import Run, write_json
from sft.run_folder import told_of_a_lost_folder
from sft.saving import write_model
from sft.show import summary_lines
from sft.start import Start, begin_data, start_run, wait_for_data
from sft.tokenizer import load_tokenizer
from sft.tracking import continue_trackers, finish_trackers, set_up_trackers


def main(argv: Sequence[str]) -> None:
    """Train one recipe: the table of contents."""
    check_rank_variables()
    rank_logs.begin()
    recipe_path, overrides = parse_command_line(argv)
    job = open_job(recipe_path, overrides, distributed.job_hardware())
    evaluate_what_is_trained(job)
    data = begin_data(job)
    checker = Checker() if job.recipe.train.save_canary and distributed.is_first_rank() else None
    with uncollected(), told_of_lost_ranks(job.recipe, "the processes met"):
        enter(job)
        check_with_frameworks(job)
    wait_for_data(job, data)
    tokenizer = load_tokenizer(job.recipe)
    with told_of_lost_ranks(job.recipe, "the first one prepared the data"):
        start = start_run(job)
    interruption.is_of(start.run)
    rank_logs.move_to(start.run.path)
    with recorded(start.run), told_of_a_lost_folder(start.run.checkpoints), going_back(argv):
        train(start.planned(job), start, tokenizer, checker)
    finish_trackers(job.recipe.tracking)
    distributed.leave_group()
    rank_logs.end()
    if distributed.is_first_rank():
        become_finish(start.run)


def parse_command_line(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """The recipe's path and the overrides."""
    # The deepspeed launcher adds --local_rank=N; the environment says the same.
    words = [word for word in argv if not word.startswith("--local_rank")]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise RecipeError("usage: python -m sft.train RECIPE [key=value ...]")
    return Path(words[0]), words[1:]


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without looking for garbage, then or later, among what the imports leave.

    They make millions of objects, nearly all of which stay: looking through them again and again is a quarter of the time.
    """
    gc.disable()
    # What is frozen at exit is told as leaked, object by object, behind the message of a mistake.
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # What is never looked through again is never freed either, and triton tells of each such object at the end.
        atexit.register(gc.unfreeze)


def enter(job: Job) -> None:
    """Join the other ranks, and compare them."""
    join(job)
    check_ranks(job)


def join(job: Job) -> None:
    """Become one of the job's ranks."""
    uses_gpu = job.hardware.gpu is not None
    if job.recipe.debug:
        distributed.set_debug_environment(job.plan.engine.value == "DDP", uses_gpu)
    distributed.settle_environment(job.deepspeed is not None, uses_gpu, job.plan.precision.value)
    distributed.quiet_frameworks()
    distributed.check_devices(job.hardware)
    offloads = job.fsdp is not None and job.fsdp.offload_params
    distributed.join_group(job.deepspeed is not None, uses_gpu, job.recipe.train.ddp_timeout, offloads)


def check_with_frameworks(job: Job) -> None:
    """The checks that need the frameworks imported, still before data and weights.

    Raises:
        UserError: Kernels, trainer arguments, new tokens that would stay untrained, or no compiler.
    """
    from sft.compiled_layers import check_compiler
    from sft.embeddings import check_new_tokens
    from sft.model import check_kernels
    from sft.trainer import check_trainer_args

    check_kernels(job)
    check_trainer_args(job)
    check_new_tokens(job)
    check_compiler(job)


def say(*lines: str) -> None:
    """Print on the first rank."""
    if distributed.is_first_rank():
        print(*lines, sep="\n", flush=True)


@contextmanager
def recorded(run: Run) -> Iterator[None]:
    """Keep run.json's status true however the training ends. An interruption is recorded by who tells it: sft/interruption.py."""
    try:
        yield
    except Exception as error:
        if distributed.is_first_rank():
            with suppress(OSError):  # on a full disk the error itself matters more than its record
                close_session(run, "failed")
                run.update(status="failed", error=f"{type(error).__name__}: {error}"[:2000])
        raise


@contextmanager
def going_back(argv: Sequence[str]) -> Iterator[None]:
    """Go back to the last checkpoint where a fault in the numbers asks for it."""
    from sft.nonfinite import Rewind

    try:
        yield
    except Rewind as fault:
        become_again(argv, str(fault))


def train(job: Job, start: Start, tokenizer: Any, checker: Checker | None) -> None:
    """Train, and write final/."""
    from sft.batches import Sequences, StepOrder
    from sft.before_training import BeforeTraining
    from sft.canary import SaveCanary
    from sft.fingerprint import Fingerprint
    from sft.model import load_model
    from sft.step_work import StepWork
    from sft.stopping import Stopping
    from sft.store import DocumentStore, SequenceIndex
    from sft.trainer import build_trainer, training_arguments

    run, recipe, folder = start.run, job.recipe, start.prepared.folder
    index, store = SequenceIndex.load(folder / "train.npz"), DocumentStore.open(folder)
    per_step, empty = recipe.sequences_per_step, job.plan.empty_sequences_per_step.value
    sequences = Sequences(store, index, per_step, tokenizer.pad_token_id, recipe.data.packing, empty)
    if distributed.is_first_rank():
        show_start(job, start)
    arguments = training_arguments(job, run)
    model = load_model(job, tokenizer)
    order = StepOrder(len(index), sequences.fillers, recipe.train.seed, per_step, empty)
    order.left_out = frozenset(run.record.get("left_out_steps", []))
    held_out = held_out_loss(job, start, tokenizer, store)
    fingerprint = Fingerprint()
    clock, measuring = measurements(job, run, StepWork(store, index, order, per_step), held_out, fingerprint)
    progress, agreement, watching = watch(job, run)
    stopping = Stopping(run.path, recipe, progress, distributed.rank(), job.hardware.ranks)
    canary = SaveCanary(job, run, tokenizer, checker) if recipe.train.save_canary else None
    checks = [BeforeTraining(job, run), *filter(None, [held_out, canary])]
    callbacks = [stopping, *watching, *checks, *measuring]
    trainer = build_trainer(job, arguments, model, tokenizer, sequences, order, callbacks, clock)
    for callback in checks:
        callback.trainer = trainer
    trainer.progress, trainer.agreement, trainer.fingerprint = progress, agreement, fingerprint
    trainer.nonfinite, trainer.canary = nonfinite(job, run, sequences, order, tokenizer), canary
    trainer.stopping = stopping
    checkpoint, trainer.continuation = start.choice.checkpoint, start.continuation
    if distributed.is_first_rank():
        continue_trackers(trainer, run, start.choice.step)
    started = time.monotonic()
    with told_of_lost_ranks(job.recipe, lambda: f"step {trainer.state.global_step + 1} was trained", run):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    leave_where_stopped(job, stopping.end(trainer.state.global_step))
    seconds = time.monotonic() - started
    with told_of_lost_ranks(job.recipe, "final/ was written", run):
        write_final(trainer, job, run, tokenizer)
    if distributed.is_first_rank():
        record_end(run, seconds)
    say(f"Trained {trainer.state.global_step} steps in {seconds:.0f} s: {run.final}")


def leave_where_stopped(job: Job, interrupted: Interrupted | None) -> None:
    """End as a finished training does, where it was stopped with a checkpoint.

    Raises:
        Interrupted: It was.
    """
    if interrupted is not None:
        with distributed.met_at_the_end():  # who ends first is followed by all others
            finish_trackers(job.recipe.tracking)
        distributed.leave_group()
        raise interrupted


def evaluate_what_is_trained(job: Job) -> None:
    """Go on with the evaluation where it was interrupted; the first rank does, and the others have nothing to do."""
    run = evaluation_left(job)
    if run is not None:
        if distributed.is_first_rank():
            become_finish(run)
        raise SystemExit(0)


def measurements(job: Job, run: Run, work: Any, held_out: Any, fingerprint: Any) -> tuple[Any, list[Any]]:
    """The clock of the steps, and the callbacks that write what was measured."""
    from sft.metrics import Metrics
    from sft.profiling import Profile
    from sft.step_clock import StepClock

    on_gpu = job.hardware.gpu is not None
    clock = StepClock(on_gpu)
    callbacks: list[Any] = [Metrics(run.metrics_file, job.hardware, work, clock, fingerprint, held_out)]
    if job.recipe.train.profile:
        callbacks.append(Profile(run.path / "profile", distributed.rank(), on_gpu))
    return clock, callbacks


def nonfinite(job: Job, run: Run, sequences: Any, order: Any, tokenizer: Any) -> Any:
    """What watches for a loss or a gradient that is not finite."""
    from sft.nonfinite import Nonfinite
    from sft.suspects import StepRows

    train, precision = job.recipe.train, job.plan.precision.value
    rows = StepRows(sequences, order, [source.path for source in job.recipe.sources], tokenizer)
    return Nonfinite(run, rows, train.on_nonfinite, train.max_nonfinite_steps, precision == "fp16")


def watch(job: Job, run: Run) -> tuple[Any, Any, list[Any]]:
    """What counts this rank's progress, what compares it with the others (debug=true only), and the callbacks of both."""
    from sft.agreement import Agreement
    from sft.debugging import MemoryLog, prepare_files
    from sft.progress import Progress
    from sft.watchdog import Watchdog

    recipe, rank, ranks, logs = job.recipe, distributed.rank(), job.hardware.ranks, run.path / "logs"
    timeout, progress = recipe.train.ddp_timeout, Progress()
    watchdog = Watchdog(progress, logs, rank, ranks, timeout, recipe.debug, end=lambda text: end_hanging(run, text))
    if not recipe.debug:
        return progress, None, [watchdog]
    prepare_files(logs, rank)
    agreement = Agreement(progress, timeout) if ranks > 1 else None
    return progress, agreement, [watchdog, MemoryLog(logs / f"rank-{rank}.memory.jsonl"), *filter(None, [agreement])]


def end_hanging(run: Run, message: str) -> None:
    """End this process in another thread than its main one, which hangs."""
    text = f"{message}\n{run.after_an_end}."
    if distributed.is_first_rank():
        with suppress(OSError):
            run.update(status="failed", error=message[:2000])
    rank_logs.tell_message(text)
    os._exit(EXIT_CRASHED)


def held_out_loss(job: Job, start: Start, tokenizer: Any, store: Any) -> Any:
    """What measures the held-out loss, or None where no rows are held out."""
    from sft.batches import Sequences
    from sft.held_out import HeldOutLoss
    from sft.metrics import read_lines
    from sft.store import SequenceIndex

    index = SequenceIndex.load(start.prepared.folder / "held_out.npz")
    if not len(index):
        return None
    ranks = job.plan.data_parallel_ranks.value
    sequences = Sequences(store, index, ranks, tokenizer.pad_token_id, job.recipe.data.packing)

    def is_missing(step: int) -> bool:
        lines = distributed.from_first_rank(lambda: read_lines(start.run.metrics_file))
        return any(line["step"] == step and "held_out_loss" not in line for line in lines)

    every = job.recipe.train.eval_steps or job.recipe.train.save_steps
    return HeldOutLoss(sequences, every, is_missing, lambda loss: start.run.update(held_out_loss_before=loss))


def show_start(job: Job, start: Start) -> None:
    """Write plan.json, and print what is about to happen."""
    run = start.run
    write_json(
        run.plan_file, {"decisions": job.plan.decisions(), "deepspeed": job.deepspeed.config if job.deepspeed else None}
    )
    notes = [
        *summary_lines(start.prepared),
        *set_up_trackers(job.recipe.tracking, run),
        *pin_lines(run.record["hub_revisions"]),
        f"Run: {run.path}",
        *start.notes,
    ]
    if not Path(job.model.path).is_dir():
        notes.append(f"Loading {job.model.path}; the first time it is downloaded, which takes a while.")
    print_plan(job.plan, f"{job.name}: {job.recipe.model.name_or_path} on {job.hardware.device}", notes)


def write_final(trainer: Any, job: Job, run: Run, tokenizer: Any) -> None:
    """final/: complete, and what the model in memory is; or absent."""
    work = run.path / ".final"
    write_model(trainer, job, tokenizer, work)
    if trainer.canary is not None:
        trainer.canary.check(work)
        trainer.canary.close()
    with distributed.met_at_the_end():
        if distributed.is_first_rank():
            remove(run.final)
            work.rename(run.final)


if __name__ == "__main__":
    run_main(main)
