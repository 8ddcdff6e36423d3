import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Gpu, Hardware
from sft.plan.plan import Plan, print_plan, resolve_plan
from sft.plan.warnings import plan_warnings
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
QWEN = ModelFacts("some/model", "qwen2", "bfloat16", 32768)


def cpu(ranks: int = 1) -> Hardware:
    return Hardware(None, ranks, ranks, cpu_cores=2, cpu_memory_gib=16.0)


def gpus(ranks: int = 1, memory: float = 80.0, capability: float = 9.0, flash: bool = False) -> Hardware:
    return Hardware(Gpu("NVIDIA Test", memory, capability), ranks, min(ranks, 8), 16, 128.0, flash)


def with_batch(recipe: Recipe, batch: int | None, micro: int | str = "auto", tokens: int | None = None) -> Recipe:
    values = {"global_batch_size": batch, "micro_batch_size": micro, "global_batch_tokens": tokens}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=values)})


def arithmetic(plan: Plan) -> tuple[int, int]:
    return plan.micro_batch_size.value, plan.gradient_accumulation_steps.value


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_parts_of_a_batch_give_it_exactly_or_the_message_names_values_that_do(make_recipe: MakeRecipe) -> None:
    recipe, refused, planned = make_recipe(), 0, 0
    for ranks, batch, micro in product(range(1, 17), range(1, 121, 3), ["auto", 1, 2, 3]):
        hardware = gpus(ranks)
        try:
            parts = arithmetic(resolve_plan(with_batch(recipe, batch, micro), hardware, QWEN))
        except PlanError as error:
            message, refused = str(error), refused + 1
            if (match := re.search(r"Set train\.micro_batch_size to (.*)\.$", message)) is not None:
                for better in numbers(match[1]):
                    one, accumulation = arithmetic(resolve_plan(with_batch(recipe, batch, better), hardware, QWEN))
                    assert one * accumulation * ranks == batch
                continue
            match = re.search(
                r"Set train\.global_batch_size to (.*), or use a number of GPUs that divides it: (.*)\.$", message
            )
            assert match, message
            if micro == "auto":
                for better in numbers(match[1]):
                    one, accumulation = arithmetic(resolve_plan(with_batch(recipe, better), hardware, QWEN))
                    assert one * accumulation * ranks == better
                for fewer in numbers(match[2]):
                    one, accumulation = arithmetic(resolve_plan(with_batch(recipe, batch), gpus(fewer), QWEN))
                    assert one * accumulation * fewer == batch
            continue
        planned += 1
        assert parts[0] * parts[1] * ranks == batch
        assert micro in ("auto", parts[0])
    assert refused > 100
    assert planned > 100


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_step_and_the_number_of_steps_are_the_same_on_any_number_of_gpus(ranks: int, make_recipe: MakeRecipe) -> None:
    data = DataFacts(documents=1000, tokens=64_000, trained_tokens=20_000)
    plan = resolve_plan(make_recipe("train.global_batch_size=64"), gpus(ranks), QWEN, data)
    alone = resolve_plan(make_recipe("train.global_batch_size=64"), gpus(1), QWEN, data)
    for name in ("global_batch_size", "documents_per_step", "trained_tokens_per_step", "steps_per_epoch", "max_steps"):
        assert getattr(plan, name) == getattr(alone, name)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("tokens", [1, 100, 129, 1000, 4100])
def test_a_batch_in_tokens_that_does_not_divide_names_ones_that_do(
    tokens: int, ranks: int, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(PlanError, match=f"train.global_batch_tokens={tokens}") as error:
        resolve_plan(with_batch(make_recipe(), None, tokens=tokens), gpus(ranks), QWEN)
    offered = numbers(str(error.value).rpartition(":")[2])
    assert offered
    for better in offered:
        plan = resolve_plan(with_batch(make_recipe(), None, tokens=better), gpus(ranks), QWEN)
        assert plan.global_batch_size.value * 128 == better


VOLTA, AMPERE = 7.0, 8.0


@pytest.mark.parametrize(
    ("wanted", "hardware", "stored", "precision"),
    [
        ("auto", cpu(), "bfloat16", "fp32"),
        ("auto", cpu(), None, "fp32"),
        ("auto", gpus(capability=AMPERE), "bfloat16", "bf16"),
        ("auto", gpus(capability=AMPERE), "float16", "bf16"),
        ("auto", gpus(capability=AMPERE), None, "bf16"),
        ("auto", gpus(capability=VOLTA), "bfloat16", "fp32"),
        ("auto", gpus(capability=VOLTA), "float16", "fp32"),
        ("auto", gpus(capability=7.5), None, "fp32"),
        ("bf16", cpu(), "bfloat16", "bf16"),
        ("bf16", gpus(capability=AMPERE), "float32", "bf16"),
        ("fp32", gpus(capability=AMPERE), "bfloat16", "fp32"),
        ("fp16", gpus(capability=VOLTA), "float16", "fp16"),
        ("fp16", gpus(capability=VOLTA), "float32", "fp16"),
    ],
)
def test_precision(wanted: str, hardware: Hardware, stored: str, precision: str, make_recipe: MakeRecipe) -> None:
    model = ModelFacts("some/model", dtype=stored)
    plan = resolve_plan(make_recipe(f"train.precision={wanted}"), hardware, model)
    assert plan.precision.value == precision
    assert plan.precision.reason.startswith("auto: " if wanted == "auto" else "the recipe")


@pytest.mark.parametrize(
    ("wanted", "hardware", "stored", "remedy"),
    [
        ("fp16", cpu(), "float32", "Set train.precision=fp32 or auto"),
        ("fp16", gpus(capability=AMPERE), "bfloat16", "Set train.precision=bf16"),
        ("fp16", gpus(capability=VOLTA), "bfloat16", "Set train.precision=fp32"),
        ("bf16", gpus(capability=VOLTA), "bfloat16", "Set train.precision=fp32"),
    ],
)
def test_a_precision_that_cannot_be_had_names_one_that_can(
    wanted: str, hardware: Hardware, stored: str, remedy: str, make_recipe: MakeRecipe
) -> None:
    model = ModelFacts("some/model", dtype=stored)
    with pytest.raises(PlanError, match=f"train.precision={wanted}.*{remedy}"):
        resolve_plan(make_recipe(f"train.precision={wanted}"), hardware, model)
    better = remedy.split()[1].partition("=")[2]
    assert resolve_plan(make_recipe(f"train.precision={better}"), hardware, model).precision.value == better


def test_checkpointing_that_cannot_be_had_here_is_refused(make_recipe: MakeRecipe) -> None:
    selective = "train.gradient_checkpointing=selective"
    with pytest.raises(
        PlanError, match=r"selective does not work with model.lora with ZeRO-3: its checkpointing is reent"
    ):
        recipe = make_recipe(selective, "model.lora={}", "train.deepspeed=zero3")
        resolve_plan(recipe, gpus(), QWEN, deepspeed=load_deepspeed("zero3"))
    for one in ("model.lora={}", "train.deepspeed=zero3"):
        deepspeed = load_deepspeed("zero3") if "zero3" in one else None
        resolve_plan(make_recipe(selective, one), gpus(), QWEN, deepspeed=deepspeed)
    with pytest.raises(PlanError, match=r"selective does not work with model.attn_implementation=eager"):
        resolve_plan(make_recipe(selective, "model.attn_implementation=eager"), gpus(), QWEN)
    with pytest.raises(PlanError, match=r"there is no GPU here. Set it to true or auto"):
        resolve_plan(make_recipe("train.gradient_checkpointing=offload"), cpu(), QWEN)


def test_expectations_are_arithmetic(make_recipe: MakeRecipe) -> None:
    data = DataFacts(documents=100, tokens=6400, trained_tokens=3200)  # 50 packs of 128
    plan = resolve_plan(make_recipe("train.num_train_epochs=1.5"), cpu(), QWEN, data)
    assert plan.documents_per_step.value == 100 * 8 / 50
    assert plan.trained_tokens_per_step.value == 3200 * 8 / 50
    assert plan.steps_per_epoch.value == 7  # 50 / 8, rounded up
    assert plan.max_steps.value == 11  # 1.5 x 7, rounded up
    padded = resolve_plan(make_recipe("data.packing=false"), cpu(), QWEN, data)
    assert (padded.documents_per_step.value, padded.steps_per_epoch.value) == (8, 13)
    counted = DataFacts(documents=100, tokens=6400, trained_tokens=3200, sequences=64, exact=True)
    plan = resolve_plan(make_recipe("train.max_steps=3"), cpu(), QWEN, counted)
    assert (plan.documents_per_step.value, plan.steps_per_epoch.value, plan.max_steps.value) == (12.5, 8, 3)
    assert "estimated" not in plan.documents_per_step.reason


def test_what_is_not_known_yet_is_not_made_up(make_recipe: MakeRecipe) -> None:
    plan = resolve_plan(make_recipe(), cpu(), QWEN)
    assert (plan.documents_per_step.value, plan.trained_tokens_per_step.value, plan.max_steps.value) == (None,) * 3
    assert resolve_plan(make_recipe("train.max_steps=3"), cpu(), QWEN).max_steps.value == 3


def test_a_document_is_no_longer_than_the_model_can_read(make_recipe: MakeRecipe) -> None:
    model = ModelFacts("some/model", max_position_embeddings=1024)
    resolve_plan(make_recipe("data.max_length=1024"), cpu(), model)
    with pytest.raises(
        PlanError, match=r"data.max_length=1025 is more than the model's 1024 positions. Set it to at most 1024"
    ):
        resolve_plan(make_recipe("data.max_length=1025"), cpu(), model)


def test_the_table_shows_every_decision(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    plan = resolve_plan(make_recipe("train.global_batch_size=1", "train.max_steps=1"), cpu(), QWEN)
    print_plan(plan, "a title with [brackets]", ["and a note"])
    shown = capsys.readouterr().out
    words = [line.split() for line in shown.splitlines() if line.startswith("  ")]
    rows = {line[0]: line[1] for line in words if len(line) > 1}
    for decision in plan.decisions():
        assert decision["name"] in rows
    # A count of one is a number, and a switch a word.
    assert (rows["global_batch_size"], rows["max_steps"], rows["gradient_checkpointing"]) == ("1", "1", "off")
    assert "[brackets]" in shown
    assert "and a note" in shown


def test_planning_changes_nothing_and_asks_nobody(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe("train.global_batch_size=16")
    before = recipe.model_dump_json()
    plan = resolve_plan(recipe, gpus(2), QWEN)
    for name, value in {"WORLD_SIZE": "16", "CUDA_VISIBLE_DEVICES": "0", "NPROC": "3"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_plan(recipe, gpus(2), QWEN) == plan
    assert recipe.model_dump_json() == before


@pytest.mark.parametrize(
    ("overrides", "sequences", "parameters", "told"),
    [
        ("train.global_batch_size=80", 960, None, "12 optimizer steps"),
        ("train.global_batch_size=80 train.max_steps=12", 960, None, None),  # somebody has decided so
        ("train.global_batch_size=48", 960, None, None),
        ("train.global_batch_size=64", 60, None, "larger than the data"),
        ("train.warmup_steps=120", 960, None, "train.warmup_steps=120"),
        ("train.warmup_steps=119", 960, None, None),
        ("model.lora={}", 960, None, "train.learning_rate=1e-05"),
        ("model.lora={} train.learning_rate=1e-4", 960, 3e9, None),
        ("train.learning_rate=2e-4", 960, 3e9, "train.learning_rate=0.0002"),
        ("train.learning_rate=2e-3", 960, 1e7, None),  # a tiny model takes more
        ("train.learning_rate=2e-2", 960, 1e7, "train.learning_rate=0.02"),
        ("train.learning_rate=1e-12", 960, 3e9, "train.learning_rate=1e-12"),
        ("train.learning_rate=5e-7 train.weight_decay=1.6", 960, 3e9, None),
        ("train.weight_decay=10", 960, None, "train.weight_decay=10"),
        ("train.max_grad_norm=1e-9", 960, None, "train.max_grad_norm=1e-09"),
        ("train.max_grad_norm=0", 960, None, None),  # off
        ("train.adam_beta2=0.0", 960, None, "train.adam_beta2=0"),
        ("train.adam_beta1=0.999 train.adam_beta2=0.9", 960, None, "train.adam_beta1=0.999"),
        ("train.adam_beta1=0.95 train.adam_beta2=0.95", 960, None, None),
        ("model.lora={r: 1, lora_alpha: 32} train.learning_rate=2e-4", 960, None, None),
        ("model.lora={r: 1, lora_alpha: 16384} train.learning_rate=2e-4", 960, None, "model.lora.lora_alpha=16384"),
        ("train.trainer_args={label_smoothing_factor: 1.0}", 960, None, "label_smoothing_factor=1.0"),
        ("train.trainer_args={neftune_noise_alpha: 500}", 960, None, "neftune_noise_alpha=500"),
        ("train.trainer_args={neftune_noise_alpha: 15, label_smoothing_factor: 0.1}", 960, None, None),
        ("eval={every_steps: 121, tasks: [a]}", 960, None, "eval.every_steps=121"),
        ("eval={every_steps: 120, tasks: [a]}", 960, None, None),
    ],
)
def test_a_plan_warns_of_what_would_surprise_its_author(
    overrides: str, sequences: int, parameters: float | None, told: str | None, make_recipe: MakeRecipe
) -> None:
    model, data = replace(QWEN, parameters=parameters), DataFacts(2000, 100_000, 50_000, sequences, exact=True)
    recipe = make_recipe(*re.split(r" (?=train\.|model\.)", overrides))
    warnings = plan_warnings(recipe, resolve_plan(recipe, gpus(), model, data), gpus(), model, data)
    assert [told in warning for warning in warnings] == ([True] if told else []), warnings


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("model.lora={r: 897}", "model.lora.r=897"),
        ("train.learning_rate=1e-3 train.weight_decay=1000", "train.weight_decay=1000"),
    ],
)
def test_a_number_that_can_only_be_a_mistake_is_refused(overrides: str, told: str, make_recipe: MakeRecipe) -> None:
    resolve_plan(make_recipe("model.lora={r: 896}"), gpus(), replace(QWEN, hidden_size=896))
    with pytest.raises(PlanError, match=re.escape(told)):
        resolve_plan(make_recipe(*re.split(r" (?=train\.)", overrides)), gpus(), replace(QWEN, hidden_size=896))


@pytest.mark.parametrize(("parameters", "count"), [(1e9, 1), (1e8, 0), (None, 0)])
def test_a_large_model_on_a_cpu_is_warned_of(parameters: float | None, count: int, make_recipe: MakeRecipe) -> None:
    model, recipe = replace(QWEN, parameters=parameters), make_recipe()
    assert len(plan_warnings(recipe, resolve_plan(recipe, cpu(), model), cpu(), model)) == count
