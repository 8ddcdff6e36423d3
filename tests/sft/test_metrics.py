import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from sft.hardware import Gpu, Hardware
from sft.metrics import PEAK_FLOPS, Metrics, model_flops_utilization, peak_memory_gib

CPU = Hardware(None, 1, 1, 2, 16.0)
KEYS = ("step epoch loss grad_norm learning_rate tokens_seen tokens_per_second mfu peak_memory_gib seconds").split()


def h100(ranks: int = 1, name: str = "NVIDIA H100 80GB HBM3") -> Hardware:
    return Hardware(Gpu(name, 80.0, 9.0), ranks, ranks, 16, 128.0)


def test_utilization_is_six_flops_a_parameter_and_token() -> None:
    # 6 x 3e9 x 40,000 = 7.2e14 FLOP/s, of 8 x 989e12
    assert model_flops_utilization(3_000_000_000, 40_000, h100(8), True) == pytest.approx(7.2e14 / (8 * 989e12))
    assert model_flops_utilization(3_000_000_000, 40_000, h100(8), False) == pytest.approx(4.8e14 / (8 * 989e12))
    twice = model_flops_utilization(3_000_000_000, 80_000, h100(16), True)
    assert twice == model_flops_utilization(3_000_000_000, 40_000, h100(8), True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", None),
        ("NVIDIA H20", None),
        ("Tesla V100-SXM2-32GB", None),
        ("GPU", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_or_unknown(name: str, peak: float | None) -> None:
    expected = None if peak is None else 6e18 / peak
    assert model_flops_utilization(10**9, 1e9, h100(1, name), True) == (expected and pytest.approx(expected))
    assert model_flops_utilization(10**9, 1e9, CPU, True) is None


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL"])
def test_a_slower_gpu_of_the_same_name_is_not_measured_by_the_faster_ones_peak(name: str) -> None:
    """By NVIDIA's data sheets 756e12 and 835e12."""
    utilization = model_flops_utilization(10**9, 1e9, h100(1, name), True)
    assert utilization is None or utilization > 6e18 / 900e12


def test_the_peaks_are_in_flops_and_not_in_teraflops() -> None:
    assert all(5e13 < peak < 5e15 for peak in PEAK_FLOPS.values())


def test_the_memory_of_this_process_is_in_gibibytes() -> None:
    assert 0.01 < peak_memory_gib() < 64


class Steps:
    """Drives the callback as the trainer does."""

    def __init__(self, file: Path, first: bool = True, start: int = 0, hardware: Hardware = CPU) -> None:
        self.metrics = Metrics(file, hardware, True)
        self.state = TrainerState(global_step=start, max_steps=20, is_world_process_zero=first)
        self.metrics.on_train_begin(None, self.state, TrainerControl(), model=torch.nn.Linear(9, 10))

    def log(self, step: int, tokens: int, **values: Any) -> None:
        self.state.global_step, self.state.epoch = step, step / 10
        logs = {"loss": 1 / step, "grad_norm": 0.5, "learning_rate": 2e-5, "num_tokens": tokens} | values
        self.metrics.on_log(None, self.state, TrainerControl(), logs=logs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def tick(seconds: float) -> None:
        now[0] += seconds

    return tick


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_holds_what_was_measured(tmp_path: Path, clock: Callable[[float], None]) -> None:
    steps = Steps(tmp_path / "m.jsonl", hardware=h100(2))
    clock(2)
    steps.log(1, 1000)
    clock(4)
    steps.log(5, 7000)
    first, second = lines(tmp_path / "m.jsonl")
    assert list(first) == list(second) == KEYS
    assert (first["step"], first["loss"], first["learning_rate"], first["seconds"]) == (1, 1.0, 2e-5, 2)
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (1000 / 2, 6000 / 4)
    assert (first["tokens_seen"], second["tokens_seen"]) == (1000, 7000)
    assert second["mfu"] == pytest.approx(6 * 100 * 1500 / (2 * 989e12))  # a 9 x 10 layer and its bias: 100 parameters


def test_what_is_printed_is_what_is_written(
    tmp_path: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(tmp_path / "m.jsonl")
    clock(30)
    steps.log(5, 60_000)
    assert capsys.readouterr().out == "step  5/20  loss 0.2000  lr 2.00e-05  2,000 tokens/s  ETA 0:01:30\n"


def test_other_ranks_write_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Steps(tmp_path / "m.jsonl", first=False).log(1, 1000)
    assert not (tmp_path / "m.jsonl").exists()
    assert capsys.readouterr().out == ""


def test_a_log_without_a_loss_is_no_line(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "m.jsonl")
    steps.metrics.on_log(None, steps.state, TrainerControl(), logs={"train_runtime": 5.0})
    steps.metrics.on_log(None, steps.state, TrainerControl(), logs=None)
    assert lines(tmp_path / "m.jsonl") == []


def test_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "m.jsonl")
    for step in (1, 5, 10, 15):
        steps.log(step, 100 * step)
    resumed = Steps(tmp_path / "m.jsonl", start=10)
    resumed.log(15, 500)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 5, 10, 15]
    assert lines(tmp_path / "m.jsonl")[-1]["tokens_seen"] == 1500


def test_a_line_that_was_cut_off_does_not_stop_a_resume(tmp_path: Path) -> None:
    """The machine went down, or the disk was full, while it was written."""
    Steps(tmp_path / "m.jsonl").log(5, 500)
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    Steps(tmp_path / "m.jsonl", start=5).log(10, 500)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [5, 10]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 3, "tokens_seen": 5}\n')
    Steps(tmp_path / "m.jsonl").log(1, 10)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1]


def test_the_last_step_is_logged_wherever_it_falls(tmp_path: Path) -> None:
    steps, control = Steps(tmp_path / "m.jsonl"), TrainerControl()
    for step, logged in ((19, False), (20, True)):
        steps.state.global_step = step
        steps.metrics.on_step_end(None, steps.state, control)
        assert control.should_log is logged
