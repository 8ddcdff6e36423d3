"""Tensor parallelism: accelerate's configuration, and checkpoints of a model whose matrices are divided over ranks.

transformers refuses to checkpoint such a model's optimizer. Here checkpoints hold full tensors, as those of one process do, and each rank
takes its shard on resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from sft.parallel.patches import cpu_ranks_may_be_parallel
from sft.plan.job import Job


def parallelism_config(job: Job) -> Any:
    """accelerate's configuration of tensor or sequence parallel groups; None where every rank has a batch of its own."""
    tensor, sequence = job.recipe.train.tensor_parallel_size, job.recipe.train.sequence_parallel_size
    if tensor == sequence == 1:
        return None
    if sequence > 1:
        handler = DeepSpeedSequenceParallelConfig()
        # Its constructor knows only the attention functions of transformers; DeepSpeed takes any that is registered there.
        handler.sp_attn_implementation = job.plan.attention.value
        groups = job.hardware.ranks // sequence
        return ParallelismConfig(sp_size=sequence, dp_shard_size=groups, sp_handler=handler)
    if job.hardware.gpu is None:
        cpu_ranks_may_be_parallel()
    return ParallelismConfig(tp_size=tensor)


def is_tensor_parallel(model: torch.nn.Module) -> bool:
    """Whether matrices of the model are divided over ranks, each of which computes with its shard; not so under FSDP."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def tensor_parallel_ranks(model: torch.nn.Module) -> int:
    """Ranks that divide the decoder layers' matrices, read from the matrices themselves; 1 where they are whole."""
    if not is_tensor_parallel(model):
        return 1
    sizes = [
        # transformers 5.17 has one dimension, without a name.
        (parameter.device_mesh if parameter.device_mesh.ndim == 1 else parameter.device_mesh["tp"]).size()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and "_proj." in name
        and not all(placement.is_replicate() for placement in parameter.placements)
    ]
    return max(sizes, default=1)


def full(value: Any) -> Any:
    """A tensor with all ranks' shards, on the CPU; everything else as it is. Every rank takes part."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    return value.cpu() if isinstance(value, torch.Tensor) else value


def shard_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, divided as another one is.

    Args:
        value: The same on every rank.
        like: A parameter.
    """
    value = value.to(like.device)
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value  # not divided, or no state per element, such as the number of steps
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights, tied ones once. Every rank takes part."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: full(value.detach()) for name, value in model.state_dict().items() if name in once}


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state_dict with full tensors. Every rank takes part."""
    state = optimizer.state_dict()
    moments = {
        number: {name: full(value) for name, value in entries.items()} for number, entries in state["state"].items()
    }
    return {**state, "state": moments}


def load_optimizer_state(optimizer: Any, file: Path) -> None:
    """Give each rank its shard of a saved `full_optimizer_state`.

    Args:
        optimizer: Of a model that is divided in any way.
        file: Written by torch.save.
    """
    state = torch.load(file, map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entries = state["state"].get(number, {})
        state["state"][number] = {name: shard_of(value, parameter) for name, value in entries.items()}
    optimizer.load_state_dict(state)


def load_weights(model: Any, folder: Path) -> None:
    """Give each rank its shard of the saved weights."""
    from safetensors import safe_open

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights, torch.no_grad():
            for name in weights.keys():  # noqa: SIM118 (no dictionary)
                parameters[name].copy_(shard_of(weights.get_tensor(name), parameters[name]))
