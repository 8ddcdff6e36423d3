"""Tensor and sequence parallelism as accelerate, transformers and DeepSpeed spell them, and what CPU ranks need for it."""

from __future__ import annotations

from typing import Any

from sft.plan.job import Job


def parallelism_config(job: Job) -> Any:
    """accelerate's configuration of the groups; None where every rank has a batch of its own."""
    tensor, sequence = job.recipe.train.tensor_parallel_size, job.recipe.train.sequence_parallel_size
    if tensor == sequence == 1:
        return None
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    if sequence > 1:
        handler = DeepSpeedSequenceParallelConfig()
        # Its constructor knows the attention functions of transformers only; DeepSpeed takes any that is registered there.
        handler.sp_attn_implementation = job.plan.attention.value
        groups = job.hardware.ranks // sequence
        return ParallelismConfig(sp_size=sequence, dp_shard_size=groups, sp_handler=handler)
    if job.hardware.gpu is None:
        allow_cpu_ranks()
    return ParallelismConfig(tp_size=tensor)


def allow_cpu_ranks() -> None:
    """Let accelerate build a parallel configuration over CPU ranks: it knows several CPU processes as DDP only."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    validate = ParallelismConfig._validate_accelerator

    def validate_cpu(config: Any, accelerator: Any) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            validate(config, accelerator)
        elif config.total_size != accelerator.num_processes:
            raise ValueError(f"{config} does not divide {accelerator.num_processes} processes")

    ParallelismConfig._validate_accelerator = validate_cpu
