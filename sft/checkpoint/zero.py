"""DeepSpeed's ZeRO checkpoints: reads full tensors out of the ranks' shards, and gives each rank its shard of full tensors.

Each rank steps on flat shards, one per group of parameters. ZeRO-1 and 2 lay the parameters of a group end to end and cut the line into as
many parts as there are ranks; ZeRO-3 cuts each parameter. A shard is assembled from full tensors, and DeepSpeed loads it with its own
loader as if it had saved it. Its universal checkpoints are not used: loading them under ZeRO-3 counts steps twice and gives all parameters
the first group's weight decay, and they do not convert between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sft.checkpoint.patches import deepspeed_classes, load_mapped
from sft.errors import RunError

WEIGHT, FIRST, SECOND, STEP = "weight", "exp_avg", "exp_avg_sq", "step"
MOMENTS = (FIRST, SECOND)

_IN_STAGE_3 = ("optimizer_state_dict", "fp32_flat_groups")
_IN_STAGES_1_AND_2 = ("base_optimizer_state", "single_partition_of_fp32_groups")
"""DeepSpeed's names of the moments and of the weights."""

Read = Callable[[str, str], torch.Tensor]
"""Reads a tensor of a parameter: its name, and WEIGHT, FIRST, SECOND or STEP."""

Opened = tuple[set[str], Read]


class Piece(NamedTuple):
    """Where a stretch of a parameter lies in a checkpoint."""

    rank: int
    group: int
    start: int
    numel: int


def open_zero(checkpoint: Path) -> Opened:
    """The names of a checkpoint's parameters, and what reads them; of ZeRO-1, 2 or 3. A RunError where files are missing."""
    folder = checkpoint / (checkpoint / "latest").read_text().strip()
    shards = _shards(folder)
    if shards[0].get("zero_stage", 1) == 3:
        pieces, (states, weights) = _pieces_of_parameters(folder, shards), _IN_STAGE_3
    else:
        pieces, (states, weights) = _pieces_of_groups(shards), _IN_STAGES_1_AND_2

    def read(name: str, what: str) -> torch.Tensor:
        stretches = []
        for piece in pieces[name]:
            shard = shards[piece.rank]
            flat = shard[weights][piece.group] if what == WEIGHT else shard[states]["state"][piece.group][what]
            if what == STEP:
                return torch.as_tensor(flat)
            stretches.append(flat.narrow(0, piece.start, piece.numel))
        return torch.cat(stretches)

    return set(pieces), read


def _shards(folder: Path) -> list[dict[str, Any]]:
    """What each rank has saved of the optimizer, by rank."""
    files = {int(file.name.split("zero_pp_rank_")[1].split("_")[0]): file for file in folder.glob("*_optim_states.pt")}
    shards = [load_mapped(files[rank], deepspeed_classes())["optimizer_state_dict"] for rank in sorted(files)]
    counts: set[int] = set()
    for shard in shards:
        count = shard["partition_count"]
        counts.update(count if isinstance(count, list | tuple) else [count])
    if sorted(files) != list(range(len(files))) or counts != {len(files)}:
        raise RunError(f"{folder} holds the optimizer's state of ranks {sorted(files)}, of {counts}.")
    return shards


def _pieces_of_groups(shards: list[dict[str, Any]]) -> dict[str, list[Piece]]:
    """ZeRO-1 and 2."""
    pieces: dict[str, list[Piece]] = {}
    for rank, shard in enumerate(shards):
        for group, places in enumerate(shard["param_slice_mappings"]):
            for name, place in places.items():
                pieces.setdefault(name, []).append(Piece(rank, group, place.start, place.numel))
    return pieces


def _pieces_of_parameters(folder: Path, shards: list[dict[str, Any]]) -> dict[str, list[Piece]]:
    """ZeRO-3."""
    model = load_mapped(next(iter(sorted(folder.glob("zero_pp_rank_0_*_model_states.pt")))), deepspeed_classes())
    ranks = len(shards)
    pieces: dict[str, list[Piece]] = {}
    for group, shapes in enumerate(model["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            numel = prod(shape)
            part = -(-numel // ranks)
            own = [max(0, min(part, numel - rank * part)) for rank in range(ranks)]
            pieces[name] = [Piece(rank, group, offset, own[rank]) for rank in range(ranks)]
            offset += part
    return pieces


class Stretch(NamedTuple):
    """What of a parameter, from `first`, lies where in this rank's shard of a group, from `start`."""

    parameter: Any
    start: int
    first: int
    numel: int


def load_zero(engine: Any, checkpoint: Path, read: Read, source_names: dict[str, str], step: int) -> None:
    """Give this rank its shard. Every rank takes part."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    groups = list(_own_partitions(optimizer) if stage3 else _own_stretches(optimizer))

    def shards_of(what: str) -> list[torch.Tensor]:
        """This rank's shard of each group."""
        filled = []
        for flat, stretches in groups:
            shard = torch.zeros(flat.numel(), dtype=torch.float32)
            for one in stretches:
                source = read(source_names[names[id(one.parameter)]], what).flatten()
                shard[one.start : one.start + one.numel] = source[one.first : one.first + one.numel]
            filled.append(shard)
        return filled

    steps = sorted({float(read(name, STEP)) for name in source_names.values()})
    if len(steps) != 1:
        raise RunError(f"{checkpoint}: parameters differ in their number of steps, {steps}; ZeRO has only one.")
    base = optimizer.optimizer
    on_cpu = type(base).__name__ == "DeepSpeedCPUAdam"  # counts with an int
    # A tensor per group: each group would count up one that they share.
    counts = [int(steps[0]) if on_cpu else torch.tensor(steps[0]) for _ in groups]
    moments = zip(counts, shards_of(FIRST), shards_of(SECOND), strict=True)
    state = {number: dict(zip((STEP, *MOMENTS), one, strict=True)) for number, one in enumerate(moments)}
    states, weights = _IN_STAGE_3 if stage3 else _IN_STAGES_1_AND_2
    if stage3:
        optimizer.checkpoint_event_prologue()
    saved = optimizer.state_dict()
    saved |= {states: saved[states] | {"state": state}, weights: shards_of(WEIGHT)}
    # DeepSpeed's loaders pick their own rank's entry from a list.
    entries = torch.distributed.get_rank(group=optimizer.dp_process_group) + 1
    optimizer.load_state_dict([saved] * entries, load_from_fp32_weights=True)
    if stage3:
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()
    # DeepSpeed names the folder of its next checkpoint by it.
    engine.global_steps, engine.global_samples = step, step * engine.train_batch_size()


def _own_stretches(optimizer: Any) -> Iterator[tuple[torch.Tensor, list[Stretch]]]:
    """This rank's shard of each group, and what lies in it, under ZeRO-1 and 2."""
    bf16 = hasattr(optimizer, "fp32_groups_flat_partition")  # DeepSpeed's other optimizer, for ZeRO-1 with bf16
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for flat, parameters in zip(flats, optimizer.bf16_groups if bf16 else optimizer.bit16_groups, strict=True):
        stretches = []
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                stretches.append(Stretch(parameter, here.start, there.start, there.numel))
        yield flat, stretches


def _own_partitions(optimizer: Any) -> Iterator[tuple[torch.Tensor, list[Stretch]]]:
    """This rank's shard of each group, and what lies in it, under ZeRO-3."""
    for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        stretches, offset = [], 0
        for parameter in parameters:
            part = parameter.partition_numel()
            first = optimizer._get_param_partition_rank(parameter) * part
            numel = max(0, min(part, parameter.ds_numel - first))
            stretches.append(Stretch(parameter, offset, first, numel))
            offset += part
        yield flat, stretches
