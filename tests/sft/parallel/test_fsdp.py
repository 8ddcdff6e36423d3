"""What FSDP2 shards as units, and what it computes in."""

import pytest
import torch
from torch import nn

from sft.parallel.fsdp import plugin_arguments, policies, size_units
from sft.recipe.schema import Fsdp


def test_gradients_are_reduced_in_fp32_and_the_loss_is_not_rounded() -> None:
    policy = policies(Fsdp(), torch.bfloat16, on_gpu=True)["mixed_precision_policy"]
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    whole = policies(Fsdp(), torch.float32, on_gpu=True)["mixed_precision_policy"]
    assert (whole.param_dtype, whole.reduce_dtype, whole.output_dtype) == (None, None, None)
    offloaded = policies(Fsdp(offload_params=True), torch.float32, on_gpu=False)
    assert offloaded["cpu_offload"].pin_memory is False, "which needs a GPU"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_transformers_takes_every_word_of_the_section() -> None:
    from trl import SFTConfig

    section = plugin_arguments(Fsdp(sharding_strategy="shard_grad_op", offload_params=True, state_dict_type="full"))
    arguments = SFTConfig(output_dir="nowhere", report_to="none", use_cpu=True, fsdp=True, fsdp_config=section)
    words = {
        "fsdp_version": 2,
        "reshard_after_forward": False,
        "cpu_offload": True,
        "state_dict_type": "FULL_STATE_DICT",
    }
    assert words.items() <= arguments.fsdp_plugin_args.items()


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
