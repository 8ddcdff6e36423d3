"""Losses that are not finite, and the rows behind them."""

import math

import pytest
import torch

from sft.train.batches import StepOrder
from sft.train.offending_samples import documents_in, finite


@pytest.mark.parametrize("value", [2.3456789, -1e-30, 0.0, 3e38])
def test_a_finite_loss_and_its_gradient_stay_as_they_are_to_the_last_bit(value: float) -> None:
    weight = torch.tensor(value, requires_grad=True)
    loss = finite(weight * 1)
    loss.backward()
    assert weight.grad is not None
    assert (loss.item(), weight.grad.item()) == (weight.item(), 1.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_shows_in_its_gradient(value: float) -> None:
    """The gradient of an infinite loss may be finite: here it would be 1."""
    weight = torch.tensor(1.0, requires_grad=True)
    finite(weight + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan()


def test_documents_are_found_in_packed_and_in_padded_batches() -> None:
    packed = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    padded = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": mask}
    assert documents_in(packed) == documents_in(padded) == [(1, 2, 3), (4, 5)]


@pytest.mark.parametrize("empty", [0, 1])
def test_a_step_that_is_left_out_holds_fillers_and_all_others_what_they_held(empty: int) -> None:
    """22 sequences, four a step: step 9 is the third of the second epoch."""

    def steps(order: StepOrder) -> list[list[int]]:
        rows = []
        for epoch in range(2):
            order.set_epoch(epoch)
            places = list(order)
            rows += [places[start : start + 4 + empty] for start in range(0, len(places), 4 + empty)]
        return rows

    fillers = 2 + 6 * empty
    whole = steps(StepOrder(22, fillers, 5, 4, empty))
    order = StepOrder(22, fillers, 5, 4, empty)
    order.left_out = frozenset({2, 9, 12})  # of the twelfth, two places were fillers before
    left = steps(order)
    assert [number for number, (a, b) in enumerate(zip(whole, left, strict=True), 1) if a != b] == [2, 9, 12]
    assert all(min(left[step - 1]) >= 22 for step in order.left_out)
    assert [len(step) for step in left] == [len(step) for step in whole]
