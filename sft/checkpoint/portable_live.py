"""Giving a live engine the weights, the moments and the schedule of another engine's checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.trainer import SCHEDULER_NAME

from sft.checkpoint.plain_data import load_mapped
from sft.checkpoint.portable import WholeTensors, open_whole
from sft.checkpoint.portable_zero import MOMENTS, STEP, WEIGHT, load_zero
from sft.checkpoint.resume_plan import Continuation, Writer
from sft.errors import RunError
from sft.parallel.optimizer import MasterAdamW
from sft.parallel.tensor_parallel import part_of


def go_on(trainer: Any, continuation: Continuation) -> None:
    """Take up a checkpoint through whole tensors. Every rank takes part.

    Args:
        trainer: Its engine, optimizer and schedule just made, its state that of the checkpoint.
        continuation: Through whole tensors.

    Raises:
        RunError: The checkpoint holds other parameters than are trained here, or cannot be read.
    """
    module = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    whole = open_whole(continuation.checkpoint, continuation.writer, adapter_names(module))
    sources = source_names(module, whole)
    if trainer.is_deepspeed_enabled:
        load_zero(trainer.model_wrapped, whole.checkpoint, whole.read, sources, trainer.state.global_step)
    else:
        load_torch(module, trainer.optimizer.optimizer, whole, sources)
    load_schedule(trainer, continuation.checkpoint / SCHEDULER_NAME)


def source_names(module: torch.nn.Module, whole: WholeTensors) -> dict[str, str]:
    """By the names of the trained parameters here, those in the checkpoint: a tied weight may go by another of its names.

    Raises:
        RunError: They are not the same parameters.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    found = {names[0]: [name for name in names if name in whole.names] for names in aliases.values()}
    missing = [name for name, names in found.items() if not names]
    extra = whole.names - {name for names in aliases.values() for name in names}
    if missing or extra:
        which = f"{len(missing)} trained here are not in it ({missing[:1]}), {len(extra)} in it are not trained here ({sorted(extra)[:1]})"
        raise RunError(f"{whole.checkpoint} holds other parameters: {which}.")
    return {name: names[0] for name, names in found.items()}


def adapter_names(module: Any) -> dict[str, str]:
    """The parameter of each tensor of an adapter's file, as PEFT names them; empty for a model without adapters."""
    if not hasattr(module, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    # PEFT's own renaming, of tensors that stand for the names.
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    numbered = {name: torch.tensor(number) for number, name in enumerate(names)}
    saved = get_peft_model_state_dict(module, state_dict=numbered, save_embedding_layers=False)
    return {key: names[int(number)] for key, number in saved.items()}


def load_torch(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, whole: WholeTensors, sources: dict[str, str]
) -> None:
    """One process, DDP, tensor parallel, FSDP2: weights in place, moments by torch's own loader."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights = optimizer.weights if isinstance(optimizer, MasterAdamW) else stepped
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, (weight, stepped_on) in enumerate(zip(weights, stepped, strict=True)):
        source = sources[names[id(weight)]]
        parts = {what: part_of(whole.read(source, what).view(weight.shape), weight) for what in (WEIGHT, *MOMENTS)}
        with torch.no_grad():
            stepped_on.copy_(parts[WEIGHT])
            weight.copy_(parts.pop(WEIGHT))
        state[number] = parts | {STEP: whole.read(source, STEP)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def load_schedule(trainer: Any, file: Path) -> None:
    """The schedule's place; an engine may divide the same parameters into another number of groups."""
    saved, groups = load_mapped(file), trainer.optimizer.param_groups
    for name in ("base_lrs", "_last_lr", "lr_lambdas"):
        assert all(one == saved[name][0] for one in saved[name]), f"{name}: one learning rate for all parameters"
        saved[name] = saved[name][:1] * len(groups)
    trainer.lr_scheduler.load_state_dict(saved)
    for group, rate in zip(groups, trainer.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def begin_random_streams(seed: int, step: int, rank: int) -> None:
    """Where ranks have no random state of their own: one that depends on where the training is, and differs between ranks."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    set_seed(int.from_bytes(digest[:4], "big"))


def with_parameters(writer: Writer, model: torch.nn.Module, optimizer: Any) -> Writer:
    """With the names of the optimizer's parameters in its order, where its state goes by number."""
    if writer.deepspeed is not None or writer.state_dict_type is not None:
        return writer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inner = getattr(optimizer, "optimizer", optimizer)
    stepped = [parameter for group in inner.param_groups for parameter in group["params"]]
    weights = inner.weights if isinstance(inner, MasterAdamW) else stepped
    return replace(writer, parameters=tuple(names[id(weight)] for weight in weights))
