"""Says of a GPU by its name how large and how fast it is. A new GPU is a row.

The numbers are those of NVIDIA's data sheets of each product, of the RTX 4090 those of its white paper on the Ada architecture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """What a data sheet says of one GPU."""

    name: str
    memory_gb: int
    bf16_flops: float
    """Dense, with sums in fp32, FLOP/s."""
    watts: int
    """The most that the board draws."""
    compute_capability: float


GPU_MODELS = (
    GpuModel("H200", 141, 989e12, 700, 9.0),
    GpuModel("H200-NVL", 141, 835e12, 600, 9.0),
    GpuModel("H100", 80, 989e12, 700, 9.0),
    GpuModel("H100-NVL", 94, 835e12, 400, 9.0),
    GpuModel("H100-PCIe", 80, 756e12, 350, 9.0),
    GpuModel("A100", 80, 312e12, 400, 8.0),
    GpuModel("A100-PCIe", 80, 312e12, 300, 8.0),
    GpuModel("L40S", 48, 362e12, 350, 8.9),
    GpuModel("A10G", 24, 70e12, 300, 8.6),
    GpuModel("RTX-4090", 24, 165e12, 450, 8.9),
)

# Words of a name that do not change how fast it is.
_MEMORY = re.compile(r"(\d+)GB?")
_PLAIN = re.compile(r"NVIDIA|GEFORCE|RTX|SXM\d?|HBM\w+|\d+GB?")


def find_gpu(name: str) -> GpuModel | None:
    """The GPU of that name, as its driver or a person writes it; None for one that is not listed, or a slice of one.

    >>> [found.name if (found := find_gpu(name)) else None for name in ("NVIDIA H100 80GB HBM3", "4090", "A10", "H100 MIG 1g.10gb")]
    ['H100', 'RTX-4090', None, None]
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


def _split(name: str) -> list[str]:
    return re.split(r"[\s_-]+", name.upper().strip())


def _words(name: str) -> set[str]:
    return {word for word in _split(name) if not _PLAIN.fullmatch(word)}
