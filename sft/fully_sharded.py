"""FSDP2 on live objects: the mixed precision, CPU ranks, prefetching, and what is shared out, read back.

accelerate calls torch's fully_shard when the training begins; sft/trainer.py spells its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import TrainerCallback

from sft.errors import PlanError
from sft.fsdp import mesh_shape
from sft.job import Job
from sft.recipe import Fsdp


def mixed_precision(compute: torch.dtype) -> MixedPrecisionPolicy:
    """What weights are gathered and computed in; gradients are reduced in fp32.

    accelerate's own policy would reduce gradients in bf16, and round to bf16 what leaves the model, which is the loss.

    Args:
        compute: The plan's precision.
    """
    if compute == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


@contextmanager
def cpu_ranks_may_shard() -> Iterator[None]:
    """Have accelerate take CPU ranks for FSDP while it makes its state.

    Its list of devices leaves CPU ranks out, and it trains them with DDP without a word; torch's fully_shard itself runs on them.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            # Each later AcceleratorState copies the type from there.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


def sharded_units(model: Any) -> list[Any]:
    """The modules that fully_shard was called on, in the order they are registered; the model itself is the first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sharded_layers(model: Any) -> tuple[int, int]:
    """How many decoder layers are units of their own, and how many there are."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return sum(isinstance(layer, FSDPModule) for layer in layers), len(layers)


def prefetch(model: Any, ahead: int) -> None:
    """Gather so many layers before they are needed, in the order of the layers and back.

    Args:
        model: Sharded, before its first forward pass.
        ahead: Layers.
    """
    layers = [unit for unit in sharded_units(model) if isinstance(unit, GradientCheckpointingLayer)]
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, place - ahead) : place][::-1])


class PrefetchAsAsked(TrainerCallback):  # type: ignore[misc]
    """Sets the layers that are gathered ahead, once the model is sharded.

    Args:
        ahead: train.fsdp.prefetch.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first forward pass."""
        prefetch(kwargs["model"], self.ahead)


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


def read_sharding(model: Any) -> Sharding:
    """What torch has made of the model.

    Args:
        model: Sharded.

    Raises:
        PlanError: Its parts are shared out in different ways, or none is.
    """
    units = sharded_units(model)
    groups = [group for unit in units for group in _groups(unit)]
    # The parameters of a unit that is not given back after a pass are whole in the model, and shared in the unit.
    shares = [parameter.sharded_param for group in dict.fromkeys(groups) for parameter in group.fsdp_params]
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


def computes_in(model: Any) -> torch.dtype | None:
    """The format that FSDP2 casts weights to, or None where it casts none."""
    units = sharded_units(model)
    return units[0]._get_fsdp_state()._mp_policy.param_dtype if units else None


def plugin_arguments(fsdp: Fsdp) -> dict[str, Any]:
    """The section in the words of transformers' fsdp_config."""
    return {
        "version": 2,
        "reshard_after_forward": fsdp.sharding_strategy != "shard_grad_op",
        "auto_wrap_policy": "SIZE_BASED_WRAP" if fsdp.min_num_params else "TRANSFORMER_BASED_WRAP",
        **({"min_num_params": fsdp.min_num_params} if fsdp.min_num_params else {}),
        "cpu_offload": fsdp.offload_params,
        "state_dict_type": f"{fsdp.state_dict_type.upper()}_STATE_DICT",
        # The layers' own checkpointing is what the plan decides about; sft/checkpointing.py.
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": False,
    }


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
