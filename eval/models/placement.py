"""Decide where a model's layers go, how many processes share the documents, and in which batches.

Layers on several GPUs compute one after another on the same kind of device, so that no score depends on it: it is recorded with the
results, and is no part of the settings that two evaluations must share. Imports torch only where it looks at the GPUs.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from sft.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROOM = 0.2
"""Fraction of a GPU's free memory that is kept for activations, logits and the KV cache."""

Parallelize = bool | Literal["auto"]


Found = dict[str, list[int]]
"""Per task the batch sizes of its searches, in order: `batch_sizes_found` of results.json."""


@dataclass(frozen=True)
class Placement:
    """Where the layers go, and why."""

    devices: int
    """GPUs that hold them; 0 for the CPU."""

    reason: str

    processes: int = 1
    """How many share the documents, each with the whole model."""

    @property
    def spread(self) -> bool:
        """Whether the layers are on several GPUs."""
        return self.devices > 1

    def __str__(self) -> str:
        where = {0: "the CPU", 1: "one GPU"}.get(self.devices, f"layers over {self.devices} GPUs")
        shared = f"{self.processes} processes, each with the whole model on " if self.processes > 1 else ""
        return f"{shared}{where} ({self.reason})"


def choose_placement(wanted: Parallelize, weights: int, free: Sequence[int]) -> Placement:
    """One GPU where the weights fit on it, else all.

    Args:
        wanted: eval.parallelize.
        weights: Bytes of the weights in the evaluation's dtype.
        free: Free bytes of each visible GPU; none without a GPU.

    Raises:
        EvaluationError: There is only one GPU to spread layers over, or the weights do not fit.
    """
    if wanted is True and len(free) < 2:
        raise EvaluationError(
            f"eval.parallelize=true spreads layers over GPUs, and {len(free)} are visible. Leave it out."
        )
    if not free:
        return Placement(0, "there is no GPU")
    size, room = f"{_gib(weights)} of weights", (1 - ROOM) * free[0]
    if wanted is not True and weights <= room:
        return Placement(1, f"{size} fit into {_gib(room)}, which is {1 - ROOM:.0%} of what is free")
    allowed = free[:1] if wanted is False else free
    if weights > (1 - ROOM) * sum(allowed):
        remedy = (
            "Leave eval.parallelize=false out to spread the layers over all visible GPUs."
            if wanted is False
            else "Make more GPUs visible, end what else uses them, or set eval.dtype=bfloat16."
        )
        raise EvaluationError(
            f"{size} do not fit on {len(allowed)} GPU{'s' if len(allowed) > 1 else ''}: {_gib(sum(allowed))} are free, and {ROOM:.0%} of "
            f"that stays for activations. {remedy}"
        )
    why = "eval.parallelize=true" if wanted is True else f"{size}, and one GPU has room for {_gib(room)}"
    return Placement(len(free), why)


def choose_processes(
    wanted: int | Literal["auto"], placement: Placement, weights: int, free: Sequence[int], launched: int = 1
) -> Placement:
    """One process for each GPU that has room for the weights, or as many as were asked for.

    Args:
        wanted: eval.processes.
        placement: From `choose_placement`.
        weights: Bytes of the weights in the evaluation's dtype.
        free: Free bytes of each visible GPU, the first one first; none without a GPU.
        launched: How many a launcher of the user's has started; 1 for none.

    Raises:
        EvaluationError: There cannot be so many.
    """
    if launched > 1 and wanted not in ("auto", launched):
        raise EvaluationError(
            f"eval.processes={wanted}, and {launched} processes were started. Start it without a launcher: it starts them itself."
        )
    asked = launched if launched > 1 else wanted
    if placement.spread:
        if wanted not in ("auto", 1):
            raise EvaluationError(
                f"eval.processes={wanted}, and the layers are spread over {placement.devices} GPUs, which one process does "
                f"({placement.reason}). Leave eval.processes out."
            )
        return placement
    if not free:
        return replace(placement, processes=1 if asked == "auto" else asked)
    room = next((number for number, bytes_ in enumerate(free) if weights > (1 - ROOM) * bytes_), len(free))
    if asked != "auto" and asked > room:
        raise EvaluationError(
            f"{'eval.processes' if launched == 1 else 'Processes that were started'}: {asked}, each on a GPU of its own, and "
            f"{room} of {len(free)} visible GPUs have room for {_gib(weights)} of weights. Ask for {room}, or end what else uses the GPUs."
        )
    return replace(placement, processes=room if asked == "auto" else asked)


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


class BatchSizes:
    """The batch sizes of one task where lm_eval searches for them.

    Args:
        given: Those of the base model; empty where there is none to follow.
        strict: Whether less memory than the base model had is a failure: in half precision another size moves answers.
    """

    def __init__(self, given: Sequence[int] = (), strict: bool = False) -> None:
        self.given, self.strict = given, strict
        self.found: list[int] = []

    def decide(self, search: Callable[[], int]) -> int:
        """The size of the next batches.

        Args:
            search: Finds the largest that fits.

        Raises:
            EvaluationError: The given one does not fit.
        """
        size, number = search(), len(self.found)
        if number < len(self.given):
            if size < self.given[number] and self.strict:
                raise EvaluationError(
                    f"the base model was asked in batches of {self.given[number]}, and there is memory for {size} now: in half precision "
                    f"that moves answers. Set eval.batch_size={size}, or end what else uses the GPU."
                )
            size = min(size, self.given[number])
        self.found.append(size)
        return size


def on_gpu() -> bool:
    """Whether models are measured on GPUs here."""
    import torch

    return bool(torch.cuda.is_available())


def gpu_name() -> str | None:
    """What the GPU that this process uses is called; None without one."""
    import torch

    return str(torch.cuda.get_device_name()) if on_gpu() else None


def free_memory() -> list[int]:
    """Free bytes of each visible GPU."""
    import torch

    return [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]


def give_memory_back() -> None:
    """Free the GPU memory of models that nothing holds any more: torch caches it, and the next model is placed by what is free."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weights_size(config: PreTrainedConfig, dtype: str, trust_remote_code: bool) -> int:
    """Bytes of a model's weights, tied ones once, without loading or downloading them.

    Args:
        config: The model's.
        dtype: The evaluation's; `auto` counts as the config's, or fp32 where it names none.
        trust_remote_code: As for loading.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype, None) or getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return int(sum(parameter.numel() for parameter in model.parameters()) * kind.itemsize)


def place_model(
    wanted: Parallelize,
    processes: int | Literal["auto"],
    launched: int,
    config: PreTrainedConfig,
    dtype: str,
    trust_remote_code: bool,
) -> Placement:
    """Decide for the GPUs that are visible here.

    Args:
        wanted: eval.parallelize.
        processes: eval.processes.
        launched: Processes that a launcher of the user's has started; 1 for none.
        config: The model's.
        dtype: The evaluation's.
        trust_remote_code: As for loading.

    Raises:
        EvaluationError: As choose_placement and choose_processes.
    """
    free = free_memory()
    weights = weights_size(config, dtype, trust_remote_code) if free else 0
    return choose_processes(processes, choose_placement(wanted, weights, free), weights, free, launched)


def check_placement(model: Any, placement: Placement) -> dict[str, int]:
    """Count the modules on each device of the loaded model; empty where it is on one device.

    Raises:
        EvaluationError: Part of the model is on a disk, or on the CPU beside GPUs, where it would take days.
    """
    modules = Counter(str(device) for device in (getattr(model, "hf_device_map", None) or {}).values())
    elsewhere = {"cpu", "disk"} & modules.keys()
    if placement.spread and elsewhere:
        raise EvaluationError(
            f"The model does not fit on the GPUs after all: {sum(modules[device] for device in elsewhere)} of its "
            f"{modules.total()} parts would stay on {' and '.join(sorted(elsewhere))}. End what else uses the GPUs."
        )
    return dict(modules) if placement.spread else {}


def change_whole(model: Any, change: Callable[[], None]) -> None:
    """Replace modules of a model, also where its layers are on several GPUs: the hooks between devices are removed and restored."""
    spread = getattr(model, "hf_device_map", None)
    if spread is None or len(spread) == 1:
        change()
        return
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    change()
    dispatch_model(model, device_map=spread, force_hooks=True)
