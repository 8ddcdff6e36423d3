"""Decides where a model's layers go and how many processes share the documents. No score depends on it, so the settings leave it out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sft.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROOM = 0.2
"""Fraction of a GPU's free memory that is kept for activations, logits and the KV cache."""

Processes = int | Literal["auto"]


@dataclass(frozen=True)
class Placement:
    """Where the layers go."""

    devices: int
    """GPUs that hold one model; 0 for the CPU."""

    processes: int = 1
    """How many share the documents, each with a full model."""

    @property
    def spread(self) -> bool:
        """Whether the layers are on several GPUs."""
        return self.devices > 1

    def __str__(self) -> str:
        where = {0: "the CPU", 1: "one GPU"}.get(self.devices, f"layers over {self.devices} GPUs")
        return f"{self.processes} processes, each with the full model on {where}" if self.processes > 1 else where


def choose_placement(
    parallelize: bool | Literal["auto"], processes: Processes, weights: int, free: Sequence[int]
) -> Placement:
    """Choose one process per GPU where the weights fit on one GPU, else spread the layers over all.

    Args:
        parallelize: eval.parallelize.
        processes: eval.processes.
        weights: Bytes of the weights in the evaluation's dtype.
        free: Free bytes of each visible GPU; empty without a GPU.

    Raises:
        EvaluationError: The weights do not fit, or the keys ask for more GPUs than there are.
    """
    wanted = 1 if processes == "auto" else processes
    if not free and parallelize is not True:
        return Placement(0, wanted)
    # Processes take GPUs from the first on, so that the first one without room ends the count.
    with_room = next((number for number, count in enumerate(free) if weights > (1 - ROOM) * count), len(free))
    if parallelize is not True and with_room >= wanted:
        return Placement(1, with_room if processes == "auto" else wanted)
    if len(free) < 2 or wanted > 1 or parallelize is False or weights > (1 - ROOM) * sum(free):
        raise EvaluationError(
            f"eval.parallelize={parallelize}, eval.processes={processes}: {_gib(weights)} of weights do not fit. Free on the visible GPUs: "
            f"{', '.join(map(_gib, free)) or 'there is none'}; {ROOM:.0%} stays for activations. Leave both keys out, make more GPUs "
            "visible, or end what else uses them."
        )
    return Placement(len(free))


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


def on_gpu() -> bool:
    """Whether models are measured on GPUs here."""
    import torch

    return bool(torch.cuda.is_available())


def gpu_name() -> str | None:
    """The name of the GPU that this process uses; None without one."""
    import torch

    return str(torch.cuda.get_device_name()) if on_gpu() else None


def give_memory_back() -> None:
    """Free the GPU memory of models that nothing refers to any more: torch caches it, and the next model is placed by what is free."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weights_size(config: PreTrainedConfig, dtype: str, trust_remote_code: bool) -> int:
    """Bytes of a model's weights, tied ones once, without loading them; dtype `auto` is the config's, or fp32 where it names none."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype, None) or getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return int(sum(parameter.numel() for parameter in model.parameters()) * kind.itemsize)


def place_model(
    parallelize: bool | Literal["auto"], processes: Processes, config: PreTrainedConfig, dtype: str, trusted: bool
) -> Placement:
    """Choose the placement for the GPUs that are visible here; arguments and errors as `choose_placement` and `weights_size`."""
    import torch

    free = [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]
    weights = weights_size(config, dtype, trusted) if free else 0
    return choose_placement(parallelize, processes, weights, free)


def check_placement(model: Any, placement: Placement) -> None:
    """Refuse a model that `device_map=auto` has put on the CPU or a disk in part, where it would take days."""
    devices = [str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()]
    elsewhere = [device for device in devices if device in ("cpu", "disk")]
    if placement.spread and elsewhere:
        raise EvaluationError(
            f"The model does not fit on the GPUs: {len(elsewhere)} of its {len(devices)} parts would stay on "
            f"{' and '.join(sorted({*elsewhere}))}. End what else uses the GPUs."
        )


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
