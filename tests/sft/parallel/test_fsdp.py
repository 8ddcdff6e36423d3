"""What FSDP2 shards as units, and what it computes in."""

import pytest
import torch
from torch import nn

from sft.parallel.fsdp import plugin_arguments, policies, size_units
from sft.parallel.patches import cpu_ranks_may_shard
from sft.recipe.schema import Fsdp


def test_gradients_are_reduced_in_fp32_and_the_loss_is_not_rounded() -> None:
    policy = policies(Fsdp(), torch.bfloat16, on_gpu=True)["mixed_precision_policy"]
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    whole = policies(Fsdp(), torch.float32, on_gpu=True)["mixed_precision_policy"]
    assert (whole.param_dtype, whole.reduce_dtype, whole.output_dtype) == (None, None, None)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_memory_is_pinned_only_where_there_is_a_gpu(on_gpu: bool) -> None:
    assert policies(Fsdp(offload_params=True), torch.float32, on_gpu)["cpu_offload"].pin_memory is on_gpu
    assert "cpu_offload" not in policies(Fsdp(), torch.float32, on_gpu)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_transformers_takes_every_word_of_the_section() -> None:
    from trl import SFTConfig

    words = plugin_arguments(Fsdp(sharding_strategy="shard_grad_op", offload_params=True, state_dict_type="full"))
    arguments = SFTConfig(output_dir="nowhere", report_to="none", use_cpu=True, fsdp=True, fsdp_config=words)
    taken = arguments.fsdp_plugin_args
    assert taken["fsdp_version"] == 2
    assert taken["reshard_after_forward"] is False
    assert taken["cpu_offload"] is True
    assert taken["state_dict_type"] == "FULL_STATE_DICT"
    assert taken["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert taken["activation_checkpointing"] is taken["cpu_ram_efficient_loading"] is False
    sized = SFTConfig(
        output_dir="nowhere",
        report_to="none",
        use_cpu=True,
        fsdp=True,
        fsdp_config=plugin_arguments(Fsdp(min_num_params=10)),
    ).fsdp_plugin_args
    assert (sized["auto_wrap_policy"], sized["reshard_after_forward"]) == ("NO_WRAP", True)
    assert sized["state_dict_type"] == "SHARDED_STATE_DICT"


def test_accelerates_state_is_its_own_again_after_the_patch() -> None:
    from accelerate.state import AcceleratorState

    original = AcceleratorState.__init__
    with cpu_ranks_may_shard():
        patched = AcceleratorState.__init__
    assert patched is not original
    assert AcceleratorState.__init__ is original


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.norm = nn.Linear(10, 10, bias=False), nn.Linear(10, 4, bias=False), nn.LayerNorm(5)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 10), nn.Linear(10, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList([Layer(), Layer()])

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize(
    ("least", "units"),
    [
        (1, ["large", "small", "norm"] * 2),  # of a layer nothing is left
        (45, ["large", "layer"] * 2),  # 40 + 10 are left
        (51, ["large"] * 2),
        (150, ["layer"] * 2),
        (151, []),
    ],
)
def test_a_module_is_a_unit_when_it_has_so_many_parameters_beside_those_of_its_units(
    least: int, units: list[str]
) -> None:
    model = Small()
    names = {module: name.split(".")[-1] for name, module in model.named_modules()}
    found = ["layer" if isinstance(unit, Layer) else names[unit] for unit in size_units(model, least)]
    assert found == units
