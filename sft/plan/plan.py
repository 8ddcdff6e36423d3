"""Holds the plan: every decision with its reason, as plan.json and the terminal show it. sft/plan/resolve.py decides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from sft.plan.memory_estimate import MemoryEstimate, memory_bars
from sft.terminal import visible_line

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A decision and why it was taken."""

    value: T
    reason: str


def stated(section: BaseModel, key: str) -> str:
    """The reason for a value that nothing changed: `the recipe`, or `the default` where the recipe does not state the key."""
    return "the recipe" if key in section.model_fields_set else "the default"


@dataclass(frozen=True)
class TuningResult:
    """What auto-tuning found for a job; sft/launch/auto_tune.py."""

    gradient_checkpointing: bool | int | str
    micro_batch_size: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every decision, in the order of the table."""

    engine: Decision[str]
    """`one process`, `DDP`, `ZeRO-<stage>`, `FSDP2` or `tensor parallel`."""
    memory: Decision[float | None]
    """GiB that each GPU needs, by arithmetic; None where nothing can be counted."""
    precision: Decision[str]
    weights: Decision[str]
    """What the trained weights are kept in."""
    quantization: Decision[str]
    """What the frozen base is kept in: `nf4`, `fp4`, `int8` or `none`."""
    rope_scaling: Decision[str]
    """`none`, or the kind."""
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
    pipeline_parallel_size: Decision[int]
    """Stages."""
    data_parallel_ranks: Decision[int]
    """Ranks, or groups of ranks, that each see sequences of their own."""
    micro_batch_size: Decision[int]
    gradient_accumulation_steps: Decision[int]
    empty_sequences_per_step: Decision[int]
    """Slots of a step that dummy sequences fill, so that the ranks divide it evenly."""
    learning_rate: Decision[float]
    """The peak."""
    optimizer: Decision[str]
    lr_scheduler_type: Decision[str]
    warmup_steps: Decision[int | None]
    """None until the data is counted, where it is a fraction of the steps."""
    neftune_noise_alpha: Decision[float]
    """0: no noise."""
    label_smoothing_factor: Decision[float]
    steps_per_epoch: Decision[int | None]
    max_steps: Decision[int | None]
    """Optimizer steps; None until the data is counted."""
    time: Decision[str | None] = Decision(None, "not planned")
    """Of the training, by arithmetic and a guess; None where it is not known."""
    disk: Decision[str | None] = Decision(None, "not planned")
    """What the run writes, in words; None where it is not known."""
    memory_estimate: MemoryEstimate | None = None
    """Of each GPU, by category; None where nothing is counted."""

    @property
    def memory_bytes(self) -> dict[str, Any] | None:
        """The same in bytes, with `peak` and `available`."""
        return self.memory_estimate.as_json() if self.memory_estimate else None

    def settings(self) -> dict[str, Any]:
        """The values that every rank must share; not the expectations of the data, which may be estimates."""
        estimates = "steps_per_epoch max_steps warmup_steps time disk".split()
        return {one["name"]: one["value"] for one in self.decisions() if one["name"] not in estimates}

    def decisions(self) -> list[dict[str, Any]]:
        """The plan as plan.json and the table have it."""
        named = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "memory_estimate"]
        return [{"name": name, "value": decision.value, "reason": decision.reason} for name, decision in named]

    def as_json(self, **more: Any) -> dict[str, Any]:
        """What `sft plan --json` prints: decisions by name, the memory of each GPU in bytes, and `more`."""
        decisions = {one["name"]: {"value": one["value"], "reason": one["reason"]} for one in self.decisions()}
        return {"decisions": decisions, "memory": self.memory_bytes, **more}


def print_plan(plan: Plan, title: str, notes: Sequence[str] = (), every: bool = True) -> None:
    """Show the plan and notes below it: every decision with its reason, or one line and what is not as the recipe states it."""
    from rich.console import Console
    from rich.markup import escape

    # A file or a pipe has no width of its own, and rich would take 80.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if every:
        console.print(_table(plan, escape(visible_line(title))))
        if (sizes := plan.memory_bytes) is not None:
            mark = "█" if "utf" in console.encoding.lower() else "#"
            console.print("\n".join([*memory_bars(sizes, mark), ""]), highlight=False)
    else:
        console.print(f"[bold]{escape(visible_line(title))}[/bold]", soft_wrap=True, highlight=False)
        notes = [*_in_short(plan), *notes]
    for note in notes:
        console.print(escape(note), soft_wrap=True, highlight=False)


def _in_short(plan: Plan) -> list[str]:
    steps = f"{plan.max_steps.value} steps ({plan.max_steps.reason})" if plan.max_steps.value else "steps not known yet"
    settings = f"{plan.engine.value}, {plan.precision.value}, attention {plan.attention.value}"
    batch = f"batch {plan.gradient_accumulation_steps.reason}"
    return [
        f"Plan: {settings}; {batch}; {steps}. Every decision with its reason: plan.json, or --plan.",
        *(
            f"Note: {one['name']} {one['value']}: {one['reason']}"
            for one in plan.decisions()
            if one["reason"].startswith(("WARNING", "the recipe asks for"))
        ),
    ]


def _table(plan: Plan, title: str) -> Any:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, title_style="bold")
    for column in ("decision", "value", "why"):
        table.add_column(column, overflow="fold", no_wrap=column == "decision")
    for one in plan.decisions():
        # By their text: as keys 1 == True, but a count of one is a number.
        shown = {"None": "not known yet", "True": "on", "False": "off"}.get(str(one["value"]), str(one["value"]))
        table.add_row(one["name"], escape(visible_line(shown)), escape(visible_line(one["reason"])))
    return table
