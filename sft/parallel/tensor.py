"""Configures tensor and sequence parallel groups, and reads how many ranks share the matrices of a live model."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
    """Whether ranks compute with shards of the model's matrices; not so under FSDP."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def tensor_parallel_ranks(model: torch.nn.Module) -> int:
    """Ranks that share the decoder layers' matrices, read from the matrices themselves; 1 where they are not sharded."""
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
