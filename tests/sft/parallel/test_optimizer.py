from typing import Any

import pytest
import torch
from torch.nn import Parameter

from sft.parallel.optimizer import MasterAdamW

STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SIZES = [1, 7, 1001, (33, 31), 4099]
"""Odd ones: a kernel that works on whole vectors has a tail to forget."""


def gradients(step: int, micro: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + micro)
    return [torch.randn(size, generator=generator).bfloat16() for size in SIZES]


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]


def groups(of: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:2], "weight_decay": 0.1}, {"params": of[2:], "weight_decay": 0.0}]


def ours(of: list[Parameter], accumulate: bool = False, **other: Any) -> MasterAdamW:
    return MasterAdamW(groups(of), accumulate_in_fp32=accumulate, **(STEP | other))


def backward(of: list[Parameter], *at: int) -> None:
    loss = sum((weight * gradient).sum() for weight, gradient in zip(of, gradients(*at), strict=True))
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def train(of: list[Parameter], optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        backward(of, step)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("chunk", [1, 1002, 2**27])
def test_a_step_is_adamws_on_fp32_weights_bit_for_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.parallel.optimizer._CHUNK", chunk)
    trained = weights()
    exact = [Parameter(weight.detach().float()) for weight in trained]
    optimizer, reference = ours(trained), torch.optim.AdamW(groups(exact), fused=True, **STEP)
    for step in range(5):
        backward(trained, step)
        for weight, gradient in zip(exact, gradients(step), strict=True):
            weight.grad = gradient.float()
        norm = optimizer.clip_grad_norm(1.0)
        assert norm == torch.nn.utils.clip_grad_norm_(exact, 1.0)
        assert norm > 10
        assert all(torch.equal(one.grad, two) for one, two in zip(trained, gradients(step), strict=True)), "not scaled"
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for master, weight, rounded in zip(optimizer.masters, exact, trained, strict=True):
            assert torch.equal(master, weight)
            assert torch.equal(rounded, weight.bfloat16())


def test_fp32_weights_pass_through_and_are_saved_once() -> None:
    mixed = [*weights()[:2], *(Parameter(weight.detach().float()) for weight in weights()[2:])]
    exact = [Parameter(weight.detach().float()) for weight in mixed]
    optimizer, reference = ours(mixed), torch.optim.AdamW(groups(exact), fused=True, **STEP)
    backward(mixed, 0)
    for weight, gradient in zip(exact, gradients(0), strict=True):
        weight.grad = gradient.float()
    optimizer.step()
    reference.step()
    assert all(torch.equal(one.float(), other.to(one.dtype).float()) for one, other in zip(mixed, exact, strict=True))
    assert [master.data_ptr() for master in optimizer.masters[2:]] == [weight.data_ptr() for weight in mixed[2:]]
    assert len(optimizer.state_dict()["masters"]) == 2


def test_gradients_of_many_micro_batches_are_added_up_in_fp32() -> None:
    exact = [sum(parts) for parts in zip(*([g.double() for g in gradients(0, m)] for m in range(30)), strict=True)]
    errors = {}
    for accumulate in (True, False):
        trained = weights()
        optimizer = ours(trained, accumulate)
        for micro in range(30):
            backward(trained, 0, micro)
        errors[accumulate] = max(
            float((weight.grad.double() - total).abs().max())
            for weight, total in zip(trained, exact, strict=True)
            if weight.grad is not None
        )
        norm = float(sum((total**2).sum() for total in exact)) ** 0.5
        assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(norm, rel=1e-6 if accumulate else 1e-2)
    assert errors[True] < 1e-5
    assert errors[False] > 1e-2
