"""Yields the full tensors of the live model one by one, whatever engine shards them. Reads the engine, not what the engine saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft.model.quantization import dequantized, is_quantized

# Merged adapters are summed in another order, maybe on another device: the norm of the difference may be this share of the update's norm.
# In bf16 one element in hundreds of a small update is rounded the other way, up to 8% of its norm. A missing adapter makes 100%.
_OF_AN_UPDATE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
_OF_FP32 = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class LiveTensor:
    """A tensor as the saved model should hold it."""

    names: tuple[str, ...]
    """In the model without engine and adapters; a tied weight has several."""

    value: torch.Tensor
    """On the CPU; empty on ranks that only take part."""

    allowed: float
    """Norm of the difference that rounding may make; 0 except for merged adapters."""


def live_tensors(model: Any, dtype: torch.dtype | None, keep: bool = True) -> Iterator[LiveTensor]:
    """Yield each parameter and persistent buffer once, in a dtype or its own. Every rank takes part, to the end; values are where `keep`.

    The model comes without the engine's wrapper and PEFT's; its layers may hold adapters. Under FSDP2 it must be sharded.
    """
    found: dict[int, tuple[list[str], Any, str, torch.Tensor]] = {}
    for path, module in _modules(model, ""):
        for name, tensor in _tensors_of(module):
            found.setdefault(id(tensor), ([], module, name, tensor))[0].append(path + name)
    for names, module, name, tensor in found.values():
        yield LiveTensor(tuple(names), *_value(module, name, tensor, dtype, keep))


@torch.no_grad()
def live_adapters(model: Any, names: Mapping[str, str], keep: bool = True) -> Iterator[LiveTensor]:
    """Yield each trained parameter once, as PEFT saves it without merging. Every rank takes part, to the end; values are where `keep`.

    Args:
        model: With PEFT's wrapper, and without the engine's; under FSDP2 it must be sharded.
        names: Of parameters, by those of the tensors in an adapter's file, which may hold some that are not trained.
    """
    saved: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for tensor, name in names.items():
        saved.setdefault(id(parameters.get(name)), []).append(tensor)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or id(parameter) in saved:
            with gathered([parameter]):
                yield LiveTensor(tuple(saved.get(id(parameter), [name])), _full(parameter, keep), 0.0)


def _modules(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Like named_modules, but stops at layers with adapters, whose parts are not the model's; of a layer trained whole its copy."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        module = module.modules_to_save[module.active_adapters[0]]
    yield path, module
    if hasattr(module, "token_adapter") or hasattr(module, "get_delta_weight"):
        return
    for name, child in module.named_children():
        yield from _modules(child, f"{path}{name}.")


def _tensors_of(module: Any) -> list[tuple[str, torch.Tensor]]:
    if hasattr(module, "token_adapter"):  # an embedding some of whose rows are trained beside it
        return [("weight", module.token_adapter.base_layer.weight)]
    owner = module.get_base_layer() if hasattr(module, "get_delta_weight") else module
    saved = [(name, one) for name, one in owner._buffers.items() if name not in owner._non_persistent_buffers_set]
    return [(name, one) for name, one in [*owner._parameters.items(), *saved] if one is not None]


@torch.no_grad()
def _value(
    module: Any, name: str, tensor: torch.Tensor, dtype: torch.dtype | None, keep: bool
) -> tuple[torch.Tensor, float]:
    """The full tensor where it is kept, and the difference that is allowed."""
    if hasattr(module, "token_adapter"):
        adapter = module.token_adapter
        return _full(adapter.get_merged_weights(adapter.active_adapters), keep, dtype), 0.0
    layer = module.get_base_layer() if hasattr(module, "get_base_layer") else module

    def base_weight() -> torch.Tensor:
        return _full(dequantized(layer) if name == "weight" and is_quantized(layer) else tensor, keep, dtype)

    if not hasattr(module, "get_delta_weight") or name != "weight":
        with gathered([tensor]):
            return base_weight(), 0.0
    # A layer's weight with its adapter added, in fp32 and rounded once.
    base_parameters = {id(parameter) for parameter in layer.parameters()}
    adapters = [parameter for parameter in module.parameters() if id(parameter) not in base_parameters]
    with gathered([tensor, *adapters]):
        base = base_weight()
        delta = sum(_full(module.get_delta_weight(adapter), keep).float() for adapter in module.active_adapters)
        merged = base.float() + delta
        if keep:
            merged = _with_lengths(module, merged)
    merged = merged.to(base.dtype)
    update = float((merged.float() - base.float()).norm())
    return merged, _OF_AN_UPDATE[base.dtype] * update + _OF_FP32 * float(base.float().norm())


def _full(value: torch.Tensor, keep: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All ranks' shards, in a dtype or their own, on the CPU where they are kept; elsewhere nothing."""
    value = value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.cpu() if keep else torch.empty(0)


def _with_lengths(module: Any, merged: torch.Tensor) -> torch.Tensor:
    """A merged weight whose rows have the lengths that DoRA has trained; without DoRA as it is."""
    rows = 0 if getattr(module, "fan_in_fan_out", False) else 1
    for adapter in set(module.active_adapters) & set(getattr(module, "lora_magnitude_vector", ())):
        length = module.lora_magnitude_vector[adapter].weight.detach().cpu().float()
        merged = merged * (length / merged.norm(dim=rows)).unsqueeze(rows)
    return merged


def gathered(parameters: list[Any], changed_on: int | None = None) -> AbstractContextManager[Any]:
    """Gather the parameters that ZeRO-3 shards, for as long as the context lasts; all ranks get what that one changes in them."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(sharded, modifier_rank=changed_on)
    return context
