"""Trains one run on this rank, from the prepared data to final/. sft/launch/rank.py prepares it and hands it in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.checkpoint.final import write_final
from sft.checkpoint.resume import Choice, ResumePlan
from sft.checkpoint.save_verification import SaveVerification
from sft.data.prepared import Prepared
from sft.model.load import load_model
from sft.parallel import process_group as distributed
from sft.parallel.process_group import reporting_lost_ranks
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train.arguments import training_arguments
from sft.train.batches import training_sequences
from sft.train.eval_loss import eval_loss_of
from sft.train.faults import Faults
from sft.train.metrics import Metrics
from sft.train.profiling import Profile
from sft.train.runtime_check import RuntimeCheck
from sft.train.stopping import Stopping, leave_where_stopped
from sft.train.tracking import resume_trackers
from sft.train.trainer import RecipeTrainer, build_trainer, engine_callbacks
from sft.train.watchdog import Watchdog, name_debug_files

MakeEvaluation = Callable[[RecipeTrainer], TrainerCallback]


def train(
    job: Job,
    run: Run,
    prepared: Prepared,
    tokenizer: Any,
    choice: Choice,
    resume_plan: ResumePlan | None,
    make_evaluation: MakeEvaluation | None = None,
) -> float:
    """Train, and write final/.

    Args:
        job: With its data counted.
        run: Its folder, opened.
        prepared: The data.
        tokenizer: From load_tokenizer.
        choice: The checkpoint to resume from.
        resume_plan: How the run resumes from it.
        make_evaluation: Makes the callback that evaluates during the training; metrics.py's Measures.

    Returns:
        Seconds of training.

    Raises:
        Interrupted: The training was stopped, with a checkpoint.
        UserError: Something else would run than was planned, or the model could not be trained or saved.
    """
    recipe = job.recipe
    if recipe.debug:
        name_debug_files(run, distributed.rank())
    sequences = training_sequences(job, prepared, tokenizer)
    # Before the model: ZeRO-3 shards it while it loads.
    arguments = training_arguments(job, run)
    model = load_model(job, tokenizer)
    report_generation_notes(run, model.generation_notes)
    stopping, faults = Stopping(run, recipe), Faults(job, run, sequences, tokenizer)
    trainer = build_trainer(job, arguments, model, tokenizer, sequences, stopping, faults, resume_plan)
    watchdog = Watchdog(trainer.progress, run, distributed.rank(), job.hardware.ranks, recipe.train.ddp_timeout)
    verification = SaveVerification(trainer, job, run, tokenizer) if recipe.train.save_canary else None
    evaluation = make_evaluation(trainer) if make_evaluation is not None else None
    add_callbacks(trainer, job, run, prepared, watchdog, evaluation, verification)

    if distributed.is_rank_0():
        resume_trackers(trainer, run, choice.step)
    started = time.monotonic()
    with reporting_lost_ranks(
        recipe, lambda: f"step {trainer.state.global_step + 1} was trained", run, watchdog.stacks
    ):
        trainer.train(resume_from_checkpoint=str(choice.checkpoint) if choice.checkpoint else None)
    step = trainer.state.global_step
    leave_where_stopped(job, stopping, step)
    seconds = time.monotonic() - started
    with reporting_lost_ranks(recipe, "final/ was written", run):
        write_final(trainer, job, run, tokenizer, verification.verify_final if verification else None)
    if distributed.is_rank_0():
        steps = f"{step - choice.step} steps, to step {step}," if choice.step else f"{step} steps"
        print(f"Trained {steps} in {seconds:.0f} s: {run.final}", flush=True)
    return seconds


def add_callbacks(
    trainer: RecipeTrainer,
    job: Job,
    run: Run,
    prepared: Prepared,
    watchdog: Watchdog,
    evaluation: Any,
    verification: SaveVerification | None,
) -> None:
    """Give the trainer its callbacks, in the order in which they are called."""
    eval_loss = eval_loss_of(trainer, job, run, prepared)
    profile = Profile(run.path / "profile", distributed.rank(), job.hardware.gpu is not None)
    callbacks = [
        trainer.clock,  # first: what the others do at the end of a step is no part of the step
        *engine_callbacks(job),
        trainer.stopping,
        watchdog,
        RuntimeCheck(trainer, job, run),
        eval_loss,
        evaluation,
        verification,
        # After what measures for its lines.
        Metrics(trainer, run, job.hardware, {"held_out_loss": eval_loss, "eval": evaluation}),
        profile if job.recipe.train.profile else None,
    ]
    for callback in filter(None, callbacks):
        trainer.add_callback(callback)


def report_generation_notes(run: Run, notes: list[str]) -> None:
    """Report what had to change so that generation stops where the recipe says."""
    if distributed.is_rank_0():
        run.warn("generation", *notes)
        for note in notes:
            print(f"Warning: {note}", flush=True)
