"""Decides which ranks shard the weights with FSDP2."""

from __future__ import annotations

from sft.plan.hardware import Hardware
from sft.recipe.schema import Fsdp, Recipe

FSDP2 = "FSDP2"


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
    units = f"modules over {fsdp.min_num_params:,} parameters" if fsdp.min_num_params else "decoder layers"
    offload = ", offloaded to the machine's memory" if fsdp.offload_params else ""
    return f"train.fsdp, {fsdp.sharding_strategy}: {replicas} x {shards} ranks that shard; wraps {units}{offload}"
