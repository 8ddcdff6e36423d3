"""Gathers full tensors out of the ranks' shards, and gives each rank its shard of a full one; for FSDP2 and tensor parallelism.

Checkpoints of tensor parallelism, and of FSDP2 with `state_dict_type: full`, hold full tensors, as those of one process do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, which is the same on every rank, sharded as a parameter is."""
    value = value.to(like.device)
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value  # not sharded, or no state per element, such as the number of steps
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def full_state(
    model: Any, adapters_only: bool = False, dtype: torch.dtype | None = None, keep: bool = True
) -> dict[str, Any]:
    """The model's weights, each once. Every rank takes part.

    Args:
        model: Sharded.
        adapters_only: Leave out what is frozen.
        dtype: Rounded to it before gathering; None: the dtype of the shards.
        keep: False on ranks that only take part: they get an empty dictionary.
    """
    parameters = dict(model.named_parameters())
    # A weight with two names, such as a tied embedding, would be gathered for each.
    once = parameters.keys() | {name for name, _ in model.named_buffers()}
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if name not in once or (adapters_only and name in parameters and not parameters[name].requires_grad):
            continue
        rounded = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.detach()
        gathered = rounded.full_tensor() if isinstance(rounded, DTensor) else rounded
        if keep:
            state[name] = gathered.cpu()
    return state


def full_optimizer_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """The optimizer's state_dict with full tensors, of which none stay where not `keep`. Every rank takes part."""
    state = optimizer.state_dict()
    for number, entries in state["state"].items():
        # The number of steps is one tensor, or a number, on every rank.
        gathered = {
            name: value.full_tensor().cpu() if isinstance(value, DTensor) else value for name, value in entries.items()
        }
        state["state"][number] = gathered if keep else {}
    return state
