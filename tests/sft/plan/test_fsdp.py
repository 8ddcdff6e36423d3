"""train.fsdp as plain values: the plan, the mesh, what is refused, and which modules are shared one by one."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.parallel.fsdp import plugin_arguments, policies, size_units
from sft.parallel.patches import cpu_ranks_may_shard
from sft.plan.fsdp import mesh_shape, resolve_fsdp
from sft.plan.hardware import Gpu, Hardware
from sft.plan.plan import Plan, resolve_plan
from sft.recipe.schema import Fsdp, Recipe

MakeRecipe = Callable[..., Recipe]
QWEN = ModelFacts("some/model", "qwen2", "bfloat16", 32768)


def gpus(ranks: int, per_node: int | None = None) -> Hardware:
    return Hardware(Gpu("NVIDIA Test", 80.0, 9.0), ranks, per_node or min(ranks, 8), 16, 128.0)


def plan_of(recipe: Recipe, hardware: Hardware) -> Plan:
    return resolve_plan(recipe, hardware, QWEN)


def test_the_engine_and_what_the_weights_are_kept_in_follow_from_the_section(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.fsdp={sharding_strategy: shard_grad_op, offload_params: true}")
    plan = plan_of(recipe, gpus(4))
    assert plan.engine.value == "FSDP2"
    assert plan.engine.reason == (
        "train.fsdp, shard_grad_op: shared by 4 ranks; wraps decoder layers, offloaded to the machine's memory"
    )
    assert (plan.precision.value, plan.weights.value, plan.gradients.value) == ("bf16", "fp32", "fp32")


def test_one_process_trains_as_one_process_and_says_why(make_recipe: MakeRecipe) -> None:
    plan, plain = plan_of(make_recipe("train.fsdp={}"), gpus(1)), plan_of(make_recipe(), gpus(1))
    assert plan.engine.value == "one process"
    assert plan.engine.reason == "train.fsdp is set, and one process shares with nobody"
    assert plan.settings() == plain.settings()


@pytest.mark.parametrize(
    ("strategy", "ranks", "per_node", "mesh"),
    [
        ("full_shard", 16, 8, (1, 16)),
        ("shard_grad_op", 4, 4, (1, 4)),
        ("hybrid_shard", 16, 8, (2, 8)),
        ("hybrid_shard", 8, 8, (1, 8)),
        ("hybrid_shard", 12, 4, (3, 4)),
    ],
)
def test_copies_times_shards_are_the_ranks_and_hybrid_shares_within_a_machine(
    strategy: str, ranks: int, per_node: int, mesh: tuple[int, int], make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(f"train.fsdp={{sharding_strategy: {strategy}}}", "train.global_batch_size=48")
    hardware = gpus(ranks, per_node)
    fsdp = resolve_fsdp(recipe, hardware)
    assert fsdp is not None
    assert mesh_shape(fsdp, hardware) == mesh
    assert mesh[0] * mesh[1] == ranks
    assert f"shared by {mesh[1]} ranks" in plan_of(recipe, hardware).engine.reason


def test_hybrid_on_one_machine_is_said_to_be_full_shard(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.fsdp={sharding_strategy: hybrid_shard}")
    assert "one machine, so one copy, as full_shard" in plan_of(recipe, gpus(8)).engine.reason


HYBRID = ["train.fsdp={sharding_strategy: hybrid_shard}", "train.global_batch_size=48"]


@pytest.mark.parametrize(
    ("overrides", "hardware", "message"),
    [
        (HYBRID, gpus(6, 4), "6 processes are no multiple of the 4"),
        (HYBRID, gpus(2, 1), "there is one process on each"),
        (["train.fsdp={}", "train.precision=fp16"], gpus(2), "train.deepspeed=zero3"),
        (["train.fsdp={}", "model.lora={}", "model.new_tokens=['<|a|>']"], gpus(2), "train.deepspeed=zero2"),
        (["train.fsdp={}", "train.tensor_parallel_size=2"], gpus(4), "set both sizes to 1"),
    ],
)
def test_what_it_cannot_do_here_is_refused_with_what_can(
    overrides: list[str], hardware: Hardware, message: str, make_recipe: MakeRecipe
) -> None:
    model = ModelFacts("some/model", "qwen2", "float16", 32768)
    with pytest.raises(PlanError, match=message):
        resolve_plan(make_recipe(*overrides), hardware, model)


def test_gradients_are_reduced_in_fp32_and_the_loss_is_not_rounded() -> None:
    policy = policies(Fsdp(), torch.bfloat16, on_gpu=True)["mixed_precision_policy"]
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    whole = policies(Fsdp(), torch.float32, on_gpu=True)["mixed_precision_policy"]
    assert (whole.param_dtype, whole.reduce_dtype, whole.output_dtype) == (None, None, None)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_memory_is_pinned_only_where_there_is_a_gpu(on_gpu: bool) -> None:
    assert policies(Fsdp(offload_params=True), torch.float32, on_gpu)["cpu_offload"].pin_memory is on_gpu
    assert "cpu_offload" not in policies(Fsdp(), torch.float32, on_gpu)


def test_accelerates_own_policy_is_still_worse_than_ours() -> None:
    """Where this fails, what policies() says of accelerate is no longer true."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16


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


def test_accelerate_still_leaves_cpu_ranks_out() -> None:
    """Where this fails, cpu_ranks_may_shard can go."""
    from accelerate.state import AcceleratorState

    source = inspect.getsource(AcceleratorState.__init__)
    taken = source[: source.index("self.distributed_type = DistributedType.FSDP")]
    taken = taken[taken.rindex("self.distributed_type in [") :]
    assert "DistributedType.MULTI_GPU" in taken
    assert "MULTI_CPU" not in taken


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


def test_accelerates_choice_by_size_still_takes_what_torch_refuses() -> None:
    """Where this fails, size_units can go."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10)
    choose = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, Small())
    assert choose is not None
    assert choose(Small().layers)
    assert "fsdp2_prepare_auto_wrap_policy(" in inspect.getsource(fsdp_utils.fsdp2_prepare_model)
