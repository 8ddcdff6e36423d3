"""The arithmetic of a step: sequences = micro-batch x accumulation x ranks, exactly, or a refusal with sizes that work.

A step holds what the recipe says on any number of ranks; only who computes what follows from the machine.
"""

from __future__ import annotations

from sft.errors import PlanError
from sft.hardware import Hardware
from sft.recipe import Recipe
from sft.resolved import Resolved, Searched


def divisors(number: int) -> list[int]:
    """From 1 to the number itself.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def resolve_sequences(recipe: Recipe, hardware: Hardware) -> Resolved[int]:
    """Sequences per optimizer step.

    Raises:
        PlanError: The recipe gives tokens that are no whole number of sequences.
    """
    train, length = recipe.train, recipe.sequence_length
    unit = f"packs of {length} tokens" if recipe.data.packing else "documents"
    if train.global_batch_size is not None:
        return Resolved(train.global_batch_size, f"the recipe, in {unit}")
    tokens = train.global_batch_tokens
    assert tokens is not None
    if tokens % length:
        key = "max_length" if recipe.data.pack_length is None else "pack_length"
        raise PlanError(
            f"train.global_batch_tokens={tokens} is not a multiple of data.{key}={length}. The nearest that can be used here: "
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
    return f"train.global_batch_tokens={recipe.train.global_batch_tokens}", recipe.sequence_length


def split_batch(
    recipe: Recipe, hardware: Hardware, sequences: int, attention: str, searched: Searched | None = None
) -> tuple[Resolved[int], Resolved[int]]:
    """Micro-batch and accumulation, so that micro x accumulation x ranks is the batch exactly.

    Args:
        recipe: The batch, and the micro-batch where the recipe gives one.
        hardware: The ranks, and the memory of each.
        sequences: From resolve_sequences.
        attention: The attention function, as planned.
        searched: What a search on this machine found.

    Returns:
        Sequences per forward pass on one rank, and forward passes per optimizer step.

    Raises:
        PlanError: It cannot be shared; the message names sizes that can.
    """
    ranks, wanted = hardware.ranks, recipe.train.micro_batch_size
    noun = "GPUs" if hardware.gpu else "processes"
    written, unit = _batch_as_written(recipe, sequences)
    if sequences % ranks:
        counts = ", ".join(str(divisor) for divisor in divisors(sequences) if divisor <= 2 * ranks)
        raise PlanError(
            f"{written} cannot be shared by {ranks} {noun}: it is not a multiple. Set {written.partition('=')[0]} to "
            f"{_nearest(sequences * unit, _share_unit(recipe, hardware) * unit)}, or use a number of {noun} that divides it: {counts}."
        )
    share = sequences // ranks
    found = searched.micro_batch_size if searched else None
    if wanted == "auto" and searched and found is not None and share % found == 0:
        micro, reason = found, searched.reason
    elif wanted == "auto":
        budget, why = _token_budget(recipe, hardware, attention)
        fitting = [divisor for divisor in divisors(share) if divisor * recipe.sequence_length <= budget]
        micro = max(fitting, default=1)
        reason = f"auto: the largest divisor of {share} within {budget} tokens a forward pass ({why})"
        reason += f"; {searched.reason}" if searched else ""
    else:
        micro, reason = wanted, "the recipe"
    if share % micro:
        *smaller, largest = [divisor for divisor in divisors(share) if divisor <= micro]
        raise PlanError(
            f"{written} is not a multiple of micro_batch_size x {noun} = {micro} x {ranks} = {micro * ranks}. "
            f"Set train.micro_batch_size to {largest}" + (f" (or {', '.join(map(str, smaller))})." if smaller else ".")
        )
    accumulation = share // micro
    arithmetic = f"{sequences} = {micro} x {accumulation} x {ranks} (micro-batch x accumulation x {noun})"
    return Resolved(micro, reason), Resolved(accumulation, arithmetic)


def _token_budget(recipe: Recipe, hardware: Hardware, attention: str) -> tuple[int, str]:
    masked = recipe.data.packing and attention in ("sdpa", "eager")
    if hardware.gpu is not None and masked:
        return (
            recipe.sequence_length,
            f"one pack: {attention}'s mask over several grows with the square of their tokens",
        )
    # A rule of thumb, not a memory model: activations of a 3B model with checkpointing fit with room at these sizes.
    if hardware.gpu is None:
        return (512, f"on a CPU, {attention}'s packed mask grows with the square") if masked else (1024, "on a CPU")
    for gib, tokens in ((70, 16384), (38, 8192)):
        if hardware.gpu.memory_gib >= gib:
            return tokens, f"a GPU of {hardware.gpu.memory_gib:.0f} GiB"
    return 4096, f"a GPU of {hardware.gpu.memory_gib:.0f} GiB"
