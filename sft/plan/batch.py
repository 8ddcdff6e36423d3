"""Divides a step over the ranks: sequences = micro-batch x accumulation x data-parallel ranks, or a refusal with sizes that work.

A step holds what the recipe says on any number of ranks; only who computes what follows from the machine. Where the ranks cannot
share it evenly, train.remainder=fill gives them more slots than there are sequences, and leaves the last ones empty.
"""

from __future__ import annotations

from math import ceil, isqrt, sqrt

from sft.errors import PlanError
from sft.plan.decision import Decision, TuningResult, stated
from sft.plan.hardware import Hardware
from sft.plan.parallelism import data_parallel_ranks
from sft.recipe.schema import Recipe


def divisors(number: int) -> list[int]:
    """From 1 to the number itself.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def resolve_sequences(recipe: Recipe, hardware: Hardware) -> Decision[int]:
    """Sequences per optimizer step.

    Raises:
        PlanError: The recipe gives tokens that are no whole number of sequences.
    """
    train, length = recipe.train, recipe.sequence_length
    unit = f"packs of {length} tokens" if recipe.data.packing else "documents"
    if train.global_batch_size is not None:
        return Decision(train.global_batch_size, f"the recipe, in {unit}")
    tokens = train.global_batch_tokens
    assert tokens is not None
    if tokens % length:
        key = "max_length" if recipe.data.pack_length is None else "pack_length"
        raise PlanError(
            f"train.global_batch_tokens={tokens} is not a multiple of data.{key}={length}. The nearest that can be used here: "
            f"{_nearest(tokens, length * _share_unit(recipe, hardware))}."
        )
    return Decision(tokens // length, f"{tokens} tokens = {tokens // length} x {length}, in {unit}")


def check_batch(recipe: Recipe, hardware: Hardware) -> None:
    """Refuse a batch that the ranks cannot share, whatever the model.

    Raises:
        PlanError: The message names sizes that can be shared.
    """
    sequences, ranks = resolve_sequences(recipe, hardware).value, data_parallel_ranks(recipe, hardware)
    if recipe.train.remainder == "refuse":
        _check_share(recipe, hardware, sequences, ranks)


def _share_unit(recipe: Recipe, hardware: Hardware) -> int:
    """What the batch must be a multiple of: the ranks, times the recipe's micro-batch where it has one."""
    micro = recipe.train.micro_batch_size
    return data_parallel_ranks(recipe, hardware) * (micro if isinstance(micro, int) else 1)


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


def _sharers(recipe: Recipe, hardware: Hardware) -> str:
    """What shares a batch, in words."""
    noun, train = "GPUs" if hardware.gpu else "processes", recipe.train
    sizes = {"tensor": train.tensor_parallel_size, "sequence": train.sequence_parallel_size}
    shared = " x ".join(f"train.{name}_parallel_size={size}" for name, size in sizes.items() if size > 1)
    return f"groups of {noun} ({shared})" if shared else noun


def resolve_data_parallel_ranks(recipe: Recipe, hardware: Hardware) -> Decision[int]:
    """Ranks, or groups of ranks, that each see a batch of their own.

    Raises:
        PlanError: The ranks do not divide into such groups.
    """
    ranks, train = data_parallel_ranks(recipe, hardware), recipe.train
    groups = {"the matrices of a layer": train.tensor_parallel_size, "a sequence": train.sequence_parallel_size}
    shared = "".join(f" / {size} that share {what}" for what, size in groups.items() if size > 1)
    plural = "s" if hardware.ranks > 1 else ""
    return Decision(
        ranks, f"{hardware.ranks} rank{plural}{shared}" + ("" if shared else ", each with sequences of its own")
    )


def split_batch(
    recipe: Recipe, hardware: Hardware, sequences: int, attention: str, tuned: TuningResult | None = None
) -> tuple[Decision[int], Decision[int]]:
    """Micro-batch and accumulation, so that micro x accumulation x ranks is the batch, or with `fill` the next that it can be.

    Args:
        recipe: The batch, and the micro-batch where the recipe gives one.
        hardware: The ranks, and the memory of each.
        sequences: From resolve_sequences.
        attention: The attention function, as planned.
        tuned: What auto-tuning found.

    Returns:
        Sequences per forward pass on one rank, and forward passes per optimizer step.

    Raises:
        PlanError: It cannot be shared; the message names sizes that can.
    """
    ranks, wanted = data_parallel_ranks(recipe, hardware), recipe.train.micro_batch_size
    if recipe.train.remainder == "refuse":
        _check_share(recipe, hardware, sequences, ranks)
    share = ceil(sequences / ranks)
    found = tuned.micro_batch_size if tuned else None
    if wanted == "auto" and tuned and found is not None and share % found == 0:
        micro, reason = found, tuned.reason
    elif wanted == "auto":
        budget, why = _token_budget(recipe, hardware, attention)
        fitting = [divisor for divisor in divisors(share) if divisor * recipe.sequence_length <= budget]
        micro = max(fitting, default=1)
        reason = f"auto: the largest divisor of {share} within {budget} tokens a forward pass ({why})"
        reason += f"; {tuned.reason}" if tuned else ""
    else:
        micro, reason = wanted, "the recipe"
    if recipe.train.remainder == "refuse":
        _check_micro_batch(recipe, hardware, sequences, ranks, micro)
    accumulation = ceil(share / micro)
    noun = "GPUs" if hardware.gpu else "processes"
    of = noun if ranks == hardware.ranks else f"groups of {noun}"
    empty = micro * accumulation * ranks - sequences
    filled = f" - {empty} empty" if empty else ""
    arithmetic = f"{sequences} = {micro} x {accumulation} x {ranks}{filled} (micro-batch x accumulation x {of})"
    return Decision(micro, reason), Decision(accumulation, arithmetic)


def resolve_empty(recipe: Recipe, sequences: int, micro: int, accumulation: int, ranks: int) -> Decision[int]:
    """Places of a step that hold no sequence of the data.

    Args:
        recipe: Says what is done with a remainder.
        sequences: Of a step.
        micro: Sequences of a forward pass on one rank.
        accumulation: Forward passes of a step.
        ranks: Those that see batches of their own.
    """
    places = micro * accumulation * ranks
    if places == sequences:
        return Decision(0, "the batch divides")
    shared = f"train.remainder=fill: {places} places for {sequences} sequences"
    return Decision(places - sequences, f"{shared}; a filler is one token that trains nothing and counts for nothing")


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
    return Decision(train.learning_rate * factor, f"{_exponent(train.learning_rate)} x {factor:.6g} ({how})")


def _exponent(number: float) -> str:
    """A learning rate as people write it.

    >>> _exponent(1e-05), _exponent(0.00025)
    ('1e-5', '2.5e-4')
    """
    digits, _, power = f"{number:e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _check_share(recipe: Recipe, hardware: Hardware, sequences: int, ranks: int) -> None:
    if sequences % ranks == 0:
        return
    written, unit = _batch_as_written(recipe, sequences)
    noun = "GPUs" if hardware.gpu else "processes"
    together = hardware.ranks // ranks
    counts = ", ".join(str(divisor * together) for divisor in divisors(sequences) if divisor <= 2 * ranks)
    raise PlanError(
        f"{written} cannot be shared by {ranks} {_sharers(recipe, hardware)}: it is not a multiple. Set {written.partition('=')[0]} to "
        f"{_nearest(sequences * unit, _share_unit(recipe, hardware) * unit)}, or use a number of {noun} that divides it: {counts}. "
        "Or keep both with train.remainder=fill, which leaves some places of each step empty."
    )


def _check_micro_batch(recipe: Recipe, hardware: Hardware, sequences: int, ranks: int, micro: int) -> None:
    share = sequences // ranks
    if share % micro == 0:
        return
    written, _ = _batch_as_written(recipe, sequences)
    *smaller, largest = [divisor for divisor in divisors(share) if divisor <= micro]
    raise PlanError(
        f"{written} is not a multiple of micro_batch_size x {_sharers(recipe, hardware)} = {micro} x {ranks} = {micro * ranks}. "
        f"Set train.micro_batch_size to {largest}" + (f" (or {', '.join(map(str, smaller))})." if smaller else ".")
    )


def _token_budget(recipe: Recipe, hardware: Hardware, attention: str) -> tuple[int, str]:
    if recipe.data.packing and recipe.train.sequence_parallel_size > 1:
        return recipe.sequence_length, "one pack, which the ranks of a group share"
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
