import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pynvml
import pytest

from sft.errors import PlanError
from sft.launch.prepare import worker_count
from sft.launch.topology import read_topology
from sft.plan.gpus import GPU_MODELS, find_gpu
from sft.plan.hardware import (
    check_visible_gpus,
    cpu_cores,
    cpu_memory_gib,
    described_hardware,
    detect_hardware,
    visible_gpus,
)
from sft.plan.resolve import resolve_plan
from tests.fake_nvml import GIB, Device, FakeNvml
from tests.sft.plan.machines import QWEN, MakeRecipe

Machine = Callable[..., None]

TWO = (Device("GPU-aaaa-1111"), Device("GPU-bbbb-2222", memory=40 * GIB))
SLICES = [Device("MIG-1111", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 * GIB), Device("MIG-2222", "other", 10 * GIB)]
DIVIDED = (Device("GPU-aaaa-1111", slices=SLICES), Device("GPU-bbbb-2222", slices=[]))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these GPUs, or whose driver fails to start."""

    def build(*devices: Device, init: int | None = None) -> None:
        FakeNvml(list(devices), init).install(monkeypatch)

    return build


def test_there_is_a_process_for_each_gpu_and_the_smallest_decides(machine: Machine) -> None:
    machine(*TWO)
    assert read_topology().per_node == 2
    hardware = detect_hardware(2, 2)
    assert hardware.gpu is not None
    assert hardware.gpu.memory_gib == 40.0
    assert hardware.device == "2 x NVIDIA H100 80GB HBM3 (40 GiB)"


@pytest.mark.parametrize(
    ("visible", "count"),
    [("1,0", 2), ("", 0), ("0,7,1", 1), ("GPU-bbbb", 1)],
)
def test_only_the_gpus_that_cuda_would_show_are_counted(
    visible: str, count: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(*TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(visible_gpus()) == count


@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (None, [40]),
        ("MIG-2222", [10]),
        ("1", [80]),
        ("1,0", [40]),
    ],
)
def test_of_divided_gpus_there_is_one_slice(
    visible: str | None, memories: list[int], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(*DIVIDED)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.memory_gib for gpu in visible_gpus()] == memories


def test_several_slices_for_one_process_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(*DIVIDED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111,MIG-2222")
    with pytest.raises(PlanError, match=r"CUDA_VISIBLE_DEVICES=MIG-1111,MIG-2222.*one slice"):
        check_visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    check_visible_gpus()


def test_a_machine_without_a_driver_has_no_gpus(machine: Machine) -> None:
    machine(*TWO, init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert visible_gpus() == []


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training would start on the CPU."""
    machine(*TWO, init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)  # it was updated, and the machine was not restarted
    with pytest.raises(PlanError, match="does not list its GPUs"):
        visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_gpu_that_shares_the_memory_of_the_machine_is_a_gpu(machine: Machine) -> None:
    """Its driver has no number to tell."""
    machine(Device("GPU-cccc-3333", "NVIDIA GB10", None, (12, 1)))
    (gpu,) = visible_gpus()
    assert (gpu.name, gpu.compute_capability) == ("NVIDIA GB10", 12.1)
    assert gpu.memory_gib > 0


def test_more_processes_than_gpus_are_refused(machine: Machine) -> None:
    machine(*TWO)
    with pytest.raises(PlanError, match="3 processes were asked for on a machine with 2 visible GPUs"):
        detect_hardware(3, 3)
    assert detect_hardware(8, 2).ranks == 8  # four such machines


@pytest.mark.parametrize(
    ("words", "ranks", "per_node", "memory", "node_memory"),
    [
        ("8x80GB", 8, 8, 80, 1280),
        ("1X24g", 1, 1, 24, 48),
        ("16x40GiB", 16, 8, 40, 640),
        ("1x16x80GB", 16, 16, 80, 2560),
        ("3x2x24GB", 6, 2, 24, 96),
        ("2x8xh200+1000GB", 16, 8, 141, 1000),
        ("4xA100-40GB", 4, 4, 40, 320),
    ],
)
def test_a_machine_in_words(words: str, ranks: int, per_node: int, memory: int, node_memory: int) -> None:
    hardware = described_hardware(words)
    assert hardware.gpu is not None
    assert (hardware.ranks, hardware.ranks_per_node, hardware.gpu.memory_gib) == (ranks, per_node, memory)
    assert hardware.cpu_memory_gib == node_memory


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 6000", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA A10G", "A10G"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(driver: str, name: str | None) -> None:
    found = find_gpu(driver)
    assert (found and found.name) == name


def test_no_two_gpus_answer_to_one_name() -> None:
    assert [find_gpu(one.name) for one in GPU_MODELS] == list(GPU_MODELS)


@pytest.mark.parametrize(("words", "memory"), [("1xT4", 15), ("8xV100-32GB", 32)])
def test_a_gpu_without_bf16_is_planned_in_fp16(words: str, memory: float, make_recipe: MakeRecipe) -> None:
    hardware = described_hardware(words)
    assert hardware.gpu is not None
    plan = resolve_plan(make_recipe(), hardware, QWEN)
    assert (hardware.gpu.memory_gib, plan.precision.value, plan.attention.value) == (memory, "fp16", "sdpa")


@pytest.mark.parametrize("words", ["", "8", "0x80GB", "8x80TB", "12x80GB", "0x8x80GB", "8x80GB+", "8xH9000"])
def test_words_that_are_no_machine_are_quoted_back(words: str) -> None:
    with pytest.raises(PlanError, match=rf"--on {re.escape(words)}: .* for example 8x80GB"):
        described_hardware(words)


LIMITED = {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000", "job/memory.max": f"{GIB}"}


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("0::/\n", {"cpu.max": "200000 100000", "memory.max": f"{3 * GIB}"}, 2, 3),
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, 64, None),
        ("0::/job/step\n", LIMITED, 3, 1),  # a limit of any group around counts
        ("0::/../../other\n", {"cpu.max": "200000 100000"}, 2, None),  # in a container the path is the host's
        ("", {"cpu.max": "200000 100000"}, 64, None),
    ],
)
def test_a_container_has_what_its_control_groups_leave_it(
    own: str, files: dict[str, str], cores: int, memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__)
    monkeypatch.setattr("sft.plan.hardware._CGROUPS", tmp_path / "groups")
    monkeypatch.setattr("sft.plan.hardware._OWN_CGROUP", tmp_path / "own")
    assert (cpu_cores(), cpu_memory_gib()) == (cores, memory or 64)
    assert worker_count() == max(1, min(cores, 2 * ((memory or 64) - 1)))


@pytest.mark.parametrize(
    ("package", "module", "found"),
    [
        ("flash_attn_3", "flash_attn_interface.py", {"has_flash_attention_3", "has_varlen_fa3"}),
        ("flash_attn_4", "flash_attn/cute/interface.py", {"has_varlen_fa4"}),
        ("flash_attn", "flash_attn/__init__.py", {"has_flash_attention"}),
    ],
)
def test_flash_attention_is_known_by_its_package(
    package: str, module: str, found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).touch()
    facts = tmp_path / f"{package}-1.0.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hardware = asdict(detect_hardware(1, 1))
    assert {name for name in hardware if name.startswith(("has_flash", "has_varlen")) and hardware[name]} == found
