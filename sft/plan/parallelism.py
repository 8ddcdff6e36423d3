"""Decides which ranks share layers, sequences or weights; sft/plan/refusals.py refuses what they cannot share."""

from __future__ import annotations

from sft.plan.hardware import Hardware
from sft.plan.plan import Decision, stated
from sft.recipe.schema import Fsdp, Recipe

FSDP2 = "FSDP2"


def resolve_tensor_parallel(recipe: Recipe) -> Decision[int]:
    """Ranks that share each layer's matrices."""
    size = recipe.train.tensor_parallel_size
    how = f": each rank has 1/{size} of the heads and of the feed-forward width" if size > 1 else ""
    return Decision(size, stated(recipe.train, "tensor_parallel_size") + how)


def resolve_sequence_parallel(recipe: Recipe) -> Decision[int]:
    """Ranks that share the tokens of each sequence."""
    size, length = recipe.train.sequence_parallel_size, recipe.sequence_length
    how = (
        f": each rank has {-(-length // size)} of at most {length} tokens, and 1/{size} of the heads"
        if size > 1
        else ""
    )
    return Decision(size, stated(recipe.train, "sequence_parallel_size") + how)


def resolve_fsdp(recipe: Recipe, hardware: Hardware) -> Fsdp | None:
    """The sharding that runs: the recipe's section, or None where there is none, or one process only."""
    return recipe.train.fsdp if hardware.ranks > 1 else None


def mesh_shape(fsdp: Fsdp, hardware: Hardware) -> tuple[int, int]:
    """Replicas of the model, and ranks that shard each."""
    if fsdp.sharding_strategy != "hybrid_shard":
        return 1, hardware.ranks
    return hardware.ranks // hardware.ranks_per_node, hardware.ranks_per_node


def describe_fsdp(fsdp: Fsdp, hardware: Hardware) -> str:
    """The reason beside the engine's name in the plan."""
    replicas, shards = mesh_shape(fsdp, hardware)
    across = (
        f"{replicas} replica{'s' if replicas > 1 else ''}, each " if fsdp.sharding_strategy == "hybrid_shard" else ""
    )
    units = f"modules over {fsdp.min_num_params:,} parameters" if fsdp.min_num_params else "decoder layers"
    offload = ", offloaded to the machine's memory" if fsdp.offload_params else ""
    return f"train.fsdp, {fsdp.sharding_strategy}: {across}shared by {shards} ranks; wraps {units}{offload}"
