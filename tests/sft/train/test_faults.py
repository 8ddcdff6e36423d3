"""Losses that are not finite, and the samples behind them."""

import math

import pytest
import torch

from sft.train.faults import finite


@pytest.mark.parametrize("value", [2.3456789, -1e-30, 0.0, 3e38])
def test_a_finite_loss_and_its_gradient_stay_bitwise_the_same(value: float) -> None:
    weight = torch.tensor(value, requires_grad=True)
    loss = finite(weight * 1)
    loss.backward()
    assert weight.grad is not None
    assert (loss.item(), weight.grad.item()) == (weight.item(), 1.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_has_a_gradient_of_nan(value: float) -> None:
    """The gradient of an infinite loss may be finite: here it would be 1."""
    weight = torch.tensor(1.0, requires_grad=True)
    finite(weight + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan()
