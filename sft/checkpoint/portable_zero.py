"""DeepSpeed's ZeRO checkpoints: reading whole tensors out of the ranks' shares, and giving each rank its share of whole tensors.

Each rank steps on flat shares, one a group of parameters. ZeRO-1 and 2 lay the parameters of a group end to end and cut the line
in as many parts as there are ranks; ZeRO-3 cuts each parameter. A share is put together from whole tensors, and DeepSpeed loads it
with its own loader as if it had saved it: its universal checkpoints are not used, because loading them under ZeRO-3 counts steps
twice and gives all parameters the first group's weight decay, and they do not go from one stage to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint.plain_data import deepspeed_classes, load_mapped
from sft.errors import RunError

WEIGHT, FIRST, SECOND, STEP = "weight", "exp_avg", "exp_avg_sq", "step"
MOMENTS = (FIRST, SECOND)
Read = Callable[[str, str], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Where a stretch of a parameter lies."""

    rank: int
    group: int
    start: int
    numel: int


def open_zero(checkpoint: Path) -> tuple[set[str], Callable[[str, str], torch.Tensor]]:
    """The names, and what reads one of them, of a checkpoint of ZeRO-1, 2 or 3.

    Raises:
        RunError: Files are missing.
    """
    folder = checkpoint / (checkpoint / "latest").read_text().strip()
    shares = _shares(folder)
    stage = int(shares[0]["zero_stage"]) if "zero_stage" in shares[0] else 1
    pieces = _pieces_of_parameters(folder, shares) if stage == 3 else _pieces_of_groups(shares)
    states = [share["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"] for share in shares]
    weights = [share["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for share in shares]

    def read(name: str, what: str) -> torch.Tensor:
        if what == STEP:
            first = pieces[name][0]
            return torch.as_tensor(states[first.rank][first.group][STEP])
        parts = [
            (weights[one.rank][one.group] if what == WEIGHT else states[one.rank][one.group][what]).narrow(
                0, one.start, one.numel
            )
            for one in pieces[name]
        ]
        return torch.cat(parts)

    return set(pieces), read


def _shares(folder: Path) -> list[dict[str, Any]]:
    """What each rank has saved of the optimizer, by rank."""
    files = {int(file.name.split("zero_pp_rank_")[1].split("_")[0]): file for file in folder.glob("*_optim_states.pt")}
    shares = [load_mapped(files[rank], deepspeed_classes())["optimizer_state_dict"] for rank in sorted(files)]
    counts = {count for share in shares for count in _as_list(share["partition_count"])}
    if sorted(files) != list(range(len(files))) or counts != {len(files)}:
        raise RunError(f"{folder} holds the optimizer's state of ranks {sorted(files)}, of {counts}.")
    return shares


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _pieces_of_groups(shares: list[dict[str, Any]]) -> dict[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = {}
    for rank, share in enumerate(shares):
        for group, places in enumerate(share["param_slice_mappings"]):
            for name, place in places.items():
                pieces.setdefault(name, []).append(Piece(rank, group, place.start, place.numel))
    return pieces


def _pieces_of_parameters(folder: Path, shares: list[dict[str, Any]]) -> dict[str, list[Piece]]:
    model = load_mapped(next(iter(sorted(folder.glob("zero_pp_rank_0_*_model_states.pt")))), deepspeed_classes())
    pieces: dict[str, list[Piece]] = {}
    for group, shapes in enumerate(model["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            numel = prod(shape)
            part = -(-numel // len(shares))
            pieces[name] = [
                Piece(rank, group, offset, max(0, min(part, numel - rank * part))) for rank in range(len(shares))
            ]
            offset += part
    return pieces


@dataclass(frozen=True)
class Stretch:
    """What of a parameter lies where in this rank's share of a group."""

    parameter: Any
    start: int
    """In the share."""

    first: int
    """In the parameter."""

    numel: int


def load_zero(engine: Any, checkpoint: Path, whole: Read, source_names: dict[str, str], step: int) -> None:
    """Give this rank its share. Every rank takes part.

    Args:
        engine: DeepSpeed's, just made.
        checkpoint: Named in messages.
        whole: Reads a whole tensor of it.
        source_names: By the engine's names, those in the checkpoint.
        step: Optimizer steps so far.
    """
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    shares = list(_own_partitions(optimizer) if stage3 else _own_stretches(optimizer))

    def fill(what: str) -> list[torch.Tensor]:
        """The share of each group."""
        filled = []
        for flat, stretches in shares:
            share = torch.zeros(flat.numel(), dtype=torch.float32)
            for one in stretches:
                source = whole(source_names[names[id(one.parameter)]], what).flatten()
                share[one.start : one.start + one.numel] = source[one.first : one.first + one.numel]
            filled.append(share)
        return filled

    steps = {float(whole(name, STEP)) for name in source_names.values()}
    if len(steps) != 1:
        raise RunError(
            f"{checkpoint}: parameters have taken different numbers of steps, {sorted(steps)}, which ZeRO cannot."
        )
    state = _base_state(optimizer, fill, steps.pop())
    if stage3:
        _hand_over_partitions(optimizer, state, fill(WEIGHT))
    else:
        _hand_over_shares(optimizer, state, fill(WEIGHT))
    # DeepSpeed names the folder of its next checkpoint by it.
    engine.global_steps, engine.global_samples = step, step * engine.train_batch_size()


def _base_state(optimizer: Any, fill: Callable[[str], list[torch.Tensor]], step: float) -> dict[str, Any]:
    """The state_dict of the optimizer inside, which goes by number."""
    base = optimizer.optimizer
    on_cpu = type(base).__name__ == "DeepSpeedCPUAdam"  # counts with an int
    moments = zip(fill(FIRST), fill(SECOND), strict=True)
    state = {
        # A tensor of each group's own: one that they share would be counted up by every group.
        number: {STEP: int(step) if on_cpu else torch.tensor(step), **dict(zip(MOMENTS, pair, strict=True))}
        for number, pair in enumerate(moments)
    }
    return {"state": state, "param_groups": base.state_dict()["param_groups"]}


def _hand_over_shares(optimizer: Any, state: dict[str, Any], weights: list[torch.Tensor]) -> None:
    """ZeRO-1 and 2."""
    saved = optimizer.state_dict()
    saved |= {"base_optimizer_state": state, "single_partition_of_fp32_groups": weights}
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    optimizer.load_state_dict([saved] * (rank + 1), load_from_fp32_weights=True)
    optimizer.update_lp_params()


def _hand_over_partitions(optimizer: Any, state: dict[str, Any], weights: list[torch.Tensor]) -> None:
    """ZeRO-3."""
    optimizer.checkpoint_event_prologue()
    optimizer._set_fp32_optimizer_param_groups()
    state["param_groups"] = optimizer.optimizer.state_dict()["param_groups"]
    optimizer._clear_fp32_optimizer_param_groups()
    saved = {
        "loss_scaler": optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "optimizer_state_dict": state,
        "fp32_flat_groups": weights,
    }
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    optimizer.load_state_dict([saved] * (rank + 1))
    optimizer.checkpoint_event_epilogue()


def _own_stretches(optimizer: Any) -> Iterator[tuple[torch.Tensor, list[Stretch]]]:
    """This rank's share of each group, and what lies in it, under ZeRO-1 and 2."""
    bf16 = hasattr(optimizer, "fp32_groups_flat_partition")  # DeepSpeed's other optimizer, for ZeRO-1 with bf16
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for flat, parameters in zip(flats, optimizer.bf16_groups if bf16 else optimizer.bit16_groups, strict=True):
        mapped = [parameter for parameter in parameters if parameter._hp_mapping is not None]
        yield (
            flat,
            [
                Stretch(
                    parameter,
                    parameter._hp_mapping.hp_fragment_address.start,
                    parameter._hp_mapping.lp_fragment_address.start,
                    parameter._hp_mapping.lp_fragment_address.numel,
                )
                for parameter in mapped
            ],
        )


def _own_partitions(optimizer: Any) -> Iterator[tuple[torch.Tensor, list[Stretch]]]:
    """This rank's share of each group, and what lies in it, under ZeRO-3."""
    for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        stretches, offset = [], 0
        for parameter in parameters:
            part = parameter.partition_numel()
            first = optimizer._get_param_partition_rank(parameter) * part
            numel = max(0, min(part, parameter.ds_numel - first))
            stretches.append(Stretch(parameter, offset, first, numel))
            offset += part
        yield flat, stretches
