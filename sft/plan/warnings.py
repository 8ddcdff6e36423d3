"""Warns of values that work and that hardly anyone means: too few steps, another method's learning rate, two keys swapped."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from sft.hub.data_facts import DataFacts
from sft.hub.model_facts import ModelFacts
from sft.plan.hardware import Hardware
from sft.plan.plan import Plan
from sft.plan.rope import original_positions, positions
from sft.recipe.optimization import ENDS_ABOVE_ZERO
from sft.recipe.schema import Recipe

# Steps over which AdamW's second moment averages with the default beta2, 1 / (1 - 0.95): fewer end before it has settled.
FEW_STEPS = 20
# Adapters are trained at 1e-4 to 5e-4, and all weights of a model of a billion parameters at 1e-6 to 5e-5.
LORA_RATE, FULL_RATE = 5e-5, 1e-4
CPU_PARAMETERS = 3e8  # models above this are seldom trained on a CPU on purpose


def plan_warnings(
    recipe: Recipe, plan: Plan, hardware: Hardware, model: ModelFacts, data: DataFacts | None = None
) -> list[str]:
    """What a plan shows that would surprise its author, one sentence or two each; without data the number of steps is an estimate."""
    parameters = model.parameters or 0
    original = original_positions(recipe, model)
    warnings = [*_steps(recipe, plan, data), *_learning_rate(recipe, plan, parameters), *_optimizer(recipe)]
    if recipe.model.rope_scaling and original and recipe.data.max_length <= original:
        warnings.append(
            f"model.rope_scaling extends the model to {positions(recipe, model)} positions, and data.max_length={recipe.data.max_length} "
            f"trains none beyond the {original} it had. Raise data.max_length, or remove model.rope_scaling."
        )
    if plan.precision.value == "fp16" and model.dtype == "bfloat16":
        warnings.append(
            f"Training computes in fp16, since this GPU has no bf16, and {recipe.model.name_or_path} was trained in bfloat16, whose values "
            "can overflow fp16. A forward pass before step 1 and every loss are checked to be finite; where one is not, set "
            "train.precision=fp32."
        )
    if hardware.gpu is None and parameters > CPU_PARAMETERS:
        warnings.append(
            f"No GPU was found (no driver lists one, or CUDA_VISIBLE_DEVICES hides it), and {parameters / 1e9:.3g}e9 parameters are "
            "trained on the CPU: expect minutes a step."
        )
    return warnings


def _steps(recipe: Recipe, plan: Plan, data: DataFacts | None) -> Iterator[str]:
    train, every = recipe.train, recipe.eval.every_steps
    batch, steps, per_epoch = plan.global_batch_size.value, plan.max_steps.value, plan.steps_per_epoch.value
    unit = f"packs of {recipe.sequence_length} tokens" if recipe.data.packing else "documents"
    sequences = data.sequences if data else None
    if sequences is not None and sequences < batch:
        yield (
            f"The batch is larger than the data: a step takes {batch} {unit}, and there are {sequences}. Make the batch smaller, or add "
            "data."
        )
    elif steps and per_epoch and train.max_steps is None and steps < FEW_STEPS:  # max_steps: the author chose them
        yield (
            f"The run has {steps} optimizer step(s) of {batch} {unit}, too few to train much. A smaller batch or more epochs "
            f"(train.num_train_epochs={ceil(FEW_STEPS / per_epoch)}) gives more."
        )
    warmup = plan.warmup_steps.value
    if steps is not None and warmup is not None and warmup >= steps:
        yield (
            f"The warm-up does not end before the run: train.warmup_steps={warmup}, and the run has {steps} steps, so the learning "
            f"rate never falls. Set train.warmup_steps to about {max(1, steps // 10)}."
        )
    if steps is not None and every is not None and every > steps:
        yield f"eval.every_steps={every}, and the run has {steps} steps; no evaluation falls into the training."


def _learning_rate(recipe: Recipe, plan: Plan, parameters: int) -> Iterator[str]:
    rate, lora = plan.learning_rate.value, recipe.model.lora
    key = f"train.learning_rate={rate:g} is"
    if lora is not None and rate < LORA_RATE:
        yield f"{key} a rate for training all weights; adapters (model.lora) learn little at it. They usually take 1e-4 to 5e-4."
    if lora is None and rate > FULL_RATE and parameters > 1e9:
        yield f"{key} a rate for adapters, and all {parameters / 1e9:.3g}e9 weights are trained. They usually take 1e-6 to 5e-5."
    if rate > 1e-2:
        yield f"{key} far above the usual 1e-6 to 5e-4; training will hardly be stable."
    if rate < 1e-8:
        yield f"{key} far below the usual 1e-6 to 5e-4; the weights will hardly move."


def _optimizer(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.min_lr_ratio and train.lr_scheduler_type not in ENDS_ABOVE_ZERO:
        yield (
            f"train.min_lr_ratio={train.min_lr_ratio:g} has no effect with lr_scheduler_type={train.lr_scheduler_type}, only with "
            f"{', '.join(ENDS_ABOVE_ZERO)}."
        )
    if train.adam_beta1 > train.adam_beta2:
        yield f"train.adam_beta1={train.adam_beta1:g} is above train.adam_beta2={train.adam_beta2:g}: were they swapped?"
