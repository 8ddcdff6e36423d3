"""One training, from the prepared data to final/: what takes part in it is made here, and handed to the trainer."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from sft import terminal as rank_logs
from sft.checkpoint.final import write_model
from sft.checkpoint.resume import Choice, ResumePlan
from sft.checkpoint.save_verification import SaveVerification
from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.errors import EXIT_CRASHED, Interrupted, RunError, WrongSave
from sft.files import remove
from sft.model.load import load_model
from sft.parallel import process_group as distributed
from sft.parallel.agreement import Agreement
from sft.parallel.process_group import told_of_lost_ranks
from sft.parallel.progress import Progress
from sft.plan.job import Job
from sft.run.directory import Run, read_lines
from sft.run.trust import final_checksums
from sft.train.arguments import build_trainer, training_arguments
from sft.train.batches import Sequences, StepOrder
from sft.train.before_training import BeforeTraining
from sft.train.debugging import MemoryLog, prepare_files
from sft.train.eval_loss import HeldOutLoss
from sft.train.fingerprint import Fingerprint
from sft.train.metrics import Metrics
from sft.train.nonfinite import Nonfinite
from sft.train.offending_samples import StepRows
from sft.train.profiling import Profile
from sft.train.step_clock import StepClock
from sft.train.step_work import StepWork
from sft.train.stopping import Stopping
from sft.train.tracking import continue_trackers, finish_trackers
from sft.train.watchdog import Watchdog


def train(
    job: Job,
    run: Run,
    prepared: Prepared,
    tokenizer: Any,
    choice: Choice,
    continuation: ResumePlan | None,
    during: Any = None,
) -> float:
    """Train, and write final/.

    Args:
        job: With its data counted.
        run: Its folder, opened.
        prepared: The data.
        tokenizer: From load_tokenizer.
        choice: The checkpoint that it goes on from.
        continuation: How it does.
        during: The callback that evaluates during the training; its `take` gives metrics.jsonl the last figures, once.

    Returns:
        Seconds of training.
    """
    recipe, folder = job.recipe, prepared.folder
    index, store = SequenceIndex.load(folder / "train.npz"), DocumentStore.open(folder)
    per_step, empty = recipe.sequences_per_step, job.plan.empty_sequences_per_step.value
    sequences = Sequences(store, index, per_step, tokenizer.pad_token_id, recipe.data.packing, empty)
    arguments = training_arguments(job, run)
    model = load_model(job, tokenizer)
    if distributed.is_first_rank():
        run.warn("generation", *model.generation_notes)
        for note in model.generation_notes:
            print(f"Warning: {note}", flush=True)
    order = StepOrder(len(index), sequences.fillers, recipe.train.seed, per_step, empty)
    order.left_out = frozenset(run.record.get("left_out_steps", []))
    held_out = held_out_loss(job, run, prepared, tokenizer, store)
    fingerprint = Fingerprint()
    work = StepWork(store, index, order, per_step)
    clock, measuring = measurements(job, run, work, held_out, fingerprint, during)
    progress, agreement, watching = watch(job, run)
    stopping = Stopping(run.path, recipe, progress, distributed.rank(), job.hardware.ranks)
    canary = SaveVerification(job, run, tokenizer) if recipe.train.save_canary else None
    checks = [BeforeTraining(job, run), *filter(None, [held_out, during, canary])]
    callbacks = [stopping, *watching, *checks, *measuring]
    trainer = build_trainer(job, arguments, model, tokenizer, sequences, order, callbacks, clock)
    for callback in checks:
        callback.trainer = trainer
    trainer.progress, trainer.agreement, trainer.fingerprint = progress, agreement, fingerprint
    trainer.nonfinite, trainer.canary = nonfinite(job, run, sequences, order, tokenizer), canary
    trainer.stopping = stopping
    checkpoint, trainer.continuation = choice.checkpoint, continuation
    if distributed.is_first_rank():
        continue_trackers(trainer, run, choice.step)
    started = time.monotonic()
    with told_of_lost_ranks(
        job.recipe, lambda: f"step {trainer.state.global_step + 1} was trained", run, watching[0].late
    ):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    with stopping.losses_told(trainer.state.global_step):
        leave_where_stopped(job, stopping.end(trainer.state.global_step))
        seconds = time.monotonic() - started
        with told_of_lost_ranks(job.recipe, "final/ was written", run):
            write_final(trainer, job, run, tokenizer)
    if distributed.is_first_rank():
        reached, before = trainer.state.global_step, choice.step
        steps = f"{reached - before} steps, to step {reached}," if before else f"{reached} steps"
        print(f"Trained {steps} in {seconds:.0f} s: {run.final}", flush=True)
    return seconds


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


def write_final(trainer: Any, job: Job, run: Run, tokenizer: Any) -> None:
    """final/: complete, and what the model in memory is.

    Raises:
        WrongSave: It is another model; it is kept as `unverified` then.
        RunError: It could not be loaded to compare; kept as well.
    """
    work = run.path / ".final"
    write_model(trainer, job, tokenizer, work)
    if trainer.canary is not None:
        try:
            trainer.canary.verify_final(work)
        except (RunError, WrongSave) as error:
            # The training is over: what it made must not be lost in a hidden folder.
            with distributed.met_at_the_end():
                if distributed.is_first_rank():
                    remove(run.unverified)
                    work.rename(run.unverified)
            kept = f"The training is complete, and its model is kept in {run.unverified}. There is no final/, and nothing is evaluated."
            error.args = (f"{str(error).replace(str(work), str(run.unverified))}\n{kept}",)
            raise
    with distributed.met_at_the_end():
        if distributed.is_first_rank():
            remove(run.unverified)  # of an earlier end of this run
            # Before final/ has its name: an export or an evaluation compares it with these.
            run.update(final_files=final_checksums(work))
            remove(run.final)
            work.rename(run.final)


def measurements(
    job: Job, run: Run, work: Any, held_out: Any, fingerprint: Any, during: Any = None
) -> tuple[Any, list[Any]]:
    """The clock of the steps, and the callbacks that write what was measured."""
    on_gpu = job.hardware.gpu is not None
    clock = StepClock(on_gpu)
    metrics = Metrics(run.metrics_file, job.hardware, work, clock, fingerprint, held_out, during, run.warn)
    callbacks: list[Any] = [metrics]
    if job.recipe.train.profile:
        callbacks.append(Profile(run.path / "profile", distributed.rank(), on_gpu))
    return clock, callbacks


def held_out_loss(job: Job, run: Run, prepared: Prepared, tokenizer: Any, store: Any) -> Any:
    """What measures the held-out loss, or None where no rows are held out."""
    index = SequenceIndex.load(prepared.folder / "held_out.npz")
    if not len(index):
        return None
    ranks = job.plan.data_parallel_ranks.value
    sequences = Sequences(store, index, ranks, tokenizer.pad_token_id, job.recipe.data.packing)

    def is_missing(step: int) -> bool:
        lines = distributed.from_first_rank(lambda: read_lines(run.metrics_file))
        return any(line["step"] == step and "held_out_loss" not in line for line in lines)

    every = job.recipe.train.eval_steps or job.recipe.train.save_steps
    return HeldOutLoss(sequences, every, is_missing, lambda loss: run.update(held_out_loss_before=loss))


def nonfinite(job: Job, run: Run, sequences: Any, order: Any, tokenizer: Any) -> Any:
    """What watches for a loss or a gradient that is not finite."""
    train, precision = job.recipe.train, job.plan.precision.value
    rows = StepRows(sequences, order, [source.path for source in job.recipe.sources], tokenizer)
    return Nonfinite(run, rows, train.on_nonfinite, train.max_nonfinite_steps, precision == "fp16")


def watch(job: Job, run: Run) -> tuple[Any, Any, list[Any]]:
    """What counts this rank's progress, what compares it with the others (debug=true only), and the callbacks of both."""
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
    text = f"{message}\n{run.next_start}."
    if distributed.is_first_rank():
        with suppress(OSError):
            run.update(status="failed", error=message[:2000])
    rank_logs.tell_message(text)
    os._exit(EXIT_CRASHED)
