"""Says of a GPU by its name how large and how fast it is. A new GPU is a row.

Peak and power are those of NVIDIA's data sheet of each product; of GeForce and RTX cards those of its white papers on the architectures
(Ampere GA102, Ada, RTX Blackwell). Where both a dense and a sparse peak are given, it is the dense one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """What a data sheet says of one GPU."""

    name: str
    memory_gib: float
    """That the driver shows: of cards with GDDR for data centers 15/16 of what is sold, since error correction takes the rest."""
    half_flops: float
    """Of bf16, or of fp16 where there is no bf16, with sums in fp32, FLOP/s."""
    watts: int
    """The most that the board draws."""
    compute_capability: float


GPU_MODELS = (
    GpuModel("B200", 180, 2250e12, 1000, 10.0),
    GpuModel("H200", 141, 989e12, 700, 9.0),
    GpuModel("H200-NVL", 141, 835e12, 600, 9.0),
    GpuModel("H100", 80, 989e12, 700, 9.0),
    GpuModel("H100-NVL", 94, 835e12, 400, 9.0),
    GpuModel("H100-PCIe", 80, 756e12, 350, 9.0),
    GpuModel("H20", 96, 148e12, 400, 9.0),
    GpuModel("A100", 80, 312e12, 400, 8.0),
    GpuModel("A100-PCIe", 80, 312e12, 300, 8.0),
    GpuModel("A30", 24, 165e12, 165, 8.0),
    GpuModel("L40S", 45, 362e12, 350, 8.9),
    GpuModel("L40", 45, 181e12, 300, 8.9),
    GpuModel("L4", 22.5, 121e12, 72, 8.9),
    GpuModel("A40", 45, 149.7e12, 300, 8.6),
    GpuModel("A10", 22.5, 125e12, 150, 8.6),
    GpuModel("A10G", 22.5, 70e12, 300, 8.6),
    GpuModel("V100", 16, 125e12, 300, 7.0),
    GpuModel("V100-PCIe", 16, 112e12, 250, 7.0),
    GpuModel("T4", 15, 65e12, 70, 7.5),
    GpuModel("RTX-PRO-6000", 96, 503.8e12, 600, 12.0),
    GpuModel("RTX-6000-Ada", 48, 364.2e12, 300, 8.9),
    GpuModel("RTX-A6000", 48, 154.8e12, 300, 8.6),
    GpuModel("RTX-5090", 32, 209.5e12, 575, 12.0),
    GpuModel("RTX-5080", 16, 112.6e12, 360, 12.0),
    GpuModel("RTX-4090", 24, 165.2e12, 450, 8.9),
    GpuModel("RTX-4080", 16, 97.5e12, 320, 8.9),
    GpuModel("RTX-3090", 24, 71e12, 350, 8.6),
)

# Words of a name that do not change how fast it is.
_MEMORY = re.compile(r"(\d+)GB?")
_PLAIN = re.compile(r"NVIDIA|TESLA|GEFORCE|RTX|BLACKWELL|WORKSTATION|SERVER|GENERATION|EDITION|SXM\d?|HBM\w+|\d+GB?")


def find_gpu(name: str) -> GpuModel | None:
    """The GPU of that name, as its driver or a person writes it; None for one that is not listed, or a slice of one.

    >>> [found.name if (found := find_gpu(name)) else None for name in ("NVIDIA H100 80GB HBM3", "4090", "Tesla T4", "H100 MIG 1g.10gb")]
    ['H100', 'RTX-4090', 'T4', None]
    """
    words = _words(name)
    return next((one for one in GPU_MODELS if _words(one.name) == words), None) if words else None


def memory_in(name: str) -> int | None:
    """GB that a name states, as that of an A100-40GB does.

    >>> memory_in("A100-40GB"), memory_in("H100")
    (40, None)
    """
    found = next(filter(None, map(_MEMORY.fullmatch, _split(name))), None)
    return int(found[1]) if found else None


def gpu_words(name: str, memory_gib: float) -> str:
    """A GPU as `--on` takes it.

    >>> gpu_words("NVIDIA A100-SXM4-40GB", 39.4), gpu_words("Tesla T4", 15), gpu_words("GPU", 24)
    ('A100-39GB', 'T4', '24GB')
    """
    known, memory = find_gpu(name), f"{memory_gib:.0f}GB"
    if known is None:
        return memory
    return known.name if memory_gib == known.memory_gib else f"{known.name}-{memory}"


def _split(name: str) -> list[str]:
    return re.split(r"[\s_-]+", name.upper().strip())


def _words(name: str) -> set[str]:
    return {word for word in _split(name) if not _PLAIN.fullmatch(word)}
