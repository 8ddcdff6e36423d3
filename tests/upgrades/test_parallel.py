"""What sft/parallel/ leans on in torch and accelerate; where one fails after an upgrade, look at the function that it names."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, fsdp_utils
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils import cpp_extension
from transformers import masking_utils

from sft.parallel.deepspeed import FOLDER
from sft.parallel.pipeline import Stage


def test_accelerate_still_takes_cpu_ranks_for_ddp() -> None:
    """Else cpu_ranks_may_shard can go."""
    source = inspect.getsource(AcceleratorState.__init__)
    condition = source[: source.index("self.distributed_type = DistributedType.FSDP")]
    condition = condition[condition.rindex("self.distributed_type in [") :]
    assert "DistributedType.MULTI_GPU" in condition
    assert "MULTI_CPU" not in condition


def test_accelerate_still_refuses_parallel_configurations_over_cpu_ranks() -> None:
    """Else cpu_ranks_may_be_parallel can go."""
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.MULTI_CPU, num_processes=2, multi_device=False, is_fsdp2=False
    )
    with pytest.raises(ValueError, match="only compatible"):
        ParallelismConfig(tp_size=2)._validate_accelerator(accelerator)


def test_accelerates_choice_by_size_still_takes_what_torch_refuses() -> None:
    """Else size_units can go."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])

    model = Small()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10)
    choose = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert choose is not None
    assert choose(model.layers)


def test_accelerates_own_policy_still_reduces_gradients_in_bf16() -> None:
    """Else policies need not set it."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16


def test_transformers_still_reads_positions_to_find_packs() -> None:
    """Else no_masks_of_packs can go."""
    positions = torch.tensor([[0, 1, 2, 3]])
    assert masking_utils.find_packed_sequence_indices(positions) is None  # as only values say
    source = inspect.getsource(masking_utils._preprocess_mask_arguments)
    assert "find_packed_sequence_indices(position_ids)" in source


def test_torch_builds_where_the_variable_says_behind_a_file_named_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """prepare_builds looks for it."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert cpp_extension._get_build_directory("cpu_adam", False) == str(tmp_path / "cpu_adam")
    assert "'lock'" in inspect.getsource(cpp_extension._jit_compile)


def test_torchs_pipeline_stage_still_has_what_ours_overrides_and_its_schedule_calls_it() -> None:
    """Of _validate_* one name or the other: torch 2.11 checks shapes there, later ones behind _runtime_validate."""
    overridden = {name for name, one in vars(Stage).items() if callable(one)}
    ours = {"__init__", "neighbour", "_receive", "_send", "_validate_fwd_input", "_validate_fwd_outputs"}
    assert overridden - ours <= set(dir(PipelineStage))
    schedule = inspect.getsource(Schedule1F1B._step_microbatches)
    assert all(f"{way}_{what}_ops(" in schedule for way in ("get_fwd", "get_bwd") for what in ("recv", "send"))
    chunks = inspect.getsource(PipelineStage.forward_one_chunk) + inspect.getsource(PipelineStage.backward_one_chunk)
    for name in (
        "_retrieve_recv_activations(",
        "_retrieve_recv_grads(",
        "forward_maybe_with_nosync(",
        "fwd_cache[",
        "bwd_cache[",
    ):
        assert name in chunks
    assert "_runtime_validate" in chunks or "_validate_fwd_input" in chunks


def test_torchs_schedule_still_leaves_out_its_warmup_where_a_stage_is_initialized() -> None:
    """Pipeline.step says that it is: torch would agree on one shape for all micro-batches."""
    source = inspect.getsource(Schedule1F1B._initialize_stage)
    assert "_stage_forward_initialized" in source and "_stage_backward_initialized" in source
    assert "warmup_chunks" in inspect.getsource(Schedule1F1B._step_microbatches)
