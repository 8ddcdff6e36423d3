"""Decides everything that the recipe left open, for one machine, each decision with its reason.

A pure function of plain values: it reads no environment and does not change the recipe.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from sft.hub.data_facts import DataFacts
from sft.hub.model_facts import ModelFacts
from sft.plan.batch import (
    resolve_data_parallel_ranks,
    resolve_learning_rate,
    resolve_sequences,
    sequences_per_epoch,
    split_batch,
)
from sft.plan.case import Case
from sft.plan.deepspeed import DeepSpeedFile, check_deepspeed
from sft.plan.disk import resolve_disk
from sft.plan.engine import open_deepspeed, resolve_engine, resolve_memory
from sft.plan.hardware import Hardware
from sft.plan.layers import resolve_attention, resolve_checkpointing, resolve_kernels
from sft.plan.memory import estimate_memory
from sft.plan.memory_estimate import MemoryEstimate
from sft.plan.optimizer import resolve_optimizer
from sft.plan.pipeline import resolve_pipeline_parallel
from sft.plan.plan import Decision, Plan, TuningResult, stated
from sft.plan.precision import resolve_gradients, resolve_precision, resolve_quantization, resolve_weights
from sft.plan.refusals import refuse
from sft.plan.rope import resolve_rope
from sft.plan.schedule import resolve_warmup
from sft.plan.time import resolve_time
from sft.recipe.schema import Recipe


def resolve_plan(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts | None = None,
    deepspeed: DeepSpeedFile | None = None,
    tuned: TuningResult | None = None,
) -> Plan:
    """Decide everything the recipe left open. Raises PlanError, with values that can run, if the recipe cannot.

    Args:
        recipe: What the user wants.
        hardware: The machine.
        model: What config.json says.
        data: How much data there is, estimated or counted; None where nothing is known before preparation.
        deepspeed: The file that train.deepspeed names or stands for, or None.
        tuned: What auto-tuning found for the values that are `auto`; None: they follow from arithmetic.
    """
    batch = resolve_sequences(recipe, hardware)
    precision = resolve_precision(recipe, hardware, model)
    attention = resolve_attention(recipe, hardware, precision.value, model.model_type, model.architecture)
    checkpointing = resolve_checkpointing(recipe, hardware, deepspeed, tuned)
    memory_with = partial(_memory_with, recipe, hardware, model, deepspeed, checkpointing.value, attention.value)
    micro, accumulation, empty = split_batch(recipe, hardware, batch.value, attention.value, tuned, memory_with)
    steps_per_epoch, max_steps = _steps(recipe, batch.value, data)
    estimate = memory_with(micro.value)
    plan = Plan(
        engine=resolve_engine(recipe, hardware, model, deepspeed),
        memory=resolve_memory(estimate, hardware, micro.value),
        memory_estimate=estimate,
        precision=precision,
        weights=resolve_weights(recipe, hardware, deepspeed, precision.value),
        quantization=resolve_quantization(recipe, hardware, deepspeed, precision.value),
        gradients=resolve_gradients(recipe, hardware, deepspeed, precision.value, accumulation.value),
        attention=attention,
        kernels=resolve_kernels(recipe, hardware, model),
        compile=Decision(recipe.model.compile, stated(recipe.model, "compile")),
        gradient_checkpointing=checkpointing,
        global_batch_size=batch,
        tensor_parallel_size=_as_stated(recipe, "tensor_parallel_size"),
        sequence_parallel_size=_as_stated(recipe, "sequence_parallel_size"),
        pipeline_parallel_size=resolve_pipeline_parallel(recipe, model, accumulation.value),
        data_parallel_ranks=resolve_data_parallel_ranks(recipe, hardware),
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        empty_sequences_per_step=empty,
        learning_rate=resolve_learning_rate(recipe),
        rope_scaling=resolve_rope(recipe, model),
        optimizer=resolve_optimizer(recipe),
        lr_scheduler_type=_as_stated(recipe, "lr_scheduler_type"),
        warmup_steps=resolve_warmup(recipe, max_steps.value),
        neftune_noise_alpha=Decision(
            recipe.train.neftune_noise_alpha or 0.0, stated(recipe.train, "neftune_noise_alpha")
        ),
        label_smoothing_factor=_as_stated(recipe, "label_smoothing_factor"),
        steps_per_epoch=steps_per_epoch,
        max_steps=max_steps,
    )
    return _checked(Case(recipe, hardware, model, deepspeed, plan, data))


def _checked(case: Case) -> Plan:
    """The plan with its time and disk. Raises PlanError if it cannot run."""
    refuse(case)
    if case.deepspeed is not None:
        check_deepspeed(case.deepspeed, case.recipe, case.plan)
    return replace(case.plan, time=resolve_time(case), disk=resolve_disk(case))


def planned(recipe: Recipe, hardware: Hardware, model: ModelFacts, data: DataFacts | None) -> Case:
    """The recipe with its plan. Raises PlanError."""
    file = open_deepspeed(recipe, hardware, model)
    return Case(recipe, hardware, model, file, resolve_plan(recipe, hardware, model, data, file), data)


def _memory_with(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    deepspeed: DeepSpeedFile | None,
    checkpointing: bool | int | str,
    attention: str,
    micro_batch_size: int,
) -> MemoryEstimate | None:
    """What the recipe needs, with what is decided so far."""
    train = {"micro_batch_size": micro_batch_size, "gradient_checkpointing": checkpointing}
    decided = {
        "train": recipe.train.model_copy(update=train),
        "model": recipe.model.model_copy(update={"attn_implementation": attention}),
    }
    return estimate_memory(recipe.model_copy(update=decided), hardware, model, deepspeed)


def _as_stated(recipe: Recipe, key: str) -> Decision[Any]:
    """A key of `train` that nothing changes."""
    return Decision(getattr(recipe.train, key), stated(recipe.train, key))


def _steps(recipe: Recipe, sequences: int, data: DataFacts | None) -> tuple[Decision[int | None], Decision[int | None]]:
    """Optimizer steps of an epoch, and of the run."""
    steps, epochs = recipe.train.max_steps, recipe.train.num_train_epochs
    max_steps: Decision[int | None] = Decision(steps, "the recipe" if steps else "known when the data is prepared")
    if data is None:
        return Decision(None, "known when the data is prepared"), max_steps
    how = "counted: " if data.exact else "estimated from the first rows: about "
    per_epoch = sequences_per_epoch(recipe, data)
    epoch_steps = max(1, ceil(per_epoch / sequences))
    if not steps:
        max_steps = Decision(ceil(epochs * epoch_steps), f"{epochs:g} epoch(s) x {epoch_steps} steps")
    return Decision(epoch_steps, f"{how}{per_epoch} sequences / {sequences}, rounded up"), max_steps
