"""Trains one run on this rank, from the prepared data to final/. sft/launch/rank.py prepares it and hands it in."""

from __future__ import annotations

import time
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.checkpoint.final import write_model
from sft.checkpoint.resume import Choice, ResumePlan
from sft.checkpoint.save_verification import SaveVerification
from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.errors import Interrupted, RunError, WrongSave
from sft.files import remove
from sft.model.load import load_model
from sft.parallel import process_group as distributed
from sft.parallel.process_group import reporting_lost_ranks
from sft.parallel.progress import Progress
from sft.plan.job import Job
from sft.run.directory import Run
from sft.run.trust import final_checksums
from sft.train.arguments import build_trainer, engine_callbacks, training_arguments
from sft.train.batches import Fingerprint, Sequences, StepWork
from sft.train.eval_loss import load_eval_loss
from sft.train.faults import Faults, Samples
from sft.train.metrics import Metrics, StepClock
from sft.train.profiling import Profile
from sft.train.runtime_check import RuntimeCheck
from sft.train.stopping import Stopping
from sft.train.tracking import finish_trackers, resume_trackers
from sft.train.trainer import RecipeTrainer
from sft.train.watchdog import Watchdog, name_debug_files


def train(
    job: Job,
    run: Run,
    prepared: Prepared,
    tokenizer: Any,
    choice: Choice,
    resume_plan: ResumePlan | None,
    evaluation: TrainerCallback | None = None,
) -> float:
    """Train, and write final/.

    Args:
        job: With its data counted.
        run: Its folder, opened.
        prepared: The data.
        tokenizer: From load_tokenizer.
        choice: The checkpoint to resume from.
        resume_plan: How the run resumes from it.
        evaluation: Evaluates during the training; metrics.py's Measures.

    Returns:
        Seconds of training.

    Raises:
        Interrupted: The training was stopped, with a checkpoint.
        UserError: Something else would run than was planned, or the model could not be trained or saved.
    """
    recipe, plan, on_gpu = job.recipe, job.plan, job.hardware.gpu is not None
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    empty = plan.empty_sequences_per_step.value
    sequences = Sequences(store, index, recipe.sequences_per_step, tokenizer.pad_token_id, recipe.data.packing, empty)
    order = sequences.order(recipe.train.seed)
    # Before the model: ZeRO-3 shards it while it loads.
    arguments = training_arguments(job, run)
    model = load_model(job, tokenizer)
    if distributed.is_rank_0():
        run.warn("generation", *model.generation_notes)
        for note in model.generation_notes:
            print(f"Warning: {note}", flush=True)

    rank, ranks = distributed.rank(), job.hardware.ranks
    if recipe.debug:
        name_debug_files(run, rank)
    progress, fingerprint, clock = Progress(), Fingerprint(), StepClock(on_gpu)
    stopping = Stopping(run.path, recipe, progress, rank, ranks)
    watchdog = Watchdog(progress, run, rank, ranks, recipe.train.ddp_timeout)
    eval_loss = load_eval_loss(job, run, prepared.folder, store, tokenizer.pad_token_id, stopping)
    verification = SaveVerification(job, run, tokenizer) if recipe.train.save_canary else None
    measured = {"held_out_loss": eval_loss, "eval": evaluation}
    callbacks = [
        clock,  # first: what the others do at the end of a step is no part of the step
        *engine_callbacks(job),
        stopping,
        watchdog,
        RuntimeCheck(job, run),
        *filter(None, [eval_loss, evaluation, verification]),
        # After what measures for its lines.
        Metrics(run, job.hardware, StepWork(sequences, order), clock, fingerprint, measured),
        *([Profile(run.path / "profile", rank, on_gpu)] if recipe.train.profile else []),
    ]
    samples = Samples(sequences, order, [source.path for source in recipe.sources], tokenizer)
    faults = Faults(
        run, samples, recipe.train.on_nonfinite, recipe.train.max_nonfinite_steps, plan.precision.value == "fp16"
    )
    trainer = build_trainer(
        job, arguments, model, tokenizer, sequences, order, callbacks, clock, progress, fingerprint, stopping, faults,
        resume_plan,
    )  # fmt: skip

    if distributed.is_rank_0():
        resume_trackers(trainer, run, choice.step)
    started = time.monotonic()
    with reporting_lost_ranks(
        recipe, lambda: f"step {trainer.state.global_step + 1} was trained", run, watchdog.stacks
    ):
        trainer.train(resume_from_checkpoint=str(choice.checkpoint) if choice.checkpoint else None)
    step = trainer.state.global_step
    with stopping.reporting_lost_steps(step):
        leave_where_stopped(job, stopping.end(step))
        seconds = time.monotonic() - started
        with reporting_lost_ranks(recipe, "final/ was written", run):
            write_final(trainer, job, run, tokenizer, verification)
    if distributed.is_rank_0():
        steps = f"{step - choice.step} steps, to step {step}," if choice.step else f"{step} steps"
        print(f"Trained {steps} in {seconds:.0f} s: {run.final}", flush=True)
    return seconds


def leave_where_stopped(job: Job, interrupted: Interrupted | None) -> None:
    """End as a finished training does, where it was stopped with a checkpoint.

    Raises:
        Interrupted: It was.
    """
    if interrupted is not None:
        with distributed.barrier_at_end():  # when the first rank ends, the launcher ends all others
            finish_trackers(job.recipe.tracking)
        distributed.leave_group()
        raise interrupted


def write_final(
    trainer: RecipeTrainer, job: Job, run: Run, tokenizer: Any, verification: SaveVerification | None
) -> None:
    """Write final/: complete, and equal to the model in memory.

    Raises:
        WrongSave: It is another model; it is kept as `unverified` then.
        RunError: It could not be loaded to compare; kept as well.
    """
    work = run.path / ".final"
    write_model(trainer, job, tokenizer, work)
    if verification is not None:
        try:
            verification.verify_final(work)
        except (RunError, WrongSave) as error:
            # The training is over: its result must not be lost in a hidden folder.
            with distributed.barrier_at_end():
                if distributed.is_rank_0():
                    remove(run.unverified)
                    work.rename(run.unverified)
            kept = f"The training is complete, and its model is kept in {run.unverified}. There is no final/, and nothing is evaluated."
            error.args = (f"{str(error).replace(str(work), str(run.unverified))}\n{kept}",)
            raise
    with distributed.barrier_at_end():
        if distributed.is_rank_0():
            remove(run.unverified)  # of an earlier end of this run
            # Before final/ has its name: an export or an evaluation compares it with these.
            run.update(final_files=final_checksums(work))
            remove(run.final)
            work.rename(run.final)
