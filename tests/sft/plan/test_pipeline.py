"""How layers are split into stages, how long stages wait, and what is refused."""

from dataclasses import replace

import pytest

from sft.errors import PlanError, RecipeError
from sft.hub.model_facts import ModelFacts
from sft.plan.pipeline import describe, layers_of_stages, split_layers
from sft.plan.resolve import planned, resolve_plan
from tests.sft.plan.machines import MODELS, MakeRecipe, cpu, gpus

LLAMA = ModelFacts("some/model", "llama", "bfloat16", 2048, 1_000_000, 640, 64, 6)
STAGES = "train.pipeline_parallel_size="


@pytest.mark.parametrize("layers", range(2, 12))
@pytest.mark.parametrize("head", [0.0, 0.4, 3.0])
def test_no_other_split_has_a_faster_slowest_stage(layers: int, head: float) -> None:
    def slowest(counts: list[int]) -> float:
        return max([*counts[:-1], counts[-1] + head])

    for stages in range(2, min(layers, 4) + 1):
        split = split_layers(layers, stages, head)
        assert [number for stage in split for number in stage] == list(range(layers))
        counts = [len(stage) for stage in split]
        assert min(counts) >= 1

        def others(left: int, parts: int) -> list[list[int]]:
            if parts == 1:
                return [[left]]
            return [[one, *rest] for one in range(1, left - parts + 2) for rest in others(left - one, parts - 1)]

        assert slowest(counts) == min(map(slowest, others(layers, stages)))


def test_the_last_stage_of_a_large_vocabulary_has_fewer_layers(make_recipe: MakeRecipe) -> None:
    split = layers_of_stages(make_recipe(STAGES + "4"), MODELS["Qwen/Qwen2.5-3B"])
    assert describe(split) == "0-9 | 10-19 | 20-29 | 30-35"


def test_auto_takes_four_micro_batches_a_stage_where_the_batch_has_them(make_recipe: MakeRecipe) -> None:
    plan = resolve_plan(make_recipe(STAGES + "2", "train.global_batch_size=32", "data.packing=false"), cpu(4), LLAMA)
    sizes = plan.data_parallel_ranks.value, plan.micro_batch_size.value, plan.gradient_accumulation_steps.value
    assert sizes == (2, 2, 8)
    assert plan.engine.value == "pipeline parallel"
    assert (
        "layers 0-2 | 3-5; with 8 micro-batches a step 11.1% idle (1 / (8 + 1))" in plan.pipeline_parallel_size.reason
    )
    small = resolve_plan(make_recipe(STAGES + "4", "train.global_batch_size=4"), gpus(4), LLAMA)
    assert (small.micro_batch_size.value, small.gradient_accumulation_steps.value) == (1, 4)


def test_the_plan_counts_the_memory_of_each_stage(make_recipe: MakeRecipe) -> None:
    """A stage holds its share of the states; the first keeps activations of most micro-batches."""
    model = MODELS["Qwen/Qwen2.5-7B"]
    words = [
        STAGES + "4",
        "train.global_batch_size=64",
        "train.micro_batch_size=1",
        "train.gradient_checkpointing=false",
    ]
    estimate = resolve_plan(make_recipe(*words), gpus(4), model).memory_estimate
    alone = resolve_plan(make_recipe(*words[1:]), gpus(4), model).memory_estimate
    assert estimate is not None and alone is not None
    assert len(estimate.by_stage) == 4
    assert estimate.gpu_bytes == max(estimate.by_stage)
    assert 1 / 4 < estimate.gpu["optimizer"] / alone.gpu["optimizer"] < 1 / 2
    assert "; by stage " in estimate.words
    longer = resolve_plan(make_recipe(*words, "data.max_length=8192"), gpus(4), model).memory_estimate
    assert longer is not None
    assert longer.by_stage[0] > longer.by_stage[1] > longer.by_stage[2]


REFUSED = {
    STAGES + "8": "and the model has 6 layers: each stage needs one. Set it to at most 6",
    STAGES + "4 train.micro_batch_size=4": "a step has 2 micro-batch(es): stages would wait 60% of the time",
    STAGES + "2 model={name_or_path: m, lora: {modules_to_save: [lm_head]}}": "with model.lora.modules_to_save",
    STAGES + "2 model={name_or_path: m, lora: {}, new_tokens: [<a>]}": "with model.new_tokens and model.lora",
    STAGES + "2 model.trust_remote_code=true": "with model.trust_remote_code=true",
    STAGES + "2 model.compile=true": "with model.compile=true",
    STAGES + "2 train.optim=lion": "with train.optim=lion",
    STAGES + "2 train.precision=fp16": "with train.precision=fp16",
    STAGES + "2 train.label_smoothing_factor=0.1": "train.label_smoothing_factor",
    STAGES + "2 train.neftune_noise_alpha=5": "train.neftune_noise_alpha",
    STAGES + "2 train.trainer_args={loss_type: dft}": "with train.trainer_args",
    STAGES + "3": "groups of 3 ranks, and 8 is no multiple of that",
}  # fmt: skip


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_does_not_run_in_stages_is_refused_by_name(overrides: str, make_recipe: MakeRecipe) -> None:
    hardware = gpus(4) if "=4" in overrides.split()[0] else gpus(8)
    with pytest.raises(PlanError, match=r"train.pipeline_parallel_size=\d") as error:
        resolve_plan(make_recipe(*overrides.split(" ", 1)), hardware, LLAMA)
    assert REFUSED[overrides] in str(error.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (replace(LLAMA, model_type="gemma3n_text"), "models of type gemma3n_text were not tested in stages"),
        (replace(LLAMA, num_hidden_layers=None), "is known once it is downloaded"),
    ],
)
def test_a_model_that_was_not_tested_or_is_not_known_is_refused(
    model: ModelFacts, words: str, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(PlanError, match=words):
        resolve_plan(make_recipe(STAGES + "2"), cpu(2), model)


@pytest.mark.parametrize("other", ["deepspeed=zero3", "fsdp={}", "parallel=auto", "tensor_parallel_size=2"])
def test_another_engine_beside_stages_is_a_mistake_in_the_recipe(other: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=rf"pipeline_parallel_size=2 does not work with {other.partition('=')[0]}"):
        make_recipe(STAGES + "2", f"train.{other}")


def test_auto_over_several_nodes_mentions_stages_where_it_takes_zero_3(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.parallel=auto", "train.precision=bf16", "train.global_batch_size=256")
    for per_node, has in ((8, True), (32, False)):
        case = planned(recipe, gpus(32, per_node, memory=141), MODELS["meta-llama/Llama-3.1-70B"], None)
        assert ("pipeline_parallel_size" in case.plan.engine.reason) is has
