"""Which ranks share layers or sequences, and each reason why they cannot, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.formats import IGNORED
from sft.errors import PlanError
from sft.hub.model_facts import Architecture, ModelFacts
from sft.parallel.sequence import PartOfSequences
from sft.parallel.tensor import full, shard_of
from sft.plan.architecture import read_architecture
from sft.plan.hardware import Hardware
from sft.plan.parallelism import data_parallel_ranks, resolve_sequence_parallel, resolve_tensor_parallel
from sft.plan.zero import DeepSpeedFile
from sft.recipe.schema import Recipe

LLAMA = ModelFacts(
    "model",
    "llama",
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=11008,
    architecture=read_architecture({"model_type": "llama", "num_attention_heads": 32, "hidden_size": 4096}),
)
Make = Callable[..., Recipe]


def cpu(ranks: int, per_node: int | None = None) -> Hardware:
    return Hardware(None, ranks, per_node or ranks, 2, 16.0)


def zero(stage: int) -> DeepSpeedFile:
    return DeepSpeedFile(Path(f"zero{stage}.json"), {"zero_optimization": {"stage": stage}})


def tensor(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts = LLAMA,
    deepspeed: DeepSpeedFile | None = None,
    kernels: str = "none",
    precision: str = "fp32",
) -> int:
    return resolve_tensor_parallel(recipe, hardware, model, deepspeed, kernels, precision).value


def sequence(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts = LLAMA,
    stage: int | None = 2,
    attention: str = "sdpa",
    micro: int = 1,
) -> int:
    deepspeed = None if stage is None else zero(stage)
    return resolve_sequence_parallel(recipe, hardware, model, deepspeed, attention, micro).value


@pytest.mark.parametrize(("tensor", "sequence", "ranks", "groups"), [(1, 1, 4, 4), (2, 1, 2, 1), (1, 2, 4, 2)])
def test_ranks_that_share_a_batch_count_once(
    tensor: int, sequence: int, ranks: int, groups: int, make_recipe: Make
) -> None:
    recipe = make_recipe(*sizes(tensor, sequence))
    assert data_parallel_ranks(recipe, cpu(ranks)) == groups


def sizes(tensor: int = 1, sequence: int = 1) -> list[str]:
    engine = ["train.deepspeed=zero2"] if sequence > 1 else []
    return [f"train.tensor_parallel_size={tensor}", f"train.sequence_parallel_size={sequence}", *engine]


def test_an_incomplete_group_is_refused(make_recipe: Make) -> None:
    with pytest.raises(PlanError, match="groups of 2 ranks, and 3 is no multiple"):
        data_parallel_ranks(make_recipe(*sizes(2)), cpu(3))


def test_a_size_of_one_is_always_allowed(make_recipe: Make) -> None:
    recipe = make_recipe("model.compile=true", "data.packing=true")
    assert tensor(recipe, cpu(3), replace(LLAMA, architecture=None), zero(3), "liger", "fp16") == 1
    assert sequence(recipe, cpu(3), replace(LLAMA, architecture=None), None, "eager", 4) == 1


def test_layers_are_shared_by_all_ranks(make_recipe: Make) -> None:
    assert tensor(make_recipe(*sizes(4)), cpu(4)) == 4


@pytest.mark.parametrize(
    ("size", "ranks", "changes", "message"),
    [
        (2, 4, {}, "there are 4 ranks.*Start 2 ranks, set the size to 4"),
        (2, 2, {"deepspeed": zero(2)}, "zero2.json is DeepSpeed's.*Set train.deepspeed and train.parallel to null"),
        (2, 2, {"kernels": "liger"}, "model.kernels=liger .set model.kernels=none"),
        (2, 2, {"precision": "fp16"}, "train.precision=fp16 .set train.precision=bf16 or fp32"),
        (16, 16, {}, "does not divide the model's 8 key and value heads. Set it to 2, 4, 8"),
        (3, 3, {}, "32 attention heads and 8 key and value heads and 11008 feed-forward units. Set it to 2, 4, 8"),
        (2, 2, {"model": replace(LLAMA, architecture=Architecture())}, "transformers has no plan"),
        (2, 2, {"model": replace(LLAMA, architecture=Architecture(tensor_plan=frozenset({"moe_tp_experts"})))}, "moe_tp"),
        (2, 2, {"model": replace(LLAMA, architecture=None)}, "transformers has no plan"),
    ],
)  # fmt: skip
def test_what_tensor_parallelism_cannot_do_is_refused(
    size: int, ranks: int, changes: dict[str, Any], message: str, make_recipe: Make
) -> None:
    with pytest.raises(PlanError, match=rf"train.tensor_parallel_size={size}.*{message}"):
        tensor(make_recipe(*sizes(size)), cpu(ranks), **changes)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.lora={}", "model.lora"),
        ("model.compile=true", "model.compile"),
        ("model.new_tokens=[<x>]", "new_tokens"),
    ],
)
def test_what_is_untested_over_divided_layers_is_refused(override: str, name: str, make_recipe: Make) -> None:
    with pytest.raises(PlanError, match=f"is untested, with .*{name}"):
        tensor(make_recipe(*sizes(2), override), cpu(2))


def test_a_group_over_machines_is_refused(make_recipe: Make) -> None:
    with pytest.raises(PlanError, match="a machine has 2 ranks"):
        tensor(make_recipe(*sizes(4)), cpu(4, per_node=2))
    with pytest.raises(PlanError, match="a machine has 2 ranks"):
        sequence(make_recipe(*sizes(1, 4)), cpu(4, per_node=2), attention="varlen")
    assert sequence(make_recipe(*sizes(1, 2)), cpu(4, per_node=2), attention="varlen") == 2


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (2, {"stage": None}, "train.deepspeed is not set. Set train.deepspeed=zero2 or zero3"),
        (2, {"stage": 1}, "zero1.json is ZeRO-1"),
        (3, {}, "does not divide the model's 32 attention heads. Set it to 2, 4, 8, 16, 32"),
        (2, {"model": replace(LLAMA, num_key_value_heads=3)}, "3 key and value heads"),
        (2, {"attention": "eager"}, "Set model.attn_implementation=sdpa"),
        (2, {"model": replace(LLAMA, architecture=Architecture(recurrent=True))}, "carry a state"),
        (2, {"model": replace(LLAMA, sliding_window=16)}, "sees 16 tokens back.*data.max_length to at most 16"),
    ],
)
def test_what_sequence_parallelism_cannot_do_is_refused(
    size: int, changes: dict[str, Any], message: str, make_recipe: Make
) -> None:
    recipe = make_recipe(*sizes(1, size), "data.packing=false")
    with pytest.raises(PlanError, match=rf"train.sequence_parallel_size={size}.*{message}"):
        sequence(recipe, cpu(6), **changes)


def test_gradients_that_are_not_scattered_are_refused(make_recipe: Make) -> None:
    whole_gradients = DeepSpeedFile(Path("mine.json"), {"zero_optimization": {"stage": 3, "reduce_scatter": False}})
    with pytest.raises(PlanError, match=r"remove reduce_scatter from mine\.json"):
        resolve_sequence_parallel(make_recipe(*sizes(1, 2)), cpu(2), LLAMA, whole_gradients, "varlen", 1)


def test_packs_are_shared_one_at_a_time_and_never_through_a_mask(make_recipe: Make) -> None:
    recipe = make_recipe(*sizes(1, 2), "data.packing=true")
    assert sequence(recipe, cpu(2), attention="varlen") == 2
    assert sequence(recipe, cpu(2), replace(LLAMA, sliding_window=16), attention="varlen") == 2
    with pytest.raises(PlanError, match=r"micro_batch_size is 2\. Set it to 1"):
        sequence(recipe, cpu(2), attention="varlen", micro=2)
    with pytest.raises(PlanError, match="sdpa keeps packed documents apart by a mask"):
        sequence(recipe, cpu(2), attention="sdpa")


def test_few_key_heads_may_be_repeated_over_ranks(make_recipe: Make) -> None:
    assert sequence(make_recipe(*sizes(1, 4)), cpu(4), replace(LLAMA, num_key_value_heads=2), attention="varlen") == 4


@pytest.mark.parametrize(
    ("kind", "divided"),
    [
        ("llama", {"colwise", "rowwise"}),
        ("qwen2", {"colwise", "rowwise"}),
        ("qwen3", {"colwise", "rowwise", "replicated_with_grad_allreduce"}),
        ("phi3", {"colwise_gather_output", "rowwise_split_input"}),
        ("gpt2", set()),
    ],
)
def test_the_plan_of_a_model_is_read_without_importing_it(kind: str, divided: set[str]) -> None:
    known = read_architecture({"model_type": kind})
    assert known is not None and known.tensor_plan == divided


ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [IGNORED, 2, 3, 4, 5]},
    {"input_ids": [6, 7, 8], "labels": [IGNORED, IGNORED, 8]},
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_parts_of_a_batch_are_the_batch(packed: bool, parts: int) -> None:
    collator = DataCollatorForLanguageModeling(0, packed, return_position_ids=True, pad_to_multiple_of=parts)
    batch, shared = collator(ROWS), [PartOfSequences(collator, part, parts)(ROWS) for part in range(parts)]
    for name in ("input_ids", "position_ids"):
        torch.testing.assert_close(torch.cat([part[name] for part in shared], dim=1), batch[name])
    following = torch.cat([part["shift_labels"] for part in shared], dim=1)
    torch.testing.assert_close(following[:, :-1], batch["labels"][:, 1:])
    assert (following[:, -1] == IGNORED).all()
    assert not any("attention_mask" in part for part in shared)
    if packed:
        for part in shared:
            torch.testing.assert_close(part["cu_seq_lens_q"], batch["cu_seq_lens_q"])


def test_what_is_not_divided_stays_as_it_is() -> None:
    steps, weight = torch.tensor(3.0), torch.nn.Parameter(torch.ones(2, 2))
    assert shard_of(steps, weight) is steps
    torch.testing.assert_close(full(weight), weight)
    assert full("name") == "name"
