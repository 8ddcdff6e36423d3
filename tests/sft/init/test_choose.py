"""The numbers of a first recipe, from lengths, models and machines."""

import numpy as np
import pytest

from sft.hub.model_facts import ModelFacts
from sft.init.choose import choose_length, choose_steps, choose_weights
from sft.init.draft import Draft
from sft.plan.hardware import Hardware, described_hardware

CPU = Hardware(None, 1, 1, 8, 64.0)


def model(parameters: float, positions: int | None = 32768) -> ModelFacts:
    shape = {
        "linear_parameters": int(0.9 * parameters),
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
    }
    return ModelFacts("m", "qwen2", "bfloat16", positions, int(parameters), **shape)


@pytest.mark.parametrize(
    ("machine", "parameters", "lora", "rate"),
    [
        (described_hardware("8x80GB"), 7e9, False, 1e-5),
        (described_hardware("1x80GB"), 1e9, False, 1e-5),
        (described_hardware("1x24GB"), 7e9, True, 2e-4),
        (described_hardware("1x24GB+900GB"), 7e9, True, 2e-4),  # all weights would fit with offload
        (described_hardware("1x24GB"), 5e8, False, 2e-5),
        (CPU, 1e9, True, 2e-4),
        (CPU, 2.6e5, False, 1e-3),
    ],
)
def test_all_weights_are_trained_where_they_fit_and_the_rate_is_one_for_them(
    machine: Hardware, parameters: float, lora: bool, rate: float
) -> None:
    draft = Draft(["data.max_length=2048"])
    choose_weights(draft, machine, model(parameters))
    recipe = draft.recipe()
    assert (recipe.model.lora is not None, recipe.train.learning_rate) == (lora, rate)
    assert (recipe.train.parallel == "auto") == (machine.ranks > 1)


@pytest.mark.parametrize(("parameters", "quantization"), [(7e9, None), (14e9, "nf4"), (70e9, None)])
def test_the_base_is_quantized_where_adapters_fit_only_then(parameters: float, quantization: str | None) -> None:
    draft = Draft(["data.max_length=2048"])
    choose_weights(draft, described_hardware("1x24GB"), model(parameters))
    assert draft.recipe().model.lora is not None
    assert draft.recipe().model.quantization == quantization


def test_what_fits_in_no_way_on_the_gpu_goes_to_the_cpu() -> None:
    draft = Draft()
    choose_weights(draft, described_hardware("1x24GB"), model(70e9))
    assert draft.recipe().train.parallel == "auto"


@pytest.mark.parametrize(
    ("lengths", "positions", "chosen"),
    [
        ([100] * 99 + [140], 32768, (192, "drop")),  # the longest too
        ([100] * 100 + [5000], 32768, (128, "drop")),  # one row of a hundred does not decide
        ([900] * 100, 512, (512, "split")),
    ],
)
def test_the_rows_decide_the_length_within_the_positions_of_the_model(
    lengths: list[int], positions: int | None, chosen: tuple[int, str]
) -> None:
    draft = Draft()
    choose_length(draft, np.array(lengths), model(1e9, positions))
    data = draft.recipe().data
    assert (data.max_length, data.overlong) == chosen


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("rows", [2, 500, 1_000_000])
def test_any_number_of_gpus_divides_the_batch_and_there_are_enough_steps(ranks: int, rows: int) -> None:
    draft = Draft(["data.max_length=128"])
    steps = choose_steps(draft, np.full(min(rows, 1000), 100), rows, ranks)
    batch = draft.recipe().train.global_batch_size
    assert batch is not None
    assert batch % ranks == 0
    assert batch <= 64
    assert steps >= min(100, rows * 3 // ranks)


def test_few_packs_are_not_packed() -> None:
    draft = Draft(["data.max_length=1024"])
    steps = choose_steps(draft, np.full(40, 20), 40, 1)
    assert not draft.recipe().data.packing
    assert steps > 50


def test_the_steps_follow_a_batch_that_is_given() -> None:
    draft = Draft(["data.max_length=128", "train.global_batch_tokens=1280"])
    assert choose_steps(draft, np.full(100, 128), 100, 1) == 30
