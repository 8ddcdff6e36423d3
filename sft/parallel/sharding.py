"""Law 3 for FSDP2: how a live model is shared out, read from torch's own objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from sft.errors import PlanError
from sft.plan.job import Job
from sft.plan.parallelism import mesh_shape


def sharded_units(model: Any) -> list[Any]:
    """The modules that fully_shard was called on, in the order they are registered; the model itself is the first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sharded_layers(model: Any) -> tuple[int, int]:
    """How many decoder layers are units of their own, and how many there are."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return sum(isinstance(layer, FSDPModule) for layer in layers), len(layers)


@dataclass(frozen=True)
class Sharding:
    """How a live model is shared out."""

    shared: int
    """Parameters of which each rank holds a share."""

    whole: int
    """Parameters that each rank holds whole."""

    mesh: tuple[int, int]
    """Copies of the model, and ranks that share each."""

    reshard: bool
    """Whether layers give their weights back after the forward pass."""

    offload: bool
    compute: torch.dtype | None
    """None: what the weights are kept in."""

    reduce: torch.dtype | None
    """None: the gradients' own."""

    ahead: tuple[int, int]
    """Units gathered ahead by an explicit order, at most: forward and backward."""


def give_back(model: Any) -> None:
    """Have each unit hold its shares again: after a forward pass alone some keep their weights whole, for the backward pass."""
    for unit in sharded_units(model):
        unit.reshard()


def shared_parameters(model: Any) -> list[DTensor]:
    """The rank's shares, one for each parameter that FSDP2 has taken; after give_back."""
    shares = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return [share for share in shares if share.device_mesh.size() > 1]


def read_sharding(model: Any) -> Sharding:
    """What torch has made of the model.

    Args:
        model: Sharded.

    Raises:
        PlanError: Its parts are shared out in different ways, or none is.
    """
    units = sharded_units(model)
    groups, shares = [group for unit in units for group in _groups(unit)], shared_parameters(model)
    meshes = {tuple(share.device_mesh.shape) for share in shares}
    policies = {(group.mp_policy.param_dtype, group.mp_policy.reduce_dtype) for group in groups}
    if len(meshes) != 1 or len(policies) != 1:
        raise PlanError(
            f"FSDP2 has not shared the model out in one way, as was planned: meshes {meshes}, formats {policies}."
        )
    (mesh,), (policy,) = meshes, policies
    copies, ranks = (1, *mesh) if len(mesh) == 1 else mesh
    layers = [unit for unit in units if isinstance(unit, GradientCheckpointingLayer)]
    states = [layer._get_fsdp_state() for layer in layers]
    return Sharding(
        shared=len(shares),
        whole=len(list(model.parameters())) - len(shares),
        mesh=(copies, ranks),
        reshard=any(group.post_forward_mesh_info is not None for group in groups),
        offload=all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
        compute=policy[0],
        reduce=policy[1],
        ahead=(
            max((len(state._states_to_forward_prefetch) for state in states), default=0),
            max((len(state._states_to_backward_prefetch) for state in states), default=0),
        ),
    )


def _groups(unit: Any) -> list[Any]:
    """The parameters that a unit gathers together: none where its parts have taken all."""
    state = unit._get_fsdp_state()
    # Of torch 2.11 on it may have several.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def sharding_readings(trainer: Any, job: Job) -> list[tuple[str, object, object]]:
    """What was planned of the sharding, and what the live model has, by name.

    Args:
        trainer: Its engine begun.
        job: With train.fsdp.
    """
    fsdp, found = job.fsdp, read_sharding(trainer.model)
    assert fsdp is not None
    precision = job.plan.precision.value
    formats = (None, None) if precision == "fp32" else (torch.bfloat16, torch.float32)
    layers, all_layers = sharded_layers(trainer.model)
    readings: list[tuple[str, object, object]] = [
        ("mesh", _mesh(*mesh_shape(fsdp, job.hardware)), _mesh(*found.mesh)),
        ("parameters held whole", 0, found.whole),
        ("reshard_after_forward", fsdp.sharding_strategy != "shard_grad_op", found.reshard),
        ("offload_params", fsdp.offload_params, found.offload),
        ("gathered, reduced in", _formats(*formats), _formats(found.compute, found.reduce)),
        (
            "reduced each micro-batch",
            True,
            bool(trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")),
        ),
    ]
    if fsdp.min_num_params is None:
        readings.append(("layers sharded one by one", f"{all_layers} of {all_layers}", f"{layers} of {all_layers}"))
    if fsdp.prefetch:
        ahead = min(fsdp.prefetch, layers - 1)
        readings.append(("prefetch", (ahead, ahead), found.ahead))
    return readings


def _mesh(copies: int, shards: int) -> str:
    return f"{copies} cop{'ies' if copies > 1 else 'y'} over {shards} ranks"


def _formats(compute: torch.dtype | None, reduce: torch.dtype | None) -> str:
    return f"{compute or 'as kept'}, {reduce or 'as computed'}".replace("torch.", "").replace("s own", "' own")
