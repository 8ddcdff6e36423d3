"""Checkpoints and gradients of a model whose layers are spread over ranks: what transformers leaves out.

It refuses to checkpoint such a model's optimizer. Here checkpoints hold whole tensors, as those of one process do, and each rank
takes its part when a run goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def is_spread(model: torch.nn.Module) -> bool:
    """Whether matrices of the model are divided over ranks, each of which computes with its part: not so under FSDP."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def tensor_mesh(parameter: DTensor) -> Any:
    """The ranks that a parameter is divided over; in transformers 5.17 the only dimension, without a name."""
    mesh = parameter.device_mesh
    return mesh if mesh.ndim == 1 else mesh["tp"]


def tensor_parallel_ranks(model: torch.nn.Module) -> int:
    """Ranks that each have a part of the decoder layers' matrices, by the matrices themselves; 1 where they are whole."""
    if not is_spread(model):
        return 1
    parts = [
        tensor_mesh(parameter).size()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and "_proj." in name
        and not all(p.is_replicate() for p in parameter.placements)
    ]
    return max(parts, default=1)


def whole(value: Any) -> Any:
    """A tensor with all ranks' parts, on the CPU; everything else as it is. Every rank takes part."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    return value.cpu() if isinstance(value, torch.Tensor) else value


def part_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, divided as another one is.

    Args:
        value: The same on every rank.
        like: A parameter.
    """
    value = value.to(like.device)
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value  # not divided, or no state of each element, such as the number of steps
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights, tied ones once. Every rank takes part."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: whole(value.detach()) for name, value in model.state_dict().items() if name in once}


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state_dict with whole tensors. Every rank takes part."""
    state = optimizer.state_dict()
    moments = {
        number: {name: whole(value) for name, value in entries.items()} for number, entries in state["state"].items()
    }
    return {**state, "state": moments}


def load_optimizer_state(optimizer: Any, file: Path) -> None:
    """Give each rank its part of what whole_optimizer_state had.

    Args:
        optimizer: Of a model that is divided as it was, or otherwise.
        file: Written by torch.save.
    """
    state = torch.load(file, map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entries = state["state"].get(number, {})
        state["state"][number] = {name: part_of(value, parameter) for name, value in entries.items()}
    optimizer.load_state_dict(state)


def load_weights(model: Any, folder: Path) -> None:
    """Give each rank its part of the saved weights."""
    from safetensors import safe_open

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights, torch.no_grad():
            for name in weights.keys():  # noqa: SIM118 (no dictionary)
                parameters[name].copy_(part_of(weights.get_tensor(name), parameters[name]))
