"""The plan: everything that the recipe left open, decided for one machine, each with its reason.

A pure function of plain values: no environment, no torch, no change to the recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Protocol

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.attention import choose_attention
from sft.plan.batch import (
    resolve_data_parallel_ranks,
    resolve_empty,
    resolve_learning_rate,
    resolve_sequences,
    split_batch,
)
from sft.plan.decision import Decision, TuningResult, stated
from sft.plan.deepspeed import DeepSpeedFile, check_deepspeed
from sft.plan.engine import AUTO, choose_engine, resolve_memory
from sft.plan.hardware import Hardware
from sft.plan.parallelism import FSDP2 as ENGINE
from sft.plan.parallelism import (
    check_fsdp,
    describe_fsdp,
    resolve_fsdp,
    resolve_sequence_parallel,
    resolve_tensor_parallel,
)
from sft.plan.precision import resolve_gradients, resolve_precision, resolve_weights
from sft.recipe.schema import Recipe
from sft.visible import visible_line


class DataSize(Protocol):
    """How much data there is, estimated or counted; `sft.data.facts.DataFacts` is one."""

    @property
    def documents(self) -> int:
        """Documents to train on."""

    @property
    def tokens(self) -> int:
        """Of all documents, prompts included, none longer than data.max_length."""

    @property
    def trained_tokens(self) -> int:
        """Tokens with a loss."""

    @property
    def sequences(self) -> int | None:
        """Rows the trainer sees: packs with packing, else documents; None: as if every pack were full."""

    @property
    def exact(self) -> bool:
        """Whether it was counted on the prepared data, and not estimated from the first rows."""


@dataclass(frozen=True)
class Plan:
    """Every decision, in the order of the table."""

    engine: Decision[str]
    """`one process`, `DDP`, `ZeRO-<stage>`, or `FSDP2`."""

    memory: Decision[float | None]
    """GiB that each GPU needs, by arithmetic; None where nothing can be counted."""

    precision: Decision[str]
    weights: Decision[str]
    """What the trained weights are kept in; AdamW is always the fused one."""

    gradients: Decision[str]
    """What gradients of a step's micro-batches are added up in."""

    attention: Decision[str]
    kernels: Decision[str]
    """`liger` or `none`, as they will run."""

    gradient_checkpointing: Decision[bool | int | str]
    """False, True (in every layer), n (in every n-th), `selective` or `offload`."""

    compile: Decision[bool]
    global_batch_size: Decision[int]
    """Sequences per optimizer step."""

    tensor_parallel_size: Decision[int]
    sequence_parallel_size: Decision[int]
    data_parallel_ranks: Decision[int]
    """Ranks, or groups of ranks, that each see sequences of their own."""

    micro_batch_size: Decision[int]
    gradient_accumulation_steps: Decision[int]
    empty_sequences_per_step: Decision[int]
    """Places of a step that no sequence fills, so that the ranks share it evenly."""

    learning_rate: Decision[float]
    """AdamW's peak."""

    documents_per_step: Decision[float | None]
    trained_tokens_per_step: Decision[int | None]
    steps_per_epoch: Decision[int | None]
    max_steps: Decision[int | None]
    """Optimizer steps; None until the data is counted."""

    def settings(self) -> dict[str, Any]:
        """The values that every rank must share. Expectations of the data are none: they may be estimates."""
        estimates = ("documents_per_step", "trained_tokens_per_step", "steps_per_epoch", "max_steps")
        return {field.name: getattr(self, field.name).value for field in fields(self) if field.name not in estimates}

    def decisions(self) -> list[dict[str, Any]]:
        """The plan as plan.json and the table have it."""
        return [
            {"name": field.name, "value": getattr(self, field.name).value, "reason": getattr(self, field.name).reason}
            for field in fields(self)
        ]


def _kernels(recipe: Recipe, hardware: Hardware) -> Decision[str]:
    reason = stated(recipe.model, "kernels")
    if recipe.model.kernels == "none":
        return Decision("none", reason)
    if hardware.gpu is None:
        return Decision(
            "none",
            f"{reason} asks for liger, whose kernels do not run on a CPU; plain layers give the same result",
        )
    return Decision("liger", f"{reason}: fused RMSNorm, RoPE and SwiGLU; the loss path is TRL's fused head")


def _compile(recipe: Recipe, kernels: str, deepspeed: DeepSpeedFile | None) -> Decision[bool]:
    if not recipe.model.compile:
        return Decision(False, stated(recipe.model, "compile"))
    if deepspeed is not None and deepspeed.stage == 3:
        raise PlanError(
            f"model.compile=true, and {deepspeed.path.name} is ZeRO-3, which gathers each weight by hooks inside the layers: they "
            "would be compiled in many pieces. Set model.compile=false, or train.deepspeed=zero2."
        )
    if kernels == "liger":
        raise PlanError(
            "model.compile=true and model.kernels=liger: both fuse the layers' operations, and together they are untested. Set "
            "model.kernels=none, or model.compile=false."
        )
    return Decision(True, "the recipe: each decoder layer, for any number of tokens and documents")


def _checkpointing(
    recipe: Recipe, hardware: Hardware, attention: str, deepspeed: DeepSpeedFile | None, tuned: TuningResult | None
) -> Decision[bool | int | str]:
    wanted = recipe.train.gradient_checkpointing
    adapters_sharded = recipe.model.lora is not None and deepspeed is not None and deepspeed.stage == 3
    kind = "reentrant, which TRL needs for adapters under ZeRO-3" if adapters_sharded else "non-reentrant"
    if wanted == "selective" and (adapters_sharded or attention == "eager"):
        why = "its attention is no operator of its own" if attention == "eager" else f"its checkpointing is {kind}"
        place = "model.attn_implementation=eager" if attention == "eager" else "model.lora with ZeRO-3"
        raise PlanError(
            f"train.gradient_checkpointing=selective does not work with {place}: {why}. Set train.gradient_checkpointing=true."
        )
    if wanted == "offload" and hardware.gpu is None:
        raise PlanError(
            "train.gradient_checkpointing=offload takes activations from a GPU to the machine's memory, and there is no GPU here. Set it "
            "to true or auto."
        )
    if wanted != "auto":
        every = f", every {wanted} layers" if isinstance(wanted, int) and wanted > 1 else ""
        return Decision(wanted, f"the recipe{every}; {kind}" if wanted else "the recipe")
    found = tuned.gradient_checkpointing if tuned else None
    if tuned and found is not None:
        return Decision(found, f"{tuned.reason}; {kind}" if found else tuned.reason)
    failed = f"; {tuned.reason}" if tuned else ""
    if hardware.gpu is None:
        return Decision(False, f"auto: off on a CPU, where time is what is short{failed}")
    return Decision(True, f"auto: on a GPU, {kind}{failed}")


def _engine(recipe: Recipe, hardware: Hardware, model: ModelFacts, deepspeed: DeepSpeedFile | None) -> Decision[str]:
    engine = _engine_at_hand(recipe, hardware, deepspeed)
    if recipe.train.parallel == AUTO:
        return Decision(engine.value, choose_engine(recipe, hardware, model).reason)
    return engine


def _engine_at_hand(recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None) -> Decision[str]:
    if deepspeed is not None:
        where = f" with offload to {deepspeed.offload}" if deepspeed.offload else ""
        return Decision(
            f"ZeRO-{deepspeed.stage}",
            f"{deepspeed.path.name}{where}, {hardware.ranks} rank{'s' if hardware.ranks > 1 else ''}",
        )
    if (fsdp := resolve_fsdp(recipe, hardware)) is not None:
        return Decision(ENGINE, describe_fsdp(fsdp, hardware))
    if hardware.ranks == 1 and recipe.train.fsdp is not None:
        return Decision("one process", "train.fsdp is set, and one process shares with nobody")
    if hardware.ranks == 1:
        return Decision("one process", "train.deepspeed is not set, and there is one process")
    if recipe.train.tensor_parallel_size > 1:
        return Decision("tensor parallel", f"train.tensor_parallel_size; {hardware.ranks} ranks share each layer")
    return Decision("DDP", f"train.deepspeed is not set; {hardware.ranks} ranks each hold the whole model")


def _expectations(recipe: Recipe, sequences: int, data: DataSize | None) -> dict[str, Decision[Any]]:
    """Documents and trained tokens per step, and the number of steps."""
    steps, names = recipe.train.max_steps, ("documents_per_step", "trained_tokens_per_step", "steps_per_epoch")
    if data is None:
        unknown = Decision(None, "known when the data is prepared")
        return dict.fromkeys(names, unknown) | {"max_steps": Decision(steps, "the recipe") if steps else unknown}
    how = "counted" if data.exact else "estimated from the first rows"
    per_epoch = data.sequences
    if per_epoch is None:
        per_epoch = ceil(data.tokens / recipe.sequence_length) if recipe.data.packing else data.documents
    epoch_steps = max(1, ceil(per_epoch / sequences))
    epochs = recipe.train.num_train_epochs
    mean = data.tokens / data.documents
    about = "" if data.exact else "about "
    return {
        "documents_per_step": Decision(
            round(data.documents * sequences / per_epoch, 1),
            f"{how}: {about}{data.documents} documents of {mean:.0f} tokens on average",
        ),
        "trained_tokens_per_step": Decision(
            round(data.trained_tokens * sequences / per_epoch),
            f"{how}: {about}{data.trained_tokens} of {data.tokens} tokens are trained",
        ),
        "steps_per_epoch": Decision(epoch_steps, f"{how}: {about}{per_epoch} sequences / {sequences}, rounded up"),
        "max_steps": Decision(steps, "the recipe")
        if steps
        else Decision(
            ceil(epochs * epoch_steps), f"{epochs:g} epoch{'' if epochs == 1 else 's'} x {epoch_steps} steps"
        ),
    }


def resolve_plan(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    data: DataSize | None = None,
    deepspeed: DeepSpeedFile | None = None,
    tuned: TuningResult | None = None,
) -> Plan:
    """Decide everything the recipe left open.

    Args:
        recipe: What was asked for.
        hardware: What there is.
        model: What config.json says.
        data: How much data there is, estimated or counted; None where nothing is known before preparation.
        deepspeed: The file that train.deepspeed names or stands for, or None.
        tuned: What a search on this machine found for the values that are `auto`; None: they follow from arithmetic.

    Raises:
        PlanError: What was asked for cannot be had here; the message names values that can.
    """
    # Positions restart at each document, so that the length of a pack is no matter to the model.
    limit = model.max_position_embeddings
    if limit is not None and recipe.data.max_length > limit:
        raise PlanError(
            f"data.max_length={recipe.data.max_length} is more than the model's {limit} positions. Set it to at most {limit}."
        )
    lora = recipe.model.lora
    if lora is not None and model.hidden_size is not None and lora.r > model.hidden_size:
        raise PlanError(
            f"model.lora.r={lora.r} is more than the model's hidden size of {model.hidden_size}: adapters of that rank are larger than the "
            "matrices they stand beside. Usual ranks are 8 to 256."
        )
    if (rate := resolve_learning_rate(recipe).value) * recipe.train.weight_decay >= 1:
        raise PlanError(
            f"train.weight_decay={recipe.train.weight_decay:g} x learning rate {rate:g} is 1 or more: a step would wipe out the weights. "
            "AdamW's weight decay is usually 0 to 0.1."
        )
    batch = resolve_sequences(recipe, hardware)
    precision = resolve_precision(recipe, hardware, model)
    attention = choose_attention(recipe, hardware, precision.value, model.model_type, model.architecture)
    micro, accumulation = split_batch(recipe, hardware, batch.value, attention.value, tuned)
    ranks = resolve_data_parallel_ranks(recipe, hardware)
    empty = resolve_empty(recipe, batch.value, micro.value, accumulation.value, ranks.value)
    if deepspeed is not None:
        check_deepspeed(deepspeed, recipe, micro.value, accumulation.value, precision.value, empty.value)
    check_fsdp(recipe, hardware, precision.value)
    kernels = _kernels(recipe, hardware)
    tensor = resolve_tensor_parallel(recipe, hardware, model, deepspeed, kernels.value, precision.value)
    sequence = resolve_sequence_parallel(recipe, hardware, model, deepspeed, attention.value, micro.value)
    return Plan(
        engine=_engine(recipe, hardware, model, deepspeed),
        memory=resolve_memory(recipe, hardware, model, deepspeed),
        precision=precision,
        weights=resolve_weights(recipe, hardware, deepspeed, precision.value),
        gradients=resolve_gradients(recipe, hardware, model, deepspeed, precision.value, accumulation.value),
        attention=attention,
        kernels=kernels,
        compile=_compile(recipe, kernels.value, deepspeed),
        gradient_checkpointing=_checkpointing(recipe, hardware, attention.value, deepspeed, tuned),
        global_batch_size=batch,
        tensor_parallel_size=tensor,
        sequence_parallel_size=sequence,
        data_parallel_ranks=ranks,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        empty_sequences_per_step=empty,
        learning_rate=resolve_learning_rate(recipe),
        **_expectations(recipe, batch.value, data),
    )


FEW_STEPS = 20
"""Steps over which AdamW's second moment averages with the default beta2, 1 / (1 - 0.95): fewer end before it has settled."""

CPU_PARAMETERS = 3e8
"""Models above this are seldom trained on a CPU on purpose."""

LORA_RATE, FULL_RATE = 3e-5, 1e-4
"""Adapters are trained at 1e-4 to 5e-4, about ten times the rate of all weights, and models of a billion parameters at 1e-6 to 5e-5: what
lies beyond these is the other one's rate."""


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
    train, steps, per_epoch = recipe.train, plan.max_steps.value, plan.steps_per_epoch.value
    batch, rate, lines = plan.global_batch_size.value, plan.learning_rate.value, list[str]()
    unit = f"packs of {recipe.sequence_length} tokens" if recipe.data.packing else "documents"
    sequences = data.sequences if data else None
    if sequences is not None and sequences < batch:
        lines.append(
            f"The batch is larger than the data: a step takes {batch} {unit}, and there are {sequences}. Make the batch smaller "
            f"({_smaller_batch(recipe, plan, sequences // FEW_STEPS)}), or add data."
        )
    elif steps is not None and per_epoch is not None and train.max_steps is None and steps < FEW_STEPS:
        lines.append(
            f"The run has {steps} optimizer step{'s' if steps > 1 else ''} of {batch} {unit}, too few to train much. A smaller batch "
            f"({_smaller_batch(recipe, plan, batch * steps // FEW_STEPS)}) or more epochs "
            f"(train.num_train_epochs={ceil(FEW_STEPS / per_epoch)}) gives more."
        )
    if steps is not None and train.warmup_steps >= steps:
        lines.append(
            f"The warm-up is as long as the run: train.warmup_steps={train.warmup_steps}, and the run has {steps} steps, so the "
            f"learning rate never falls. Set train.warmup_steps to about {max(1, steps // 10)}."
        )
    if recipe.model.lora is not None and rate < LORA_RATE:
        lines.append(
            f"train.learning_rate={rate:g} is a rate for training all weights; adapters (model.lora) learn little at it. They are usually "
            "trained at 1e-4 to 5e-4."
        )
    if recipe.model.lora is None and rate >= FULL_RATE and model.parameters and model.parameters > 1e9:
        lines.append(
            f"train.learning_rate={rate:g} is a rate for adapters, and all {model.parameters / 1e9:.3g}e9 weights are trained "
            "(model.lora is not set). They are usually trained at 1e-6 to 5e-5."
        )
    lines += _unusual_numbers(recipe, rate, steps)
    if hardware.gpu is None and model.parameters and model.parameters > CPU_PARAMETERS:
        lines.append(
            f"No GPU was found (nvidia-smi shows none, or CUDA_VISIBLE_DEVICES hides it), and {model.parameters / 1e9:.2g}e9 parameters "
            "are trained on the CPU: expect minutes a step."
        )
    return lines


def _unusual_numbers(recipe: Recipe, rate: float, steps: int | None) -> list[str]:
    """Warn of values that work and that hardly anyone means: a forgotten minus, another tool's unit, two keys swapped."""
    train, lora, every = recipe.train, recipe.model.lora, recipe.eval.every_steps
    smoothing, noise = (train.trainer_args.get(name) for name in ("label_smoothing_factor", "neftune_noise_alpha"))
    lines = list[str]()
    if rate > 1e-2:
        lines.append(
            f"train.learning_rate={rate:g} is far above the usual 1e-6 to 5e-4; training will hardly be stable."
        )
    if rate < 1e-8:
        lines.append(f"train.learning_rate={rate:g} is far below the usual 1e-6 to 5e-4; the weights will hardly move.")
    if train.weight_decay > 2:
        lines.append(
            f"train.weight_decay={train.weight_decay:g} is far above the usual 0 to 0.1; it shrinks the weights."
        )
    if 0 < train.max_grad_norm < 1e-3:
        lines.append(
            f"train.max_grad_norm={train.max_grad_norm:g} is far below the usual 0.1 to 1 and scales every gradient down to that norm; 0 "
            "turns clipping off."
        )
    if train.adam_beta1 > train.adam_beta2:
        lines.append(
            f"train.adam_beta1={train.adam_beta1:g} is larger than train.adam_beta2={train.adam_beta2:g}; AdamW can diverge so. They may "
            "be swapped."
        )
    if lora is not None and lora.lora_alpha > 64 * lora.r:
        lines.append(
            f"model.lora.lora_alpha={lora.lora_alpha} with r={lora.r} multiplies what the adapters add by {lora.lora_alpha / lora.r:g}; "
            "1 and 2 are usual."
        )
    if isinstance(smoothing, int | float) and smoothing >= 0.5:
        lines.append(
            f"train.trainer_args.label_smoothing_factor={smoothing} trains other tokens than the target; 0 to 0.1 are usual."
        )
    if isinstance(noise, int | float) and noise > 50:
        lines.append(
            f"train.trainer_args.neftune_noise_alpha={noise} drowns the embeddings in noise; 5 to 15 are usual."
        )
    if every is not None and steps is not None and every > steps:
        lines.append(f"eval.every_steps={every}, and the run has {steps} steps; no evaluation falls into the training.")
    return lines


def _smaller_batch(recipe: Recipe, plan: Plan, sequences: int) -> str:
    """The recipe's key for the batch with about so many sequences, which the ranks can share."""
    ranks = plan.data_parallel_ranks.value
    shared = max(ranks, sequences // ranks * ranks)
    if recipe.train.global_batch_tokens is not None:
        return f"train.global_batch_tokens={shared * recipe.sequence_length}"
    return f"train.global_batch_size={shared}"


def print_plan(plan: Plan, title: str, notes: Sequence[str] = (), every: bool = True) -> None:
    """Show the plan.

    Args:
        plan: What was decided.
        title: Recipe, model and machine.
        notes: Lines below it.
        every: Whether every decision is shown with its reason, or one line with what is not as the recipe asks.
    """
    from rich.console import Console
    from rich.markup import escape

    # A file or a pipe has no width of its own, and rich would take 80.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if every:
        console.print(_table(plan, title))
    else:
        console.print(f"[bold]{escape(visible_line(title))}[/bold]", soft_wrap=True, highlight=False)
        notes = [*_in_short(plan), *notes]
    for note in notes:
        console.print(escape(note), soft_wrap=True, highlight=False)


def _in_short(plan: Plan) -> list[str]:
    steps = f"{plan.max_steps.value} steps ({plan.max_steps.reason})" if plan.max_steps.value else "steps not known yet"
    batch = f"batch {plan.gradient_accumulation_steps.reason}"
    settings = f"{plan.engine.value}, {plan.precision.value}, attention {plan.attention.value}"
    return [
        f"Plan: {settings}; {batch}; {steps}. Every decision with its reason: plan.json, or --plan.",
        *(
            f"Note: {decision['name']} {decision['value']}: {decision['reason']}"
            for decision in plan.decisions()
            if decision["reason"].startswith(("WARNING", "the recipe asks for"))
        ),
    ]


def _table(plan: Plan, title: str) -> Any:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(visible_line(title)), title_justify="left", box=SIMPLE, title_style="bold")
    for column in ("decision", "value", "why"):
        table.add_column(column, overflow="fold", no_wrap=column == "decision")
    for decision in plan.decisions():
        value = {None: "not known yet", True: "on", False: "off"}.get(decision["value"], decision["value"])
        # 1 == True and 0 == False as dictionary keys, but a count of one is a number.
        shown = value if isinstance(decision["value"], bool | None) else decision["value"]
        table.add_row(decision["name"], escape(visible_line(str(shown))), escape(visible_line(decision["reason"])))
    return table
