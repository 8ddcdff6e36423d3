"""Trains one run on this rank, from the prepared data to final/. sft/launch/rank.py prepares it and hands it in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.checkpoint.final import write_final
from sft.checkpoint.resume import Choice, ResumePlan
from sft.checkpoint.save_verification import SaveVerification
from sft.data.prepared import Prepared
from sft.model.load import load_model
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train.arguments import training_arguments
from sft.train.batches import training_sequences
from sft.train.best import BestCheckpoint
from sft.train.build import build_trainer, engine_callbacks
from sft.train.eval_loss import eval_loss_of
from sft.train.faults import Faults
from sft.train.hooks import own_callbacks
from sft.train.metrics import Metrics
from sft.train.out_of_memory import reporting_out_of_memory
from sft.train.pipeline import modules_elsewhere
from sft.train.profiling import Profile
from sft.train.runtime_check import RuntimeCheck
from sft.train.stopping import Stopping, leave_where_stopped
from sft.train.tracker_runs import FlushTrackers, open_trackers
from sft.train.trainer import RecipeTrainer
from sft.train.watchdog import Watchdog

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
    """Train, and write final/; returns the seconds of training.

    `choice` is the checkpoint to resume from, and `make_evaluation` makes the callback that evaluates during the training.

    Raises:
        Interrupted: The training was stopped, with a checkpoint.
        UserError: Something else would run than was planned, or the model could not be trained or saved.
    """
    recipe = job.recipe
    if job.hardware.gpu is not None:
        # torch's flight recorder appends the rank.
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(run.path / "logs" / "flight-recorder-"))
    sequences = training_sequences(job, prepared, tokenizer)
    arguments = training_arguments(job, run)
    with reporting_out_of_memory(job, "the model was loaded"):
        model = load_model(job, tokenizer, modules_elsewhere(job))
    if distributed.is_rank_0():
        run.warn("generation", *model.generation_notes)
        for note in model.generation_notes:
            print(f"Warning: {note}", flush=True)
    stopping, faults = Stopping(run, recipe), Faults(job, run, sequences, tokenizer)
    with reporting_out_of_memory(job, "the engine was built"):
        trainer = build_trainer(job, arguments, model, tokenizer, sequences, stopping, faults, resume_plan)
    watchdog = Watchdog(trainer.progress, run, distributed.rank(), job.hardware.ranks, recipe.train.ddp_timeout)
    verification = SaveVerification(trainer, job, run, tokenizer) if recipe.train.save_canary else None
    evaluation = make_evaluation(trainer) if make_evaluation is not None else None
    measured = {"held_out_loss": eval_loss_of(trainer, run, prepared), "eval": evaluation}
    best = BestCheckpoint(trainer, run, measured) if recipe.train.load_best_model_at_end else None
    for callback in callbacks(trainer, run, watchdog, measured, best, verification):
        trainer.add_callback(callback)
    if distributed.is_rank_0():
        open_trackers(trainer, run, choice.step)
    started = time.monotonic()
    lost = distributed.reporting_lost_ranks(recipe, trainer.doing, run, watchdog.stacks)
    with lost, reporting_out_of_memory(job, trainer.doing, trainer):
        trainer.train(resume_from_checkpoint=str(choice.checkpoint) if choice.checkpoint else None)
    step, last = trainer.state.global_step, trainer.state.max_steps
    leave_where_stopped(job, stopping, step)
    if recipe.train.callbacks and best is None and distributed.is_rank_0():
        early = f"The training ended after step {step} of {last}, before its last: a callback ended it."
        run.warn("callbacks", early if step < last else None)
    seconds = time.monotonic() - started
    lost = distributed.reporting_lost_ranks(recipe, "final/ was written", run)
    with lost, reporting_out_of_memory(job, "final/ was written", trainer):
        if best is not None:
            best.load()
        write_final(trainer, job, run, tokenizer, verification.verify_final if verification else None)
    if distributed.is_rank_0():
        steps = f"{step - choice.step} steps, to step {step}," if choice.step else f"{step} steps"
        print(f"Trained {steps} in {seconds:.0f} s: {run.final}", flush=True)
    return seconds


def callbacks(
    trainer: RecipeTrainer,
    run: Run,
    watchdog: Watchdog,
    measured: Mapping[str, Any],
    best: BestCheckpoint | None,
    verification: SaveVerification | None,
) -> list[TrainerCallback]:
    """The trainer's callbacks, in the order in which they are called."""
    job = trainer.job
    return [
        trainer.clock,  # first: what the others do at the end of a step is no part of the step
        *engine_callbacks(job),
        trainer.stopping,
        watchdog,
        RuntimeCheck(trainer, job, run),
        *filter(None, (*measured.values(), best, verification)),
        *own_callbacks(job.recipe),
        Metrics(trainer, run, job.hardware, measured),  # after what measures for its lines
        *([FlushTrackers(job.recipe.tracking)] if job.recipe.tracking.report_to else []),
        *([Profile(run.path / "profile", job.hardware.gpu is not None)] if job.recipe.train.profile else []),
    ]
