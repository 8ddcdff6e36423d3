from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sft.model.live import is_untrained, relative_change, sample_trained
from sft.run.training_warnings import eval_loss_course, first_loss, loss_course, weights_moved


def course(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("loss", "untrained", "warned"),
    [
        (17.72, False, True),  # stories260k on English text whose token ids are permuted
        (3.85, False, False),  # its own tokenizer
        (6.94, True, False),  # the demo's model, made from a config
        (None, False, False),
    ],
)
def test_a_first_loss_above_guessing_is_named_unless_the_model_is_new(
    loss: float | None, untrained: bool, warned: bool
) -> None:
    assert (first_loss(loss, 512, untrained) is not None) == warned


def test_a_model_is_new_until_a_norm_has_changed() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    assert is_untrained(model)
    with torch.no_grad():
        model.model.norm.weight[3] += 0.01
    assert not is_untrained(model)


@pytest.mark.parametrize(("step", "warned"), [(1e-5, False), (1e-13, True), (0.0, True)])
def test_a_training_that_moves_no_weight_is_named(step: float, warned: bool) -> None:
    model = torch.nn.Linear(2000, 3)
    before = sample_trained(model)
    with torch.no_grad():
        model.weight += step
    change = relative_change(before, sample_trained(model))
    assert change is not None
    assert (weights_moved(change) is not None) == warned
    assert relative_change(before, [torch.zeros(0) for _ in before]) is None  # swapped out


FALLING = [3.0 - 0.1 * number + 0.05 * (-1) ** number for number in range(16)]


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (FALLING, None),
        (list(reversed(FALLING)), "above its start"),
        ([2.0, 2.1, 1.9, 2.05, 1.95] * 4, "did not fall"),  # noise about one value
        ([2.0, 3.0], "above its start"),
        ([2.0, 2.1], None),  # two batches differ by so much
        ([None, None, 2.0, 9.0], "above its start"),
        ([], None),
    ],
)
def test_a_loss_that_did_not_fall_is_named(losses: list[float | None], says: str | None) -> None:
    found = loss_course(course(*losses))
    assert found is None if says is None else found is not None and says in found


@pytest.mark.parametrize(
    ("before", "losses", "warned"),
    [
        (2.0, [1.0, 0.9], False),
        (2.0, [1.0, 1.2], True),
        (None, [1.0, 2.0], True),
        (2.0, [], False),
    ],
)
def test_an_eval_loss_that_rises_is_named(before: float | None, losses: list[float], warned: bool) -> None:
    assert (eval_loss_course(before, losses) is not None) == warned
