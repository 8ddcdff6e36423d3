"""Stands in for the NVIDIA driver's library: the functions of pynvml that sft/plan/hardware.py calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import pynvml
import pytest

GIB = 2**30


@dataclass
class Device:
    """A GPU or a slice of one; `lost`: the driver does not answer for it."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int | None = 80 * GIB
    capability: tuple[int, int] = (9, 0)
    slices: list[Device] | None = None
    lost: bool = False


@dataclass
class Memory:
    """As NVML's answer has it."""

    total: int


@dataclass
class FakeNvml:
    """A driver with these GPUs; `init` is what its start raises."""

    devices: list[Device] = field(default_factory=list)
    init: int | None = None
    driver: str = "580.65.06"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer in place of the driver, whatever hides its GPUs."""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name in vars(type(self)):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init is not None:
            raise pynvml.NVMLError(self.init)

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        if self.devices[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.devices[index]

    def nvmlDeviceGetUUID(self, device: Device) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetName(self, device: Device) -> str:  # noqa: N802
        return device.name

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:  # noqa: N802
        return device.capability

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Memory:  # noqa: N802
        if device.memory is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return Memory(device.memory)

    def nvmlDeviceGetMigMode(self, device: Device) -> tuple[int, int]:  # noqa: N802
        if device.slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return (int(bool(device.slices)),) * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:  # noqa: N802
        if index % 2 or index // 2 >= len(device.slices or []):  # instances have gaps between them
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        assert device.slices
        return device.slices[index // 2]
