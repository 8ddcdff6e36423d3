"""Resumes from any engine's checkpoint under any other: reads full tensors by name, one at a time, and gives each rank its shard.

Nothing is converted on disk: files are mapped into memory, and only what a parameter needs is read; pickles with weights_only.

DeepSpeed, ZeRO-1 to 3       sft/checkpoint/zero.py
one process, DDP, TP         model.safetensors or adapter_model.safetensors, and optimizer.pt, whose state is by number
FSDP2, full                  the same
FSDP2, sharded               pytorch_model_fsdp_0/ and optimizer_0/, torch's distributed checkpoint
pipeline stages              weights as above, or in a file of each stage; optimizer_<rank>.pt of each stage, by name
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import set_seed

from sft.checkpoint.patches import load_mapped, plain_data_only
from sft.checkpoint.resume import Writer
from sft.checkpoint.zero import MOMENTS, STEP, WEIGHT, Opened, open_zero
from sft.errors import RunError
from sft.model.live import gathered
from sft.parallel.full_tensors import shard_of
from sft.parallel.optimizer import MasterAdamW
from sft.parallel.process_group import is_rank_0
from sft.plan.pipeline import PIPELINE


@dataclass(frozen=True)
class FullTensors:
    """The trained parameters of a checkpoint and AdamW's state of each."""

    checkpoint: Path
    names: frozenset[str]
    read: Callable[[str, str], torch.Tensor]
    """Of a name, and WEIGHT, FIRST, SECOND or STEP: the tensor on the CPU in fp32; flat where the file knows no shape."""


def open_full(checkpoint: Path, writer: Writer, adapter_names: dict[str, str]) -> FullTensors:
    """A checkpoint's trained parameters, by name; a RunError where files of it are missing."""
    if writer.zero_stage is not None:
        names, read = open_zero(checkpoint)
    elif writer.engine == PIPELINE:
        names, read = _open_stages(checkpoint, adapter_names)
    elif writer.state_dict_type == "sharded":
        # accelerate saves adapters' weights under PEFT's names, and their moments under the parameters' own.
        names, read = _open_sharded(checkpoint, {name: saved for saved, name in adapter_names.items()})
    else:
        names, read = _open_numbered(checkpoint, writer.parameters, adapter_names)

    def in_fp32(name: str, what: str) -> torch.Tensor:
        # A copy: an optimizer would step on what is mapped, and on a step count that all parameters share.
        return torch.as_tensor(read(name, what)).detach().to(torch.float32, copy=True)

    return FullTensors(checkpoint, frozenset(names), in_fp32)


def _open_numbered(checkpoint: Path, parameters: tuple[str, ...], adapter_names: dict[str, str]) -> Opened:
    state = load_mapped(checkpoint / "optimizer.pt")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    entries = {name: state["state"][number] for name, number in zip(parameters, numbers, strict=True)}
    weights = _open_weights(checkpoint, adapter_names)
    masters: dict[str, torch.Tensor] = {}
    if copies := state.get("masters"):  # MasterAdamW keeps one of each weight that is not fp32
        rounded = [name for name in parameters if weights[name]().dtype != torch.float32]
        masters = dict(zip(rounded, copies, strict=True))

    def read(name: str, what: str) -> torch.Tensor:
        if what != WEIGHT:
            value: torch.Tensor = entries[name][what]
            return value
        return masters[name] if name in masters else weights[name]()

    return set(parameters), read


def _open_stages(checkpoint: Path, adapter_names: dict[str, str]) -> Opened:
    weights, entries = _open_weights(checkpoint, adapter_names), dict[str, dict[str, torch.Tensor]]()
    for file in checkpoint.glob("optimizer_*.pt"):
        entries |= load_mapped(file)
    return set(entries), lambda name, what: weights[name]() if what == WEIGHT else entries[name][what]


def _open_weights(checkpoint: Path, adapter_names: dict[str, str]) -> dict[str, Callable[[], torch.Tensor]]:
    kind = "adapter_model" if adapter_names else "model"
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for path in sorted(checkpoint.glob(f"{kind}*.safetensors")):
        file: Any = safe_open(path, framework="pt")
        found |= {adapter_names.get(name, name): partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
    if not found:
        raise RunError(f"{checkpoint} holds no {kind}.safetensors.")
    return found


def _open_sharded(checkpoint: Path, saved_as: dict[str, str]) -> Opened:
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
    with plain_data_only(deepspeed=False):
        metadata: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata

    def read(name: str) -> torch.Tensor:
        value = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        with plain_data_only(deepspeed=False), warnings.catch_warnings():
            # An export has no process group, as intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load({name: value}, storage_reader=FileSystemReader(folder), no_dist=True)
        return value

    return set(metadata), read


def source_names(module: torch.nn.Module, tensors: FullTensors, is_part: bool = False) -> dict[str, str]:
    """The names in the checkpoint by those of the trained parameters here: a tied weight may go by another of its names.

    `is_part`: other ranks have other parameters.

    Raises:
        RunError: They are not the same parameters.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    found = {names[0]: [name for name in names if name in tensors.names] for names in aliases.values()}
    missing = [name for name, names in found.items() if not names]
    extra = set() if is_part else tensors.names - {name for names in aliases.values() for name in names}
    if missing or extra:
        raise RunError(
            f"{tensors.checkpoint} holds other parameters: {len(missing)} trained here are not in it ({missing[:1]}), {len(extra)} in it "
            f"are not trained here ({sorted(extra)[:1]})."
        )
    return {name: names[0] for name, names in found.items()}


def adapter_names(module: Any, embeddings: bool = False) -> dict[str, str]:
    """The parameter of each tensor in an adapter's file, as PEFT names them; empty for a model without adapters.

    `embeddings`: with those that are not trained; PEFT saves them too where they have new rows.
    """
    if not hasattr(module, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    # PEFT's own renaming, of tensors that stand for the names.
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    numbered = {name: torch.tensor(number) for number, name in enumerate(names)}
    saved = get_peft_model_state_dict(module, state_dict=numbered, save_embedding_layers=embeddings)
    return {key: names[int(number)] for key, number in saved.items()}


def load_torch(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: FullTensors, sources: dict[str, str]
) -> None:
    """Load under one process, DDP, tensor parallelism and FSDP2: weights in place, moments by torch's own loader."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, (weight, stepped_on) in enumerate(zip(*_weights_and_stepped(optimizer), strict=True)):
        source = sources[names[id(weight)]]
        shards = {what: shard_of(tensors.read(source, what).view(weight.shape), weight) for what in (WEIGHT, *MOMENTS)}
        with torch.no_grad():
            stepped_on.copy_(shards[WEIGHT])
            weight.copy_(shards.pop(WEIGHT))
        state[number] = shards | {STEP: tensors.read(source, STEP)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def load_weights(module: torch.nn.Module, tensors: FullTensors, sources: dict[str, str]) -> None:
    """Load the trained weights alone, under every engine and whatever the optimizer, whose copies stay as they were."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, source in sources.items():
        weight = parameters[name]
        with torch.no_grad(), gathered([weight], changed_on=0):
            if is_rank_0() or not hasattr(weight, "ds_id"):
                weight.copy_(shard_of(tensors.read(source, WEIGHT).view(weight.shape), weight))


def _weights_and_stepped(optimizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The model's weights, and what the optimizer steps on: the same, or fp32 copies."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return (optimizer.weights if isinstance(optimizer, MasterAdamW) else stepped), stepped


def load_schedule(scheduler: Any, optimizer: Any, file: Path) -> None:
    """Load the schedule; engines may divide the same parameters into different numbers of groups."""
    saved, groups = load_mapped(file), optimizer.param_groups
    for name in ("base_lrs", "_last_lr", "lr_lambdas"):
        assert all(one == saved[name][0] for one in saved[name]), f"{name}: one learning rate for all parameters"
        saved[name] = saved[name][:1] * len(groups)
    scheduler.load_state_dict(saved)
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def start_random_streams(seed: int, step: int, rank: int) -> None:
    """Seed the random streams of a rank without a saved state: by where training is, and differently on each rank."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    set_seed(int.from_bytes(digest[:4], "big"))


def with_parameters(writer: Writer, model: torch.nn.Module, optimizer: Any) -> Writer:
    """Add the names of the optimizer's parameters in its order, where its state is by number."""
    if writer.deepspeed is not None or writer.state_dict_type == "sharded" or writer.engine == PIPELINE:
        return writer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights, _ = _weights_and_stepped(getattr(optimizer, "optimizer", optimizer))
    return replace(writer, parameters=tuple(names[id(weight)] for weight in weights))
