"""Loads a model whose matrices are sharded over ranks, and corrects what transformers does to the norms inside them."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sft.plan.job import Job


def loading_arguments(job: Job) -> dict[str, Any]:
    """Arguments of from_pretrained with which each rank loads its shard of each matrix."""
    size = job.recipe.train.tensor_parallel_size
    if size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def sum_norm_gradients_once(model: Any) -> None:
    """Let ranks add up the gradients of norms inside sharded heads for each micro-batch alone.

    Such a norm (Qwen3's q_norm and k_norm) is replicated on each rank and sees that rank's heads. transformers adds up, over the ranks,
    the gradient that has accumulated so far: what earlier micro-batches of the step left there is added up again.
    """
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    summed = {name for name, style in plan.items() if style == "replicated_with_grad_allreduce"}
    mesh = next(parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    group = mesh.get_group() if mesh.ndim == 1 else mesh["tp"].get_group()

    def add_up(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    for name, module in model.named_modules():
        if re.sub(r"\d+", "*", name) not in summed:
            continue
        module.__dict__.pop("forward", None)  # where 5.23 attaches its sum
        module._backward_hooks.clear()  # where 5.17 has it
        for parameter in module.parameters(recurse=False):
            parameter.register_hook(add_up)
