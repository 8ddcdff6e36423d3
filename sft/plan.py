"""The plan: everything that the recipe left open, decided for one machine, each with its reason.

A pure function of plain values: no environment, no torch, no change to the recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Generic, TypeVar

from sft.errors import PlanError
from sft.facts import DataFacts, ModelFacts
from sft.hardware import Hardware
from sft.recipe import Recipe
from sft.zero import DeepSpeedFile, check_deepspeed

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A decision and why it was taken."""

    value: T
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every decision, in the order of the table."""

    engine: Resolved[str]
    """`one process`, `DDP`, or `ZeRO-<stage>`."""

    precision: Resolved[str]
    attention: Resolved[str]
    kernels: Resolved[str]
    """`liger` or `none`, as they will run."""

    gradient_checkpointing: Resolved[bool]
    global_batch_size: Resolved[int]
    """Sequences per optimizer step."""

    micro_batch_size: Resolved[int]
    gradient_accumulation_steps: Resolved[int]
    documents_per_step: Resolved[float | None]
    trained_tokens_per_step: Resolved[int | None]
    steps_per_epoch: Resolved[int | None]
    max_steps: Resolved[int | None]
    """Optimizer steps; None until the data is counted."""

    def decisions(self) -> list[dict[str, Any]]:
        """The plan as plan.json and the table have it."""
        return [
            {"name": field.name, "value": getattr(self, field.name).value, "reason": getattr(self, field.name).reason}
            for field in fields(self)
        ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _sequences(recipe: Recipe, hardware: Hardware) -> Resolved[int]:
    train, length = recipe.train, recipe.data.max_length
    unit = f"packs of {length} tokens" if recipe.data.packing else "documents"
    if train.global_batch_size is not None:
        return Resolved(train.global_batch_size, f"the recipe, in {unit}")
    tokens = train.global_batch_tokens
    assert tokens is not None
    if tokens % length:
        raise PlanError(
            f"train.global_batch_tokens={tokens} is not a multiple of data.max_length={length}. The nearest that can be used here: "
            f"{_nearest(tokens, length * _share_unit(recipe, hardware))}."
        )
    return Resolved(tokens // length, f"{tokens} tokens = {tokens // length} x {length}, in {unit}")


def _share_unit(recipe: Recipe, hardware: Hardware) -> int:
    """What the batch must be a multiple of: the ranks, times the recipe's micro-batch where it has one."""
    micro = recipe.train.micro_batch_size
    return hardware.ranks * (micro if isinstance(micro, int) else 1)


def _nearest(number: int, unit: int) -> str:
    """The multiples of unit around a number, in words.

    >>> _nearest(100, 24), _nearest(5, 24)
    ('96 or 120', '24')
    """
    below, above = number // unit * unit, (number // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def _batch_as_written(recipe: Recipe, sequences: int) -> tuple[str, int]:
    """The recipe's key for the batch, and how many of its units are one sequence."""
    if recipe.train.global_batch_size is not None:
        return f"train.global_batch_size={sequences}", 1
    return f"train.global_batch_tokens={recipe.train.global_batch_tokens}", recipe.data.max_length


def _split_batch(
    recipe: Recipe, hardware: Hardware, sequences: int, attention: str
) -> tuple[Resolved[int], Resolved[int]]:
    """Micro-batch and accumulation, so that micro x accumulation x ranks is the batch exactly."""
    ranks, wanted = hardware.ranks, recipe.train.micro_batch_size
    noun = "GPUs" if hardware.gpu else "processes"
    written, unit = _batch_as_written(recipe, sequences)
    if sequences % ranks:
        counts = ", ".join(str(divisor) for divisor in _divisors(sequences) if divisor <= 2 * ranks)
        raise PlanError(
            f"{written} cannot be shared by {ranks} {noun}: it is not a multiple. Set {written.partition('=')[0]} to "
            f"{_nearest(sequences * unit, _share_unit(recipe, hardware) * unit)}, or use a number of {noun} that divides it: {counts}."
        )
    share = sequences // ranks
    if wanted == "auto":
        budget, why = _token_budget(recipe, hardware, attention)
        fitting = [divisor for divisor in _divisors(share) if divisor * recipe.data.max_length <= budget]
        micro = max(fitting, default=1)
        reason = f"auto: the largest divisor of {share} within {budget} tokens a forward pass ({why})"
    else:
        micro, reason = wanted, "the recipe"
    if share % micro:
        *smaller, largest = [divisor for divisor in _divisors(share) if divisor <= micro]
        raise PlanError(
            f"{written} is not a multiple of micro_batch_size x {noun} = {micro} x {ranks} = {micro * ranks}. "
            f"Set train.micro_batch_size to {largest}" + (f" (or {', '.join(map(str, smaller))})." if smaller else ".")
        )
    accumulation = share // micro
    arithmetic = f"{sequences} = {micro} x {accumulation} x {ranks} (micro-batch x accumulation x {noun})"
    return Resolved(micro, reason), Resolved(accumulation, arithmetic)


def _token_budget(recipe: Recipe, hardware: Hardware, attention: str) -> tuple[int, str]:
    if hardware.gpu is not None and recipe.data.packing and not attention.startswith("flash"):
        return (
            recipe.data.max_length,
            f"one pack: {attention}'s mask over several grows with the square of their tokens",
        )
    # A rule of thumb, not a memory model: activations of a 3B model with checkpointing fit with room at these sizes.
    if hardware.gpu is None:
        return 512, "on a CPU, sdpa's packed mask grows with the square"
    for gib, tokens in ((70, 16384), (38, 8192)):
        if hardware.gpu.memory_gib >= gib:
            return tokens, f"a GPU of {hardware.gpu.memory_gib:.0f} GiB"
    return 4096, f"a GPU of {hardware.gpu.memory_gib:.0f} GiB"


def _precision(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Resolved[str]:
    wanted, gpu = recipe.train.precision, hardware.gpu
    has_bf16 = gpu is not None and gpu.compute_capability >= 8.0
    if wanted == "auto":
        if gpu is None:
            return Resolved("fp32", "auto: on a CPU bf16 is no faster")
        if has_bf16:
            stored = (
                f"the weights are stored in {model.dtype}" if model.dtype else "the model's own format is not known yet"
            )
            return Resolved("bf16", f"auto: the GPU has it; {stored}")
        return Resolved("fp32", f"auto: this GPU (compute capability {gpu.compute_capability}) has no bf16")
    if wanted == "bf16" and gpu is not None and not has_bf16:
        raise PlanError(
            f"train.precision=bf16, and this GPU ({gpu.name}, compute capability {gpu.compute_capability}) has none. "
            "Set train.precision=fp32."
        )
    if wanted == "fp16" and gpu is None:
        raise PlanError(
            "train.precision=fp16 needs a GPU: there is none here, and a CPU has no fp16 training. Set train.precision=fp32 or auto."
        )
    if wanted == "fp16" and model.dtype == "bfloat16":
        raise PlanError(
            f"train.precision=fp16, and {recipe.model.name_or_path} was trained in bfloat16, whose values overflow fp16. "
            f"Set train.precision={'bf16' if has_bf16 else 'fp32'}."
        )
    return Resolved(wanted, "the recipe")


def _attention(recipe: Recipe, hardware: Hardware, precision: str) -> Resolved[str]:
    wanted = recipe.model.attn_implementation
    ampere = hardware.gpu is not None and hardware.gpu.compute_capability >= 8.0
    flash = ampere and hardware.has_flash_attention and precision != "fp32"
    if wanted == "auto":
        if flash:
            return Resolved(
                "flash_attention_2", "auto: flash-attn is installed; packed documents stay apart by their boundaries"
            )
        why = (
            "on a CPU"
            if hardware.gpu is None
            else "flash-attn is not installed"
            if not hardware.has_flash_attention
            else "fp32"
        )
        return Resolved(
            "sdpa",
            f"auto: {why}; " + ("packed documents stay apart by a block mask" if recipe.data.packing else "no packing"),
        )
    if wanted.startswith("flash") and not flash:
        problem = (
            "there is no GPU here"
            if hardware.gpu is None
            else "the flash-attn package is not installed"
            if not hardware.has_flash_attention
            else "it does not run in fp32"
            if precision == "fp32"
            else f"this GPU (compute capability {hardware.gpu.compute_capability}) is too old for it"
        )
        raise PlanError(f"model.attn_implementation={wanted}, and {problem}. Set it to auto or sdpa.")
    return Resolved(wanted, "the recipe")


def _kernels(recipe: Recipe, hardware: Hardware) -> Resolved[str]:
    if recipe.model.kernels == "none":
        return Resolved("none", "the recipe")
    if hardware.gpu is None:
        return Resolved(
            "none",
            "the recipe asks for liger, whose kernels do not run on a CPU; the plain layers give the same result",
        )
    return Resolved("liger", "the recipe: fused RMSNorm, RoPE and SwiGLU; the loss path is TRL's fused head")


def _checkpointing(recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None) -> Resolved[bool]:
    wanted = recipe.train.gradient_checkpointing
    adapters_sharded = recipe.model.lora is not None and deepspeed is not None and deepspeed.stage == 3
    kind = "reentrant, which TRL needs for adapters under ZeRO-3" if adapters_sharded else "non-reentrant"
    if wanted != "auto":
        return Resolved(bool(wanted), f"the recipe; {kind}" if wanted else "the recipe")
    if hardware.gpu is None:
        return Resolved(False, "auto: off on a CPU, where time is what is short")
    return Resolved(True, f"auto: on a GPU, {kind}")


def _engine(recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None) -> Resolved[str]:
    if deepspeed is not None:
        where = f" with offload to {deepspeed.offload}" if deepspeed.offload else ""
        return Resolved(
            f"ZeRO-{deepspeed.stage}",
            f"{deepspeed.path.name}{where}, {hardware.ranks} rank{'s' if hardware.ranks > 1 else ''}",
        )
    if hardware.ranks == 1:
        return Resolved("one process", "train.deepspeed is not set, and there is one process")
    return Resolved("DDP", f"train.deepspeed is not set; {hardware.ranks} ranks each hold the whole model")


def _expectations(recipe: Recipe, sequences: int, data: DataFacts | None) -> dict[str, Resolved[Any]]:
    """Documents and trained tokens per step, and the number of steps."""
    steps, names = recipe.train.max_steps, ("documents_per_step", "trained_tokens_per_step", "steps_per_epoch")
    if data is None:
        unknown = Resolved(None, "known when the data is prepared")
        return dict.fromkeys(names, unknown) | {"max_steps": Resolved(steps, "the recipe") if steps else unknown}
    how = "counted" if data.exact else "estimated from the first rows"
    per_epoch = data.sequences
    if per_epoch is None:
        per_epoch = ceil(data.tokens / recipe.data.max_length) if recipe.data.packing else data.documents
    epoch_steps = max(1, ceil(per_epoch / sequences))
    epochs = recipe.train.num_train_epochs
    mean = data.tokens / data.documents
    about = "" if data.exact else "about "
    return {
        "documents_per_step": Resolved(
            round(data.documents * sequences / per_epoch, 1),
            f"{how}: {about}{data.documents} documents of {mean:.0f} tokens on average",
        ),
        "trained_tokens_per_step": Resolved(
            round(data.trained_tokens * sequences / per_epoch),
            f"{how}: {about}{data.trained_tokens} of {data.tokens} tokens are trained",
        ),
        "steps_per_epoch": Resolved(epoch_steps, f"{how}: {about}{per_epoch} sequences / {sequences}, rounded up"),
        "max_steps": Resolved(steps, "the recipe")
        if steps
        else Resolved(
            ceil(epochs * epoch_steps), f"{epochs:g} epoch{'' if epochs == 1 else 's'} x {epoch_steps} steps"
        ),
    }


def resolve_plan(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts | None = None,
    deepspeed: DeepSpeedFile | None = None,
) -> Plan:
    """Decide everything the recipe left open.

    Args:
        recipe: What was asked for.
        hardware: What there is.
        model: What config.json says.
        data: How much data there is, estimated or counted; None where nothing is known before preparation.
        deepspeed: The file that train.deepspeed names, or None.

    Raises:
        PlanError: What was asked for cannot be had here; the message names values that can.
    """
    limit = model.max_position_embeddings
    if limit is not None and recipe.data.max_length > limit:
        raise PlanError(
            f"data.max_length={recipe.data.max_length} is more than the model's {limit} positions. Set it to at most {limit}."
        )
    batch = _sequences(recipe, hardware)
    precision = _precision(recipe, hardware, model)
    attention = _attention(recipe, hardware, precision.value)
    micro, accumulation = _split_batch(recipe, hardware, batch.value, attention.value)
    if deepspeed is not None:
        check_deepspeed(deepspeed, recipe, micro.value, accumulation.value, precision.value)
    return Plan(
        engine=_engine(recipe, hardware, deepspeed),
        precision=precision,
        attention=attention,
        kernels=_kernels(recipe, hardware),
        gradient_checkpointing=_checkpointing(recipe, hardware, deepspeed),
        global_batch_size=batch,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        **_expectations(recipe, batch.value, data),
    )


def print_plan(plan: Plan, title: str, notes: Sequence[str] = ()) -> None:
    """Show the plan as a table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=SIMPLE, title_style="bold")
    for column in ("decision", "value", "why"):
        table.add_column(column, overflow="fold")
    for decision in plan.decisions():
        value = {None: "not known yet", True: "on", False: "off"}.get(decision["value"], decision["value"])
        # 1 == True and 0 == False as dictionary keys, but a count of one is a number.
        shown = value if isinstance(decision["value"], bool | None) else decision["value"]
        table.add_row(decision["name"], escape(str(shown)), escape(decision["reason"]))
    # A file or a pipe has no width of its own, and rich would take 80.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table)
    for note in notes:
        console.print(escape(note), soft_wrap=True, highlight=False)
