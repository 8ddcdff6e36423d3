"""The weights of the live model one by one, whole, whatever engine shares them out: read from the engine, not by what saves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft.parallel.process_group import is_first_rank

# Norm of the difference over the update's that is none where adapters are merged: the sum is made in another order, maybe on another
# device. In bf16 one element in hundreds of a small update is then rounded the other way, which makes up to 0.08 of its norm. An adapter
# that was not merged makes 1.
_OF_AN_UPDATE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
_OF_FP32 = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Whole:
    """A tensor as a saved model should have it."""

    name: str
    """In the model without engine and adapters."""

    value: torch.Tensor
    """On the CPU; empty on all ranks but the first."""

    allowed: float = 0.0
    """Norm of the difference to what was saved: 0, but for merged adapters."""


def whole_tensors(model: Any, dtype: torch.dtype | None) -> Iterator[Whole]:
    """Each parameter and persistent buffer once. Every rank takes part, to the end.

    Args:
        model: Without the engine's wrapper and without peft's; its layers may hold adapters. Under FSDP2 each rank has its shares only.
        dtype: What the weights are saved in; None: what each is in.
    """
    seen: set[int] = set()
    for path, module in _modules(model, ""):
        if hasattr(module, "token_adapter"):
            yield from _with_new_tokens(path, module.token_adapter, dtype, seen)
        elif hasattr(module, "get_delta_weight"):
            yield from _merged(path, module, dtype)
            yield from _own(path, module.get_base_layer(), dtype, seen, but="weight")
        else:
            yield from _own(path, module, dtype, seen)


def _modules(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """In the order of named_modules; what adapters are made of is none of the model's."""
    yield path, module
    if hasattr(module, "token_adapter") or hasattr(module, "get_delta_weight"):
        return
    for name, child in module.named_children():
        yield from _modules(child, f"{path}{name}.")


def gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
    """Under ZeRO-3 the parameters whole, for as long as it lasts."""
    shared = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not shared:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(shared)
    return context


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' parts, in the first one's memory."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.cpu() if is_first_rank() else torch.empty(0)


def _own(path: str, module: Any, dtype: torch.dtype | None, seen: set[int], but: str = "") -> Iterator[Whole]:
    kept = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
    # Not `|`: ZeRO-3's dictionary of parameters would give an empty one.
    for name, tensor in [*module._parameters.items(), *kept.items()]:
        if tensor is None or id(tensor) in seen or name == but:
            continue
        seen.add(id(tensor))
        with gathered([tensor]), torch.no_grad():
            value = _whole(_as_saved(tensor.detach(), dtype))
        yield Whole(f"{path}{name}", value)


def _as_saved(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _merged(path: str, layer: Any, dtype: torch.dtype | None) -> Iterator[Whole]:
    """A layer's weight with its adapter added, in fp32 and rounded once."""
    weight = layer.get_base_layer().weight
    with gathered([weight, *_adapter_parameters(layer)]), torch.no_grad():
        base = _whole(_as_saved(weight.detach(), dtype))
        delta = sum(_whole(layer.get_delta_weight(name)).float() for name in layer.active_adapters)
    value = (base.float() + delta).to(base.dtype)
    update = float((value.float() - base.float()).norm())
    yield Whole(f"{path}weight", value, _OF_AN_UPDATE[base.dtype] * update + _OF_FP32 * float(base.float().norm()))


def _adapter_parameters(layer: Any) -> list[Any]:
    base = {id(parameter) for parameter in layer.get_base_layer().parameters()}
    return [parameter for parameter in layer.parameters() if id(parameter) not in base]


def _with_new_tokens(path: str, adapter: Any, dtype: torch.dtype | None, seen: set[int]) -> Iterator[Whole]:
    """An embedding some of whose rows are trained beside it."""
    weight = adapter.base_layer.weight
    if id(weight) in seen:
        return
    seen.add(id(weight))
    with torch.no_grad():
        value = _whole(_as_saved(adapter.get_merged_weights(adapter.active_adapters), dtype))
    yield Whole(f"{path}weight", value)
