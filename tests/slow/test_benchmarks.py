"""Benchmarks run from a fresh clone, as miniatures, and show no speed where the sides did not do the same work."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.plan.hardware import Gpu, Hardware
from sft.plan.memory_estimate import GIB, MemoryEstimate
from sft.recipe.schema import REPOSITORY

pytestmark = pytest.mark.slow
BENCHMARKS = REPOSITORY / "benchmarks"
DEFAULT = "laws kernels model ours article memory tuning profile".split()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1400)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("theirs", "agree"),
    [([1.0, 2.00001], True), ([1.0, 2.001], False), ([1.0], False), ([1.0, float("nan")], False)],
)
def test_sides_whose_losses_differ_show_no_speed(
    theirs: list[float], agree: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from side_by_side import check_agreement

    losses = {"ours": [1.0, 2.0], "theirs": theirs}
    if agree:
        check_agreement(losses, "a step")
        assert "agree to 1.0e-05" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit):
            check_agreement(losses, "a step")
        assert "no speed is shown" in capsys.readouterr().out


@pytest.mark.extra
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("parts", [DEFAULT, ["model", "bare", "packed", "ladder"]], ids=["default", "longer"])
def test_each_part_of_the_gpu_benchmark_runs_on_a_cpu(parts: list[str], tmp_path: Path) -> None:
    ended = run("gpu.py", "--cpu", "--out", str(tmp_path), "--work", str(tmp_path), "--parts", *parts)
    assert ended.returncode == 0, ended.stdout + (tmp_path / "log.txt").read_text()[-5000:]
    found = {line["part"]: line.get("rows", []) for line in lines_of(tmp_path)}
    assert set(found) == {"machine", *parts}
    for part, count in {"ours": 2, "article": 1, "bare": 1, "packed": 1, "ladder": 5}.items():
        assert [row["text"] for row in found.get(part, ())] == ["ran"] * (count if part in parts else 0)
    assert all(row["peak_gib"] > 0 for row in found.get("memory", ()))
    assert "tuning" not in parts or found["tuning"][-1]["what"] == "chosen"
    assert "profile" not in parts or {"step", "`aten::mm`"} <= {row["what"] for row in found["profile"]}
    assert "MFU" not in ended.stdout.replace("MFU 55 %", "")  # the goal
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # the model is gone


@pytest.mark.extra
def test_a_part_that_hangs_or_fails_costs_that_part(tmp_path: Path) -> None:
    words = ["--parts", "laws", "tuning", "kernels", "--limit", "laws=1"]
    ended = run("gpu.py", "--cpu", "--out", str(tmp_path), "--work", str(tmp_path), *words)
    assert ended.returncode == 1
    statuses = {line["part"]: line.get("status") for line in lines_of(tmp_path)}
    assert statuses == {
        "machine": None,
        "laws": "stopped after 1 s",
        "tuning": "failed with status 1",
        "kernels": "done",
    }
    assert "Failed or stopped: laws, tuning" in ended.stdout
    shown = run("gpu.py", "--table", str(tmp_path)).stdout
    assert shown.strip() in ended.stdout
    assert "stopped after 1 s" in shown
    assert shown.count("agrees to") == 2
    assert shown.count("not measured") == len(DEFAULT) - 3


def test_a_part_leaves_no_process_behind() -> None:
    program = f"""
import subprocess, sys, psutil
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
gpu.adopt_orphans()
subprocess.run(["bash", "-c", "setsid sleep 600 & setsid bash -c 'sleep 600 & sleep 600' & sleep 0.2"])
print(len(psutil.Process().children(recursive=True)))
gpu.end_descendants()
print(len(psutil.Process().children(recursive=True)))
"""
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split() == ["4", "0"]


def test_the_gpu_benchmark_needs_a_gpu_but_for_its_table(tmp_path: Path) -> None:
    refused = run("gpu.py", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert refused.stdout.count("\n") == 1
    assert run("gpu.py", "--table", str(tmp_path)).stdout.count("not measured") == len(DEFAULT)


def test_a_side_that_computes_something_else_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_parts
    import kernels_gpu

    with pytest.raises(SystemExit, match="no speed"):
        gpu_parts.check("ours", 6.31, 6.32)
    gpu_parts.check("ours", 6.3171, 6.3170)
    said = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried",
        "Rank 0 ran out of GPU memory while step 3",
    )  # tests/slow/test_out_of_memory.py
    assert all(re.search(gpu_parts.OUT_OF_MEMORY, words) for words in said)
    weight = torch.ones(8, requires_grad=True)
    sides = {"sum": lambda: (weight.sum(), [weight]), "wrong": lambda: ((weight * 1.001).sum(), [weight])}
    assert kernels_gpu.distances(sides, "sum") == {"sum": 0.0, "wrong": pytest.approx(1e-3, rel=1e-3)}


def test_planned_memory_is_compared_without_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_parts import allocated

    parts, hardware = (
        {"weights": 5.5, "activations": 68.5, "reserve": 5.5},
        Hardware(Gpu("H100", 80.0, 9.0), 1, 1, 16, 200.0),
    )
    sizes = MemoryEstimate({name: size * GIB for name, size in parts.items()}, 0.0, hardware).as_json()
    assert allocated({"memory": sizes}) == pytest.approx(74.0)
    assert allocated({"memory": None}) is None


def test_a_profile_counts_time_in_which_any_kernel_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_trace import summary

    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [event("kernel", "a", 0, 2000), event("kernel", "b", 1000, 2000), event("kernel", "a", 6000, 2000)]
    events += [event("cuda_runtime", "cudaStreamSynchronize", 3000, 1000), event("cpu_op", "aten::mm", 0, 9000)]
    events += [event("user_annotation", f"ProfilerStep#{number}", 0, 9000) for number in (7, 8)]
    events += [event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 8000, 500)]
    found = {row.pop("what"): row for row in summary(events)}
    assert found["step"] == {"milliseconds": 4.0}
    assert found["of it the GPU computes"] == {"share": 5 / 8}
    assert found["host waits for the GPU"] == {"times": 0.5, "milliseconds": 0.5}
    assert found["copies to the host"] == {"times": 0.5, "milliseconds": 0.25}
    assert found["`a`"] == {"milliseconds": 2.0, "share": 0.5}


@pytest.mark.extra
def test_padded_packed_and_ours_train_the_same_documents() -> None:
    ended = run("packing_cpu.py", "--max-length", "256", "--tokens", "2048", "--rounds", "1", "--steps", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Same work" in ended.stdout
    assert "ours to padded" in ended.stdout


@pytest.mark.extra
def test_our_entry_a_bare_trainer_and_trl_sft_train_the_same() -> None:
    ended = run("overhead.py", "--rounds", "1", "--steps", "30")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("Same work") == 2
    assert "milliseconds per step" in ended.stdout


@pytest.mark.extra
def test_transformers_saving_and_ours_write_the_same_tensors() -> None:
    ended = run("checkpoint_cost.py", "--size", "tiny", "--rounds", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Same work: both wrote the same" in ended.stdout
    assert ended.stdout.count("transformers, synced") == 4
