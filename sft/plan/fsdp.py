"""FSDP2: what train.fsdp comes to on a machine, and what it cannot do there. Pure arithmetic: no torch.

sft/parallel/fsdp.py has what touches the live objects.
"""

from __future__ import annotations

from sft.errors import PlanError
from sft.plan.hardware import Hardware
from sft.recipe.schema import Fsdp, Recipe

ENGINE = "FSDP2"


def resolve_fsdp(recipe: Recipe, hardware: Hardware) -> Fsdp | None:
    """The sharding that runs: the recipe's section, or None where there is none, or one process only."""
    return recipe.train.fsdp if hardware.ranks > 1 else None


def mesh_shape(fsdp: Fsdp, hardware: Hardware) -> tuple[int, int]:
    """Copies of the model, and ranks that share each.

    Args:
        fsdp: From resolve_fsdp.
        hardware: The ranks, and how many are on one machine.
    """
    if fsdp.sharding_strategy != "hybrid_shard":
        return 1, hardware.ranks
    return hardware.ranks // hardware.ranks_per_node, hardware.ranks_per_node


def check_fsdp(recipe: Recipe, hardware: Hardware, precision: str) -> None:
    """Refuse what FSDP2 cannot do here.

    Args:
        recipe: Its section and what it is combined with.
        hardware: The ranks.
        precision: As planned.

    Raises:
        PlanError: The message names a setting that can run.
    """
    fsdp = resolve_fsdp(recipe, hardware)
    if fsdp is None:
        return
    together = recipe.train.tensor_parallel_size * recipe.train.sequence_parallel_size
    if together > 1:
        raise PlanError(
            f"train.fsdp with groups of {together} ranks on one batch (train.tensor_parallel_size x train.sequence_parallel_size) is not "
            "built: FSDP2 shares the model among ranks that each have a batch of their own. Leave train.fsdp out, or set both sizes to 1."
        )
    if precision == "fp16":
        raise PlanError(
            "train.precision=fp16 with train.fsdp: fp16 needs its loss scaled, which is not built for shares of weights. Set "
            "train.precision=bf16 where the GPU has it, else fp32; or leave train.fsdp out and set train.deepspeed=zero3."
        )
    if recipe.model.new_tokens and recipe.model.lora is not None:
        raise PlanError(
            "model.new_tokens with model.lora under train.fsdp: peft trains single rows of the embeddings, and reads them where each "
            "rank has a share only. Leave train.fsdp out, set train.deepspeed=zero2, or train all weights: model.lora=null."
        )
    if fsdp.sharding_strategy != "hybrid_shard":
        return
    if hardware.ranks % hardware.ranks_per_node:
        raise PlanError(
            f"train.fsdp.sharding_strategy=hybrid_shard copies the model to each machine, and {hardware.ranks} processes are no multiple "
            f"of the {hardware.ranks_per_node} on this one. Start as many on each, or set it to full_shard."
        )
    if hardware.ranks_per_node == 1:
        raise PlanError(
            "train.fsdp.sharding_strategy=hybrid_shard shares the model within a machine, and there is one process on each. Set it to "
            "full_shard, which shares it among all machines; or leave train.fsdp out."
        )


def describe_fsdp(fsdp: Fsdp, hardware: Hardware) -> str:
    """The reason beside the engine's name in the plan."""
    copies, shards = mesh_shape(fsdp, hardware)
    if fsdp.sharding_strategy == "hybrid_shard":
        across = f"{copies} copies" if copies > 1 else "one machine, so one copy, as full_shard"
        where = f"hybrid_shard: {across}, each shared by {shards} ranks"
    else:
        where = f"{fsdp.sharding_strategy}: shared by {shards} ranks"
    units = f"modules over {fsdp.min_num_params:,} parameters" if fsdp.min_num_params else "decoder layers"
    offload = ", offloaded to the machine's memory" if fsdp.offload_params else ""
    return f"train.fsdp, {where}; wraps {units}{offload}"
