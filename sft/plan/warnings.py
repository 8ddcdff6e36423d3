"""Warns of values that work and that hardly anyone means: too few steps, another method's learning rate, two keys swapped."""

from __future__ import annotations

from math import ceil

from sft.hub.model_facts import ModelFacts
from sft.plan.hardware import Hardware
from sft.plan.plan import DataSize, Plan
from sft.recipe.schema import Recipe

FEW_STEPS = 20
"""Steps over which AdamW's second moment averages with the default beta2, 1 / (1 - 0.95): fewer end before it has settled."""

LORA_RATE, FULL_RATE = 3e-5, 1e-4
"""Adapters are trained at 1e-4 to 5e-4, about ten times the rate of all weights, and models of a billion parameters at 1e-6 to 5e-5: what
lies beyond these is the other one's rate."""

CPU_PARAMETERS = 3e8
"""Models above this are seldom trained on a CPU on purpose."""


def plan_warnings(
    recipe: Recipe, plan: Plan, hardware: Hardware, model: ModelFacts, data: DataSize | None = None
) -> list[str]:
    """What a plan shows that would surprise its author, one sentence or two each; empty where nothing does.

    Args:
        recipe: The recipe.
        plan: Its plan. Where the data is not counted, the number of steps is an estimate.
        hardware: The machine.
        model: The model.
        data: The counted data.
    """
    train, lora, rate = recipe.train, recipe.model.lora, plan.learning_rate.value
    steps, parameters = plan.max_steps.value, model.parameters or 0
    billions = f"{parameters / 1e9:.3g}e9"
    smoothing, noise = (
        _number(train.trainer_args.get(key)) for key in ("label_smoothing_factor", "neftune_noise_alpha")
    )
    every = recipe.eval.every_steps
    alpha, rank = (lora.lora_alpha, lora.r) if lora else (0, 1)
    checks = [
        (
            steps is not None and train.warmup_steps >= steps,
            f"The warm-up is as long as the run: train.warmup_steps={train.warmup_steps}, and the run has {steps} steps, so the learning "
            f"rate never falls. Set train.warmup_steps to about {max(1, (steps or 0) // 10)}.",
        ),
        (
            lora is not None and rate < LORA_RATE,
            f"train.learning_rate={rate:g} is a rate for training all weights; adapters (model.lora) learn little at it. They are usually "
            "trained at 1e-4 to 5e-4.",
        ),
        (
            lora is None and rate >= FULL_RATE and parameters > 1e9,
            f"train.learning_rate={rate:g} is a rate for adapters, and all {billions} weights are trained (model.lora is not set). They "
            "are usually trained at 1e-6 to 5e-5.",
        ),
        (
            rate > 1e-2,
            f"train.learning_rate={rate:g} is far above the usual 1e-6 to 5e-4; training will hardly be stable.",
        ),
        (
            rate < 1e-8,
            f"train.learning_rate={rate:g} is far below the usual 1e-6 to 5e-4; the weights will hardly move.",
        ),
        (
            train.weight_decay > 2,
            f"train.weight_decay={train.weight_decay:g} is far above the usual 0 to 0.1; it shrinks the weights.",
        ),
        (
            0 < train.max_grad_norm < 1e-3,
            f"train.max_grad_norm={train.max_grad_norm:g} is far below the usual 0.1 to 1 and scales every gradient down to that norm; 0 "
            "turns clipping off.",
        ),
        (
            train.adam_beta1 > train.adam_beta2,
            f"train.adam_beta1={train.adam_beta1:g} is larger than train.adam_beta2={train.adam_beta2:g}; AdamW can diverge. They may be "
            "swapped.",
        ),
        (
            alpha > 64 * rank,
            f"model.lora.lora_alpha={alpha} with r={rank} multiplies what the adapters add by {alpha / rank:g}; 1 and 2 are usual.",
        ),
        (
            smoothing >= 0.5,
            f"train.trainer_args.label_smoothing_factor={smoothing} trains other tokens than the target; 0 to 0.1 are usual.",
        ),
        (
            noise > 50,
            f"train.trainer_args.neftune_noise_alpha={noise:g} drowns the embeddings in noise; 5 to 15 are usual.",
        ),
        (
            every is not None and steps is not None and every > steps,
            f"eval.every_steps={every}, and the run has {steps} steps; no evaluation falls into the training.",
        ),
        (
            hardware.gpu is None and parameters > CPU_PARAMETERS,
            f"No GPU was found (nvidia-smi shows none, or CUDA_VISIBLE_DEVICES hides it), and {billions} parameters are trained on the "
            "CPU: expect minutes a step.",
        ),
    ]
    return _few_steps(recipe, plan, data) + [warning for applies, warning in checks if applies]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _few_steps(recipe: Recipe, plan: Plan, data: DataSize | None) -> list[str]:
    """A batch so large that the run has too few steps; as many as the author has set are right."""
    batch, steps, per_epoch = plan.global_batch_size.value, plan.max_steps.value, plan.steps_per_epoch.value
    unit = f"packs of {recipe.sequence_length} tokens" if recipe.data.packing else "documents"
    sequences = data.sequences if data else None
    if sequences is not None and sequences < batch:
        return [
            f"The batch is larger than the data: a step takes {batch} {unit}, and there are {sequences}. Make the batch smaller "
            f"({_smaller_batch(recipe, plan, sequences // FEW_STEPS)}), or add data."
        ]
    if steps is None or per_epoch is None or recipe.train.max_steps is not None or steps >= FEW_STEPS:
        return []
    return [
        f"The run has {steps} optimizer step{'s' if steps > 1 else ''} of {batch} {unit}, too few to train much. A smaller batch "
        f"({_smaller_batch(recipe, plan, batch * steps // FEW_STEPS)}) or more epochs "
        f"(train.num_train_epochs={ceil(FEW_STEPS / per_epoch)}) gives more."
    ]


def _smaller_batch(recipe: Recipe, plan: Plan, sequences: int) -> str:
    """The recipe's key for the batch with about so many sequences, which the ranks can share."""
    ranks = plan.data_parallel_ranks.value
    shared = max(ranks, sequences // ranks * ranks)
    if recipe.train.global_batch_tokens is not None:
        return f"train.global_batch_tokens={shared * recipe.sequence_length}"
    return f"train.global_batch_size={shared}"
