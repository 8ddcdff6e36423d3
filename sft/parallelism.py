"""How the ranks divide the work: which see batches of their own, and which share one. Pure arithmetic: no torch."""

from __future__ import annotations

from sft.errors import PlanError
from sft.hardware import Hardware
from sft.recipe import Recipe


def data_parallel_ranks(recipe: Recipe, hardware: Hardware) -> int:
    """Ranks, or groups of ranks, that each see a batch of their own.

    Ranks that share the matrices of a layer, or the tokens of a sequence, work on one batch together.

    Raises:
        PlanError: The ranks do not divide into such groups.
    """
    train = recipe.train
    together = train.tensor_parallel_size * train.sequence_parallel_size
    if hardware.ranks % together:
        sizes = {"tensor": train.tensor_parallel_size, "sequence": train.sequence_parallel_size}
        asked = " and ".join(f"train.{name}_parallel_size={size}" for name, size in sizes.items() if size > 1)
        raise PlanError(
            f"{asked}: groups of {together} ranks, and {hardware.ranks} is no multiple of that. Start a multiple of {together}, or lower "
            "the size."
        )
    return hardware.ranks // together
