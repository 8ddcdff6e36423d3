"""Divides a step over the ranks: sequences = micro-batch x accumulation x data-parallel ranks, or a refusal with sizes that work.

A step holds what the recipe states on any number of ranks; only who computes what follows from the machine. Where the ranks cannot
divide it evenly, train.remainder=fill gives them more slots than there are sequences, and dummy sequences fill the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isqrt, prod, sqrt

from sft.errors import PlanError
from sft.hub.data_facts import DataFacts
from sft.plan.hardware import Hardware
from sft.plan.memory_estimate import MemoryEstimate
from sft.plan.plan import Decision, TuningResult, stated
from sft.recipe.schema import Recipe


def divisors(number: int) -> list[int]:
    """From 1 to the number itself.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def resolve_data_parallel_ranks(recipe: Recipe, hardware: Hardware) -> Decision[int]:
    """Ranks, or groups that share a batch, each with sequences of its own. Raises PlanError if the ranks do not divide into groups."""
    keys = ("tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size")
    sizes = {f"train.{key}={size}": size for key in keys if (size := getattr(recipe.train, key)) > 1}
    size = prod(sizes.values())
    if hardware.ranks % size:
        raise PlanError(
            f"{' x '.join(sizes)}: groups of {size} ranks, and {hardware.ranks} is no multiple of that. Start a multiple of {size}, or "
            "lower the size."
        )
    how = f"{hardware.ranks} ranks / groups of {size}" if size > 1 else "each with sequences of its own"
    return Decision(hardware.ranks // size, how)


def resolve_sequences(recipe: Recipe, hardware: Hardware) -> Decision[int]:
    """Sequences per optimizer step. Raises PlanError if the recipe's tokens are no whole number of sequences."""
    train, length = recipe.train, recipe.sequence_length
    unit = f"packs of {length} tokens" if recipe.data.packing else "documents"
    if train.global_batch_size is not None:
        return Decision(train.global_batch_size, f"the recipe, in {unit}")
    tokens = train.global_batch_tokens
    assert tokens is not None
    if tokens % length:
        key = "max_length" if recipe.data.pack_length is None else "pack_length"
        one_pass = length * resolve_data_parallel_ranks(recipe, hardware).value * _stated_micro_batch(recipe)
        raise PlanError(
            f"train.global_batch_tokens={tokens} is not a multiple of data.{key}={length}. Set it to {_nearest(tokens, one_pass)}."
        )
    return Decision(tokens // length, f"{tokens} tokens = {tokens // length} x {length}, in {unit}")


def _stated_micro_batch(recipe: Recipe) -> int:
    return recipe.train.micro_batch_size if isinstance(recipe.train.micro_batch_size, int) else 1


def _nearest(number: int, unit: int) -> str:
    """The multiples of unit around a number, in words.

    >>> _nearest(100, 24), _nearest(5, 24)
    ('96 or 120', '24')
    """
    below, above = number // unit * unit, (number // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def check_batch(recipe: Recipe, hardware: Hardware) -> None:
    """Refuse a batch that the ranks cannot divide, whatever the model (PlanError, with sizes that work)."""
    sequences, ranks = resolve_sequences(recipe, hardware).value, resolve_data_parallel_ranks(recipe, hardware).value
    micro, train = _stated_micro_batch(recipe), recipe.train
    if train.remainder == "fill" or sequences % (micro * ranks) == 0:
        return
    in_tokens = train.global_batch_tokens is not None
    key, unit = ("train.global_batch_tokens", recipe.sequence_length) if in_tokens else ("train.global_batch_size", 1)
    remedy = (
        f"Set {key} to {_nearest(sequences * unit, micro * ranks * unit)}, use a number of {hardware.noun} that divides it, or set "
        "train.remainder=fill, which leaves some slots of each step empty."
    )
    if sequences % ranks == 0:
        remedy = f"Set train.micro_batch_size to {max(one for one in divisors(sequences // ranks) if one <= micro)}."
    raise PlanError(
        f"{key}={sequences * unit} is not a multiple of micro_batch_size x {_sharers(recipe, hardware)} = {micro} x {ranks} = "
        f"{micro * ranks}{f' sequences of {unit} tokens' if in_tokens else ''}. {remedy}"
    )


def _sharers(recipe: Recipe, hardware: Hardware) -> str:
    each = resolve_data_parallel_ranks(recipe, hardware).value == hardware.ranks
    return hardware.noun if each else f"groups of {hardware.noun}"


def split_batch(
    recipe: Recipe,
    hardware: Hardware,
    sequences: int,
    attention: str,
    tuned: TuningResult | None = None,
    memory_with: Callable[[int], MemoryEstimate | None] = lambda size: None,
) -> tuple[Decision[int], Decision[int], Decision[int]]:
    """Sequences of a forward pass on one rank, forward passes per optimizer step, and slots of a step that stay empty.

    Their product with the ranks is the batch, or with train.remainder=fill the next larger number that it can be. `memory_with`
    estimates what a micro-batch needs. Raises PlanError.
    """
    check_batch(recipe, hardware)
    ranks = resolve_data_parallel_ranks(recipe, hardware).value
    micro = _micro_batch(recipe, hardware, ceil(sequences / ranks), attention, tuned, memory_with)
    accumulation = ceil(ceil(sequences / ranks) / micro.value)
    slots = micro.value * accumulation * ranks
    empty = Decision(0, "the batch divides")
    if slots > sequences:
        reason = (
            f"train.remainder=fill: {slots} slots for {sequences} sequences; a dummy sequence is one token without loss"
        )
        empty = Decision(slots - sequences, reason)
    filled = f" - {empty.value} empty" if empty.value else ""
    of = _sharers(recipe, hardware)
    arithmetic = f"{sequences} = {micro.value} x {accumulation} x {ranks}{filled} (micro-batch x accumulation x {of})"
    return micro, Decision(accumulation, arithmetic), empty


def _micro_batch(
    recipe: Recipe,
    hardware: Hardware,
    share: int,
    attention: str,
    tuned: TuningResult | None,
    memory_with: Callable[[int], MemoryEstimate | None],
) -> Decision[int]:
    stated_size = recipe.train.micro_batch_size
    if stated_size != "auto":
        return Decision(stated_size, "the recipe")
    if tuned and share % tuned.micro_batch_size == 0:
        return Decision(tuned.micro_batch_size, tuned.reason)
    budget = _token_budget(recipe, hardware, attention)
    if (stages := recipe.train.pipeline_parallel_size) > 1:
        # Four micro-batches a stage leave less than a fifth of the time idle.
        budget = min(budget, max(1, share // (4 * stages)) * recipe.sequence_length)
    sizes = [one for one in reversed(divisors(share)) if one == 1 or one * recipe.sequence_length <= budget]
    size = next((one for one in sizes if (need := memory_with(one)) is None or need.lack is None), 1)
    full = f"; {sizes[0]} would not fit" if size < sizes[0] else ""
    return Decision(size, f"auto: the largest divisor of {share} within {budget} tokens a forward pass{full}")


def _token_budget(recipe: Recipe, hardware: Hardware, attention: str) -> int:
    """Tokens of a forward pass: a rule of thumb, at which the activations of a 3B model with checkpointing fit with room."""
    if recipe.data.packing and (attention in ("sdpa", "eager") or recipe.train.sequence_parallel_size > 1):
        return (
            recipe.sequence_length
        )  # a mask over several packs grows with the square of their tokens, and a group of ranks shares one
    if hardware.gpu is None:
        return 1024
    return 16384 if hardware.gpu.memory_gib >= 70 else 8192 if hardware.gpu.memory_gib >= 38 else 4096


def sequences_per_epoch(recipe: Recipe, data: DataFacts) -> int:
    """Packs with packing, as if all were full where they are not counted; else documents."""
    if data.sequences is not None:
        return data.sequences
    return ceil(data.tokens / recipe.sequence_length) if recipe.data.packing else data.documents


def resolve_learning_rate(recipe: Recipe) -> Decision[float]:
    """The peak learning rate, scaled where the recipe has a base for it."""
    train = recipe.train
    if train.lr_scaling == "none" or train.base_batch_size is None:
        return Decision(train.learning_rate, stated(train, "learning_rate"))
    batch = train.global_batch_size or train.global_batch_tokens
    assert batch is not None
    ratio = batch / train.base_batch_size
    factor = ratio if train.lr_scaling == "linear" else sqrt(ratio)
    how = f"{train.lr_scaling}: {batch} / base_batch_size {train.base_batch_size}"
    return Decision(train.learning_rate * factor, f"{train.learning_rate:g} x {factor:.6g} ({how})")
