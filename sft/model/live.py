"""Looks at the live model inside a trainer, whatever engine wraps it: what it computes in, and whether its weights move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def unwrapped(trainer: Any) -> Any:
    """The model without the engine's wrapper and without PEFT's."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def computes_in(model: Any) -> torch.dtype | None:
    """The dtype that FSDP2 casts weights to; None where it casts none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            dtype: torch.dtype | None = state._mp_policy.param_dtype
            return dtype
    return None


def arithmetic(trainer: Any) -> torch.dtype:
    """The dtype that the layers compute in: FSDP2's or autocast's, else that of the weights."""
    if (sharded := computes_in(trainer.model)) is not None:
        return sharded
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    return mixed or next(unwrapped(trainer).parameters()).dtype


@contextmanager
def evaluating(trainer: Any) -> Iterator[None]:
    """Run forward passes without dropout and gradients, under the training's autocast."""
    model = trainer.model_wrapped
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            yield
    finally:
        model.train(training)


def gathered(parameters: list[Any], changed_on: int | None = None) -> AbstractContextManager[Any]:
    """Gather the parameters that ZeRO-3 shards, for as long as the context lasts; all ranks get what that one changes in them."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(sharded, modifier_rank=changed_on)
    return context


def logits_distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Norm of the difference over the norm, of logits without the part that all tokens have in common.

    Positions whose expected logits are not finite (training diverged) are left out.

    >>> logits_distance(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 4.0]]))
    0.0
    """
    if expected.shape != found.shape:
        return float("inf")
    numbers = expected.isfinite().all(-1)
    if not found[numbers].isfinite().all():
        return float("inf")
    one, other = (logits[numbers] - logits[numbers].mean(-1, keepdim=True) for logits in (expected, found))
    return float((one - other).norm() / one.norm().clamp(min=1e-12))


_SAMPLE = 1000
"""Elements of each parameter that are compared with the start."""


def _local(parameter: Any) -> Any:
    """This rank's shard of a parameter."""
    local = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3's
    return local.to_local() if hasattr(local, "to_local") else local  # FSDP2's


def sample_trained(model: Any) -> list[torch.Tensor]:
    """A few elements of each trained parameter, from this rank's shard."""
    trained = (_local(parameter).flatten() for parameter in model.parameters() if parameter.requires_grad)
    return [flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float64, copy=True) for flat in trained]


def relative_change(before: list[torch.Tensor], after: list[torch.Tensor]) -> float | None:
    """Norm of the difference over the norm; None where nothing can be compared, as with shards that were swapped out."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old.shape == new.shape and len(old)]
    if not pairs:
        return None
    old, new = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float((new - old).norm() / new.norm()) if new.any() else 0.0


def is_untrained(model: Any) -> bool:
    """Whether the weights are those of a new model: norms and biases of one value each, which training always changes."""
    for parameter in model.parameters():
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 1:
            local = _local(parameter)
            if local.numel() and bool((local != local.flatten()[0]).any()):
                return False
    return True
