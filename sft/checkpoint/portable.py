"""Reading any engine's checkpoint as whole tensors by name, one at a time, in fp32.

Nothing is converted or written: files are mapped into memory, and of each only what a parameter needs is read. Pickled files are
read with weights_only, which makes tensors and plain values and calls nothing.

DeepSpeed, ZeRO-1 to 3       sft/checkpoint/portable_zero.py
one process, DDP, TP         model.safetensors or adapter_model.safetensors, and optimizer.pt, which goes by number
FSDP2, sharded               pytorch_model_fsdp_0/ and optimizer_0/, torch's distributed checkpoint
FSDP2, full                  pytorch_model_fsdp.bin and optimizer.bin, by name
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint.plain_data import load_mapped
from sft.checkpoint.portable_zero import WEIGHT, open_zero
from sft.checkpoint.resume_plan import Writer
from sft.errors import RunError
from sft.plan.parallelism import FSDP2 as FSDP2


@dataclass(frozen=True)
class WholeTensors:
    """The trained parameters of a checkpoint and what AdamW keeps of each."""

    checkpoint: Path
    names: frozenset[str]
    read: Callable[[str, str], torch.Tensor]
    """Of a name, and WEIGHT, FIRST, SECOND or STEP: the tensor on the CPU in fp32; of one dimension where the file knows no shape."""


def open_whole(checkpoint: Path, writer: Writer, adapter_names: dict[str, str]) -> WholeTensors:
    """A checkpoint's trained parameters, by name.

    Args:
        checkpoint: Complete.
        writer: What wrote it.
        adapter_names: The parameter of each tensor of an adapter's file; empty where the model has no adapters.

    Raises:
        RunError: Files of it are missing.
    """
    if writer.zero_stage is not None:
        names, read = open_zero(checkpoint)
    elif writer.engine == FSDP2:
        # Of adapters accelerate saves the weights under PEFT's names, and the moments under the parameters' own.
        saved_as = {name: saved for saved, name in adapter_names.items()}
        opening = _open_shares if writer.state_dict_type == "sharded" else _open_full
        names, read = opening(checkpoint, saved_as)
    else:
        names, read = _open_numbered(checkpoint, writer.parameters, adapter_names)

    def in_fp32(name: str, what: str) -> torch.Tensor:
        # A copy: an optimizer would step on what is mapped, and on one number of steps that all parameters share.
        return torch.as_tensor(read(name, what)).detach().to(torch.float32, copy=True)

    return WholeTensors(checkpoint, frozenset(names), in_fp32)


Read = tuple[set[str], Callable[[str, str], torch.Tensor]]


def _open_numbered(checkpoint: Path, parameters: tuple[str, ...], adapter_names: dict[str, str]) -> Read:
    state = load_mapped(checkpoint / "optimizer.pt")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    entries = {name: state["state"][number] for name, number in zip(parameters, numbers, strict=True)}
    weights = _open_weights(checkpoint, adapter_names)
    copies = state.get("masters", [])
    masters = dict(zip(_rounded(weights, parameters), copies, strict=True)) if copies else {}

    def read(name: str, what: str) -> torch.Tensor:
        if what != WEIGHT:
            value: torch.Tensor = entries[name][what]
            return value
        return masters[name] if name in masters else weights[name]()

    return set(parameters), read


def _rounded(weights: dict[str, Callable[[], torch.Tensor]], parameters: tuple[str, ...]) -> list[str]:
    """Those that AdamW keeps a copy of."""
    return [name for name in parameters if weights[name]().dtype != torch.float32]


def _open_weights(checkpoint: Path, adapter_names: dict[str, str]) -> dict[str, Callable[[], torch.Tensor]]:
    from safetensors import safe_open

    kind = "adapter_model" if adapter_names else "model"
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for file in sorted(checkpoint.glob(f"{kind}*.safetensors")):
        opened: Any = safe_open(file, framework="pt")
        found |= {adapter_names.get(name, name): partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118
    if not found:
        raise RunError(f"{checkpoint} holds no {kind}.safetensors.")
    return found


def _open_shares(checkpoint: Path, saved_as: dict[str, str]) -> Read:
    moments, read_moment = _open_distributed(checkpoint / "optimizer_0")
    weights, read_weight = _open_distributed(checkpoint / "pytorch_model_fsdp_0")
    prefix = "optimizer.state."
    names = {name.removeprefix(prefix).rpartition(".")[0] for name in moments if name.startswith(prefix)}

    def read(name: str, what: str) -> torch.Tensor:
        if what != WEIGHT:
            return read_moment(f"{prefix}{name}.{what}")
        saved = f"model.{saved_as.get(name, name)}"
        return read_weight(saved if saved in weights else f"model.{name}")

    return names, read


def _open_distributed(folder: Path) -> tuple[set[str], Callable[[str], torch.Tensor]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    kept = FileSystemReader(folder).read_metadata().state_dict_metadata

    def read(name: str) -> torch.Tensor:
        of = kept[name]
        assert isinstance(of, TensorStorageMetadata)
        value = torch.empty(of.size, dtype=of.properties.dtype)
        with warnings.catch_warnings():
            # In an export there is no group of processes, which is meant so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load({name: value}, storage_reader=FileSystemReader(folder), no_dist=True)
        return value

    return set(kept), read


def _open_full(checkpoint: Path, saved_as: dict[str, str]) -> Read:
    weights, state = (load_mapped(checkpoint / file) for file in ("pytorch_model_fsdp.bin", "optimizer.bin"))

    def read(name: str, what: str) -> torch.Tensor:
        saved = saved_as.get(name, name)
        value: torch.Tensor = (
            weights[saved if saved in weights else name] if what == WEIGHT else state["state"][name][what]
        )
        return value

    return set(state["state"]), read
