"""Holds what decides the memory of a pass, and what a training needs of each GPU and of the machine beside what there is; draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft.plan.hardware import Hardware
from sft.recipe.schema import Lora

GIB = 2**30
SUBSTITUTES = {
    "attention": "FlashAttention: keeps query, key, value, output and an fp32 number for each query and head",
    "loss head": "TRL's fused head: a tile of logits, and gradients in fp32",
    "norms, rotary embedding, MLP": "Liger's kernels, where they run: keep their inputs, and write gradients over them",
}
"""What stands for the kernels of a GPU in a simulated pass."""


@dataclass(frozen=True)
class Pass:
    """What decides the memory of a forward and backward pass over one micro-batch."""

    tokens: int
    dtype: str
    """Of the weights: bfloat16, float16 or float32."""
    autocast: str | None
    """What matrices are multiplied in where something trained is fp32; None: in the dtype of the weights, adapters too."""
    recompute_every: int
    """Every n-th layer recomputes its activations; 0: none."""
    liger: bool
    eager: bool
    """Attention with a matrix of scores."""
    fp32_gradients: bool
    """Whether gradients in half precision are added up in fp32, weight by weight."""
    all_logits: bool
    tensor_parallel_size: int
    """Ranks that share the heads and the feed-forward width of each layer."""
    lora: Lora | None
    freeze: tuple[str, ...]


@dataclass(frozen=True)
class PassMemory:
    """Bytes beside weights, gradients and optimizer state."""

    kept: int
    """At the end of the forward pass through the layers."""
    peak: int
    """The most at any time of the pass."""
    trained: int
    """Parameters that are trained."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each GPU, part by part, and of each node's memory, all its ranks together."""

    gpu: Mapping[str, float]
    cpu: float
    hardware: Hardware
    """What it is counted for, and must fit."""
    simulated: bool = False
    """Whether a simulated pass gave the activations, and not arithmetic for a plain decoder."""
    by_stage: tuple[float, ...] = ()
    """Of pipeline stages what a GPU of each needs; the parts are those of the largest."""

    @property
    def gpu_bytes(self) -> float:
        """On each GPU."""
        return sum(self.gpu.values())

    @property
    def gpu_gib(self) -> float:
        """That each GPU has."""
        assert self.hardware.gpu
        return self.hardware.gpu.memory_gib

    def as_json(self) -> dict[str, Any]:
        """Bytes on each GPU by category, `peak` with the reserve among them; `machine` is what the ranks of a node need of its memory."""
        found: dict[str, Any] = {name: int(size) for name, size in self.gpu.items()}
        found |= {"peak": int(self.gpu_bytes), "available": int(self.gpu_gib * GIB)}
        found |= {"machine": int(self.cpu), "machine_available": int(self.hardware.cpu_memory_gib * GIB)}
        found |= {"stages": [int(size) for size in self.by_stage]} if self.by_stage else {}
        return found | {"simulated": self.simulated, "substitutes": SUBSTITUTES if self.simulated else {}}

    @property
    def lack(self) -> str | None:
        """What there is too little of, such as `90.1 of 80 GiB`; None where the estimate fits."""
        if self.gpu_bytes > self.gpu_gib * GIB or self.cpu > self.hardware.cpu_memory_gib * GIB:
            return self.short
        return None

    @property
    def short(self) -> str:
        """Needed and there: `21.5 of 80 GiB`."""
        machine = f"; {self.cpu / GIB:.0f} of {self.hardware.cpu_memory_gib:.0f} GiB of the machine's memory"
        return f"{self.gpu_bytes / GIB:.1f} of {self.gpu_gib:.0f} GiB{machine if self.cpu else ''}"

    @property
    def words(self) -> str:
        """The sum: `weights 5.7 + ... = 38.0 of 80 GiB`."""
        return (
            " + ".join(f"{name} {size / GIB:.1f}" for name, size in self.gpu.items() if size >= 0.05 * GIB)
            + f" = {self.short}"
            + ("; by stage " + " | ".join(f"{size / GIB:.1f}" for size in self.by_stage) if self.by_stage else "")
        )


_BAR = 48  # columns that stand for the memory of a GPU


def memory_bars(sizes: Mapping[str, Any], mark: str = "█", engine: str = "") -> list[str]:
    """Lines with a bar for each category of a GPU's memory, and the headroom.

    >>> print(*memory_bars({"weights": 2**33, "activations": 2**32, "peak": 3 * 2**32, "available": 2**34}, "#"), sep="\\n")
    Memory of each GPU, in GiB:
      weights      ########################                            8.0
      activations  ############                                        4.0
      headroom     ############                                        4.0 of 16
    """
    available, peak = sizes["available"], sizes["peak"]

    def line(name: str, size: float, of: float | None = None) -> str:
        bar = mark * max(1, round(_BAR * size / max(available, peak)))
        return f"  {name:12} {bar[:_BAR]:{_BAR}} {size / GIB:6.1f}" + (f" of {of / GIB:.0f}" if of else "")

    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")
    lines = [f"Memory of each GPU{f' with {engine}' if engine else ''}, in GiB:"]
    lines += [line(name, sizes[name]) for name in parts if sizes.get(name)]
    lines.append(line("headroom" if peak <= available else "too much", abs(available - peak), available))
    if needed := sizes.get("machine"):
        lines.append(line("machine", needed, sizes["machine_available"]))
    return lines
