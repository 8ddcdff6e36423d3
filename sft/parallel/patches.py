"""Replaces functions of accelerate and transformers that cannot do what a job needs. tests/upgrades/test_parallel.py fails when one can go.

`AcceleratorState.__init__`                  silently takes CPU ranks for DDP where FSDP2 was requested
`ParallelismConfig._validate_accelerator`    refuses parallel configurations over CPU ranks
`fsdp2_prepare_auto_wrap_policy`             by size it wraps lists of modules too, which torch refuses
`find_packed_sequence_indices`               reads positions from the GPU at each micro-batch, for a mask that is not made

Not replaced but overridden, private methods among them: those of torch's `PipelineStage` in sft/parallel/pipeline.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, fsdp_utils
from transformers import masking_utils


@contextmanager
def cpu_ranks_may_shard() -> Iterator[None]:
    """Make accelerate accept CPU ranks for FSDP while it builds its state; torch's fully_shard itself runs on them."""
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


def cpu_ranks_may_be_parallel() -> None:
    """Make accelerate build parallel configurations over CPU ranks, which it knows only as DDP."""
    validate = ParallelismConfig._validate_accelerator

    def validate_cpu(config: Any, accelerator: Any) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            validate(config, accelerator)
        elif config.total_size != accelerator.num_processes:
            raise ValueError(f"{config} does not divide {accelerator.num_processes} processes")

    ParallelismConfig._validate_accelerator = validate_cpu


@contextmanager
def only_these_are_wrapped(modules: list[Any]) -> Iterator[None]:
    """Make accelerate shard these modules as units of their own, and no others."""
    units, original = {id(module) for module in modules}, fsdp_utils.fsdp2_prepare_auto_wrap_policy
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = lambda plugin, model: lambda module: id(module) in units
    try:
        yield
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = original


@contextmanager
def no_masks_of_packs() -> Iterator[None]:
    """Make transformers' models ask no tensor whether a batch is packed: the attention function is given where documents end."""
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original
