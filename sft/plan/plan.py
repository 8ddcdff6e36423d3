"""Decides everything that the recipe left open, for one machine, each decision with its reason.

A pure function of plain values: it reads no environment and does not change the recipe.
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
from sft.plan.decision import Decision, TuningResult
from sft.plan.deepspeed import DeepSpeedFile, check_deepspeed
from sft.plan.engine import resolve_engine, resolve_memory
from sft.plan.hardware import Hardware
from sft.plan.layers import resolve_checkpointing, resolve_compile, resolve_kernels
from sft.plan.parallelism import (
    check_fsdp,
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
        tuned: What auto-tuning found for the values that are `auto`; None: they follow from arithmetic.

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
    kernels = resolve_kernels(recipe, hardware)
    tensor = resolve_tensor_parallel(recipe, hardware, model, deepspeed, kernels.value, precision.value)
    sequence = resolve_sequence_parallel(recipe, hardware, model, deepspeed, attention.value, micro.value)
    return Plan(
        engine=resolve_engine(recipe, hardware, model, deepspeed),
        memory=resolve_memory(recipe, hardware, model, deepspeed),
        precision=precision,
        weights=resolve_weights(recipe, hardware, deepspeed, precision.value),
        gradients=resolve_gradients(recipe, hardware, model, deepspeed, precision.value, accumulation.value),
        attention=attention,
        kernels=kernels,
        compile=resolve_compile(recipe, kernels.value, deepspeed),
        gradient_checkpointing=resolve_checkpointing(recipe, hardware, attention.value, deepspeed, tuned),
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
