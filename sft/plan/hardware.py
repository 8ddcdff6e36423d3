"""Detects what the machine has: GPUs, cores, memory; or describes one that is not here, for `--on 8x80GB` or `--on 8xH100`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pynvml

from sft.errors import PlanError
from sft.plan.gpus import GPU_MODELS, find_gpu, memory_in

UNNAMED = "GPU"
"""The name of a GPU of which only the memory is known."""

_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
    """Of one node."""
    has_flash_attention: bool = False
    has_flash_attention_3: bool = False
    """flash-attn 3 for Hopper, a package of its own."""
    has_varlen_fa3: bool = False
    has_varlen_fa4: bool = False
    """The package is installed, and torch can switch its own FlashAttention to it."""
    is_described: bool = False
    """It is not here: nobody knows what is installed there."""

    has_bitsandbytes: bool = True
    """Of a machine that is not here it is assumed."""

    @property
    def device(self) -> str:
        """A phrase for tables: `8 x NVIDIA H100 (80 GB)`."""
        if self.gpu is None:
            return f"CPU, {self.cpu_cores} cores, {self.ranks} process{'es' if self.ranks > 1 else ''}"
        return f"{self.ranks} x {self.gpu.name} ({self.gpu.memory_gib:.0f} GiB)"

    @property
    def noun(self) -> str:
        """What a rank is called in messages."""
        return "GPUs" if self.gpu else "processes"


def whole_number(name: str, default: int, least: int, most: int | None = None) -> int:
    """A variable of the environment as a number, or the default where it is empty. Raises PlanError if it is none, or out of bounds."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or int(text) < least or (most is not None and int(text) > most):
        limit = "" if most is None else f" and at most {most}"
        raise PlanError(f"{name}={text}: must be a whole number of at least {least}{limit}.")
    return int(text)


@dataclass(frozen=True)
class _Device:
    """A GPU as the driver lists it, and its slices (MIG)."""

    index: str
    uuid: str
    gpu: Gpu
    slices: tuple[_Device, ...] = ()


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use; none where there is no driver. Honours CUDA_VISIBLE_DEVICES. Raises PlanError as _devices.

    Of GPUs that are divided into slices (MIG), CUDA shows a process one slice, and nothing else.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _entries(visible):
        return []
    devices = _devices()
    # CUDA ignores the first entry that it does not know and all after it.
    named = [str(device.index) for device in devices] if visible is None else _entries(visible)
    found = list(takewhile(lambda device: device is not None, (_matching(entry, devices) for entry in named)))
    slices = [device for device in found if device and device.uuid.startswith("MIG-")]
    return [device.gpu for device in slices[:1] or found if device]


def check_visible_gpus() -> None:
    """Refuse a CUDA_VISIBLE_DEVICES of which CUDA would show a part only (PlanError).

    `-1` and an empty value hide all GPUs and are no mistake.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = _entries(visible)
    if named[:1] in ([], ["-1"], ["NoDevFiles"]):
        return
    if not (devices := _devices()):
        return
    found = [_matching(entry, devices) for entry in named]
    slices = any(device and device.uuid.startswith("MIG-") for device in found)
    if len(set(named)) < len(named) or None in found or (slices and len(named) > 1):
        raise PlanError(
            f"CUDA_VISIBLE_DEVICES={visible}: CUDA would not show all of them. Name GPUs that are there (this machine has {len(devices)}, "
            "counted from 0), each once, or one slice of a GPU (MIG)."
        )


def _devices() -> list[_Device]:
    """What NVML lists; empty without a driver. Raises PlanError if a driver is there and does not answer, as after its update."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_device(str(index), handle) for index, handle in enumerate(handles)]
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        raise PlanError(
            f"The NVIDIA driver is installed and does not list its GPUs: {error}. See what nvidia-smi says; often a restart helps. "
            "To train on the CPU, set CUDA_VISIBLE_DEVICES= (empty)."
        ) from None


def driver_version() -> str | None:
    """Of the NVIDIA driver, such as `580.65.06`; None where there is none."""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _device(index: str, handle: Any) -> _Device:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)

    def described(part: Any) -> Gpu:
        return Gpu(pynvml.nvmlDeviceGetName(part), _memory_gib(part), float(f"{major}.{minor}"))

    slices = tuple(_Device("", pynvml.nvmlDeviceGetUUID(one), described(one)) for one in _slices(handle))
    return _Device(index, pynvml.nvmlDeviceGetUUID(handle), described(handle), slices)


def _slices(handle: Any) -> list[Any]:
    """Handles of a GPU's slices; none where it is whole, or is of a kind that cannot be divided."""
    found = []
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
    except pynvml.NVMLError_NotSupported:
        return []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return found


def _memory_gib(handle: Any) -> float:
    try:
        return float(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 2**30
    except pynvml.NVMLError_NotSupported:  # a GPU that shares the machine's memory has no number of its own
        return cpu_memory_gib()


def _entries(visible: str) -> list[str]:
    return [entry for part in visible.split(",") if (entry := part.strip())]


def _matching(entry: str, devices: list[_Device]) -> _Device | None:
    """The GPU or the slice that CUDA takes for an entry; of a divided GPU its first slice."""
    for device in devices:
        for one in device.slices:
            if one.uuid == entry:
                return one
        if entry == device.index or device.uuid.startswith(entry):
            return device.slices[0] if device.slices else device
    return None


def cpu_memory_gib() -> float:
    """Memory that this process may use: the machine's, or less where a cgroup (a container, Slurm) limits it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _cgroups():
        with suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int((group / "memory.max").read_text()))
    return min(limits) / 2**30


def cpu_cores() -> int:
    """Cores that this process may use: by its affinity, or fewer where a cgroup limits it."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group in _cgroups():
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def _cgroups() -> list[Path]:
    """The folders of this process's cgroup (version 2) and of all groups around it."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    # In a container the path may be the host's, and not be there; the groups around it are.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [_CGROUPS.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _is_installed(module: str, distribution: str) -> bool:
    # By the distribution too, as transformers does: flash-attn 4 alone is also a module named flash_attn.
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return find_spec(module) is not None


def _torch_switches_to(name: str) -> bool:
    """By the file of torch that does: importing it takes seconds."""
    torch = find_spec("torch")
    return torch is not None and (Path(str(torch.origin)).parent / "nn" / "attention" / f"_{name}.py").is_file()


def detect_hardware(ranks: int, ranks_per_node: int) -> Hardware:
    """This machine, for a job of so many processes. Raises PlanError if more processes than GPUs were requested."""
    gpus = visible_gpus()
    if gpus and ranks_per_node > len(gpus):
        raise PlanError(
            f"{ranks_per_node} processes were asked for on a machine with {len(gpus)} visible GPUs. Start at most one for each GPU."
        )
    has_3 = _is_installed("flash_attn_interface", "flash-attn-3")
    return Hardware(
        gpu=min(gpus, key=lambda gpu: gpu.memory_gib) if gpus else None,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        cpu_cores=cpu_cores(),
        cpu_memory_gib=cpu_memory_gib(),
        has_flash_attention=_is_installed("flash_attn", "flash-attn"),
        has_flash_attention_3=has_3,
        has_varlen_fa3=has_3 and _torch_switches_to("fa3"),
        has_varlen_fa4=_is_installed("flash_attn", "flash-attn-4") and _torch_switches_to("fa4"),
        has_bitsandbytes=find_spec("bitsandbytes") is not None,
    )


def described_hardware(description: str) -> Hardware:
    """A machine that is not here, in words: [nodes x] GPUs x name or memory of each [+ memory of a node]. Raises PlanError for other words.

    >>> described_hardware("8x80GB").device
    '8 x GPU (80 GiB)'
    >>> described_hardware("2x8xH100+1000GB").device
    '16 x H100 (80 GiB)'
    """
    form = r"(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x(?P<kind>[\w -]+?)(?:\+(?P<memory>\d+)(?:GB|GiB|G)?)?"
    match = re.fullmatch(form, description, flags=re.IGNORECASE)
    nodes, gpus = (int(match["nodes"] or 1), int(match["gpus"])) if match else (0, 0)
    if match and not match["nodes"] and gpus > 8 and gpus % 8 == 0:
        nodes, gpus = gpus // 8, 8
    gpu = _described_gpu(match["kind"]) if match else None
    if match is None or gpu is None or 0 in (nodes, gpus) or (gpus > 8 and not match["nodes"]):
        raise PlanError(
            f"--on {description}: write the number of GPUs and the memory or the name of each, for example 8x80GB or 8xH100; with nodes "
            f"before it, 2x8x80GB; with the memory of a node behind it, 8x80GB+1000GB. Names: {', '.join(one.name for one in GPU_MODELS)}."
        )
    return machine(gpu, nodes, gpus, float(match["memory"] or 0))


def _described_gpu(kind: str) -> Gpu | None:
    """A GPU by its name or its memory; None for another word."""
    if known := find_gpu(kind):
        return Gpu(known.name, memory_in(kind) or known.memory_gib, known.compute_capability)
    memory = re.fullmatch(r"(\d+)(?:GB|GiB|G)?", kind, flags=re.IGNORECASE)
    # Every GPU sold with 24 GB or more in the last years has bf16.
    return Gpu(UNNAMED, int(memory[1]), 8.0) if memory and int(memory[1]) else None


def machine(gpu: Gpu, nodes: int, gpus: int, cpu_memory_gib: float = 0) -> Hardware:
    """A machine to do arithmetic for; without a number a node has twice the memory of its GPUs, as rented ones mostly have."""
    memory = cpu_memory_gib or 2 * gpus * gpu.memory_gib
    return Hardware(gpu, nodes * gpus, gpus, cpu_cores(), memory, is_described=True)
