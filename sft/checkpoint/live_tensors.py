"""Yields the full tensors of the live model one by one, whatever engine shards them. Reads the engine, not what the engine saves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sft.checkpoint.reshard import adapter_names
from sft.model.live import gathered


class LiveTensor(NamedTuple):
    """A tensor as the saved model should hold it."""

    names: tuple[str, ...]
    """In files; a tied weight has several."""

    value: torch.Tensor
    """On the CPU; empty on ranks that only take part."""


@torch.no_grad()
def live_tensors(
    named: Mapping[str, torch.Tensor], dtype: torch.dtype | None, keep: bool = True
) -> Iterator[LiveTensor]:
    """Yield each tensor once, in a dtype or its own. Every rank takes part, to the end; values are where `keep`.

    `named`: by their names in files, as the engine holds them.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    for own in names.values():
        tensor = named[own[0]]
        with gathered([tensor]):
            yield LiveTensor(tuple(own), _full(tensor, dtype, keep))


def live_adapters(model: Any, in_file: Collection[str]) -> dict[str, torch.Tensor]:
    """The parameters of an adapter's file by PEFT's names in it: all that are trained, and what else the file holds of the model."""
    saved_as = {name: saved for saved, name in adapter_names(model, embeddings=True).items()}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        saved = saved_as.get(name, name)
        if parameter.requires_grad or saved in in_file:
            found[saved] = parameter
    return found


def _full(value: torch.Tensor, dtype: torch.dtype | None, keep: bool) -> torch.Tensor:
    """All ranks' shards, in a dtype or their own, on the CPU where they are kept; elsewhere nothing."""
    value = value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.cpu() if keep else torch.empty(0)
