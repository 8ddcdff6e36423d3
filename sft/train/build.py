"""Builds the trainer: adapters, the engine's kind of trainer, compiled layers, and the callbacks that complete the engine."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers.trainer_callback import TrainerCallback
from trl import SFTConfig

from sft.checkpoint.resume import ResumePlan
from sft.checkpoint.trainer import ResumedSettings
from sft.data.tokenizer import new_token_ids
from sft.model.adapters import add_adapters, lora_config, show_head, untrained_rows
from sft.model.compiled_layers import compile_layers
from sft.model.frozen import freeze
from sft.model.gradient_checkpointing import SelectiveCheckpointing
from sft.model.new_tokens import named
from sft.model.quantization import adapters_stay_fp32
from sft.parallel import process_group as distributed
from sft.parallel.fsdp import Prefetch
from sft.plan.job import Job
from sft.plan.pipeline import PIPELINE
from sft.train.batches import Sequences
from sft.train.faults import Faults
from sft.train.optimizers import build_arguments
from sft.train.pipeline import PipelineTrainer
from sft.train.stopping import Stopping
from sft.train.trainer import RecipeTrainer


def build_trainer(
    job: Job,
    arguments: SFTConfig,
    model: Any,
    tokenizer: Any,
    sequences: Sequences,
    stopping: Stopping | None = None,
    faults: Faults | None = None,
    resume_plan: ResumePlan | None = None,
) -> RecipeTrainer:
    """The trainer, with adapters and compiled layers where the job has them; callbacks are still to be added."""
    lora, kind = job.recipe.model.lora, RecipeTrainer if job.plan.engine.value != PIPELINE else PipelineTrainer
    freeze(model, job.recipe.model.freeze)
    if lora is not None:
        # Under FSDP2 rank 0 alone may hold the weights yet; ZeRO-3 gathers them.
        found = partial(untrained_rows, job, model, tokenizer, sequences.store)
        untrained = distributed.from_rank_0(found) if job.fsdp else found()
        if untrained and distributed.is_rank_0():
            names = named(tokenizer, untrained)
            print(
                f"The base never trained the embeddings of {names}: they are trained beside the adapters.", flush=True
            )
        config = lora_config(lora, model, new_token_ids(tokenizer, job.recipe.model.new_tokens) + untrained)
        model = add_adapters(job, model, config)
    with adapters_stay_fp32(model):
        trainer = kind(
            job,
            sequences,
            stopping=stopping,
            faults=faults,
            resume_plan=resume_plan,
            model=model,
            args=arguments,
            processing_class=tokenizer,
            optimizer_cls_and_kwargs=build_arguments(job),
        )
    show_head(trainer.model)
    if job.plan.compile.value:
        compile_layers(trainer.model, job.plan.attention.value, job.hardware.gpu is not None)
    return trainer


def engine_callbacks(job: Job) -> list[TrainerCallback]:
    """Complete the engine when the training begins, before the runtime check reads it."""
    plan, ahead = job.plan, job.fsdp.prefetch if job.fsdp else None
    return [
        *([SelectiveCheckpointing()] if plan.gradient_checkpointing.value == "selective" else []),
        ResumedSettings(plan.learning_rate.value),
        *([Prefetch(ahead)] if ahead else []),
    ]
