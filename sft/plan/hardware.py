"""Detects what the machine has: GPUs, cores, memory; and how many processes the job has.

detect_hardware(ranks=8)        this machine
described_hardware("8x80GB")    a machine that is not here, for `--plan --on 8x80GB`
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sft.errors import PlanError

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory_gib: float
    compute_capability: float
    """8.0 and above have bf16; 9.0 is Hopper."""


@dataclass(frozen=True)
class Hardware:
    """The machine as the plan sees it. All its GPUs are of one model."""

    gpu: Gpu | None
    """None: the job runs on the CPU."""

    ranks: int
    """Processes of the whole job; one GPU each."""

    ranks_per_node: int
    cpu_cores: int
    cpu_memory_gib: float
    """Of one machine."""

    has_flash_attention: bool = False
    """The flash-attn package is installed."""

    has_flash_attention_3: bool = False
    """flash-attn 3, for Hopper, is installed: a package of its own."""

    cpu_memory_assumed: bool = False
    """Nobody has said how much memory the machine has."""

    @property
    def device(self) -> str:
        """A phrase for tables: `8 x NVIDIA H100 (80 GB)`."""
        if self.gpu is None:
            return f"CPU, {self.cpu_cores} cores, {self.ranks} process{'es' if self.ranks > 1 else ''}"
        return f"{self.ranks} x {self.gpu.name} ({self.gpu.memory_gib:.0f} GiB)"


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use, by nvidia-smi; none where there is no driver. Honours CUDA_VISIBLE_DEVICES."""
    gpus = _all_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for _, gpu in gpus.values()]
    chosen = []
    for entry in _entries(visible):
        match = _matching(entry, gpus)
        if not match:  # CUDA ignores the first entry that it does not know and all after it
            break
        chosen.append(match[0])
    return chosen


def unknown_gpus() -> tuple[list[str], int]:
    """What CUDA_VISIBLE_DEVICES names and is not there, and how many GPUs are. `-1` and `` stand for none and are no mistake."""
    gpus, visible = _all_gpus(), _entries(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if not gpus or visible[:1] in ([], ["-1"], ["NoDevFiles"]):
        return [], len(gpus)
    return [entry for entry in visible if not _matching(entry, gpus)], len(gpus)


def _all_gpus() -> dict[str, tuple[str, Gpu]]:
    """By index: the UUID and what it is."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return {
        index: (uuid, Gpu(name, _memory_gib(mib), float(capability))) for index, uuid, name, mib, capability in rows
    }


def _entries(visible: str) -> list[str]:
    return [entry for part in visible.split(",") if (entry := part.strip())]


def _matching(entry: str, gpus: dict[str, tuple[str, Gpu]]) -> list[Gpu]:
    # A slice of a GPU (MIG) is not in this list; it is taken for a whole one of its kind.
    return [
        gpu
        for index, (uuid, gpu) in gpus.items()
        if entry == index or uuid.startswith(entry) or entry.startswith("MIG-")
    ]


def _memory_gib(mebibytes: str) -> float:
    # A GPU that shares the machine's memory has no number of its own.
    return float(mebibytes) / 1024 if mebibytes.replace(".", "").isdecimal() else cpu_memory_gib()


def cpu_memory_gib() -> float:
    """Memory that this process may use: the machine's, or less where a control group (a container, Slurm) limits it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # not of this version, or "max"
                limits.append(int((group / name).read_text()))
    return min(limits) / 2**30


def cpu_cores() -> int:
    """Processors that this process may use, with its share of them where a control group limits that."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group in _control_groups("cpu"):
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            cores = min(cores, int(quota) / int(period) if int(quota) > 0 else cores)
    return max(1, int(cores))


def _control_groups(controller: str) -> list[Path]:
    """The folders of the control groups that this process is in, of version 2 and version 1, with all groups around them."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CONTROL_GROUPS / controller if controllers else _CONTROL_GROUPS
        # In a container the path may be the host's, and not be there; the groups around it are.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        groups += [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return groups


def _is_installed(module: str, distribution: str) -> bool:
    # By the distribution too, as transformers goes: flash-attn 4 alone is also a module named flash_attn.
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return find_spec(module) is not None


def detect_hardware(ranks: int | None = None, ranks_per_node: int | None = None) -> Hardware:
    """This machine.

    Args:
        ranks: Processes of the whole job. None: what a launcher has set in the environment, else one for each GPU.
        ranks_per_node: Of them on this machine. None: likewise.

    Raises:
        PlanError: More processes than GPUs were asked for.
    """
    gpus = visible_gpus()
    default = max(1, len(gpus))
    if ranks is None:
        ranks = int(os.environ.get("WORLD_SIZE", default))
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks, default)))
    per_node = ranks_per_node or ranks
    if gpus and per_node > len(gpus):
        raise PlanError(
            f"{per_node} processes were asked for on a machine with {len(gpus)} visible GPUs. Start at most one for each GPU."
        )
    return Hardware(
        gpu=min(gpus, key=lambda gpu: gpu.memory_gib) if gpus else None,
        ranks=ranks,
        ranks_per_node=per_node,
        cpu_cores=cpu_cores(),
        cpu_memory_gib=cpu_memory_gib(),
        has_flash_attention=_is_installed("flash_attn", "flash-attn"),
        has_flash_attention_3=_is_installed("flash_attn_interface", "flash-attn-3"),
    )


def described_hardware(description: str) -> Hardware:
    """A machine in words, to plan for one that is not here: [machines x] GPUs x memory of each [+ memory of a machine].

    Without the last, a machine is taken to have twice the memory of its GPUs, as rented ones mostly have.

    >>> described_hardware("8x80GB").device
    '8 x GPU (80 GiB)'
    >>> described_hardware("2x8x80GB+1000GB").ranks
    16

    Raises:
        PlanError: The words are not of that form.
    """
    unit = "(?:GB|GiB|G)?"
    match = re.fullmatch(rf"(?:(\d+)x)?(\d+)x(\d+){unit}(?:\+(\d+){unit})?", description, flags=re.IGNORECASE)
    if not match or min(int(number) for number in match.groups() if number) < 1:
        raise PlanError(
            f"--on {description}: write the number of GPUs and the memory of each, for example 8x80GB; with machines before it, "
            "2x8x80GB; with the memory of a machine behind it, 8x80GB+1000GB."
        )
    count, memory = int(match[2]), float(match[3])
    if match[1] is None and count > 8 and count % 8:
        raise PlanError(
            f"--on {description}: {count} GPUs are no whole number of machines with 8. Write the number of machines first, for example "
            f"{-(-count // 8)}x{count // -(-count // 8)}x{match[3]}GB."
        )
    per_node = count if match[1] else min(count, 8)
    cpu_memory = float(match[4]) if match[4] else 2 * per_node * memory
    return Hardware(
        # Every GPU sold with 24 GB or more in the last years has bf16.
        Gpu("GPU", memory, 8.0),
        ranks=int(match[1] or 1) * count,
        ranks_per_node=per_node,
        cpu_cores=cpu_cores(),
        cpu_memory_gib=cpu_memory,
        cpu_memory_assumed=match[4] is None,
    )
