"""Benchmarks run from a fresh clone, as miniatures, and show no speed where the sides did not do the same work."""

import subprocess
import sys

import pytest

from sft.recipe.schema import REPOSITORY

pytestmark = pytest.mark.slow
BENCHMARKS = REPOSITORY / "benchmarks"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


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


@pytest.mark.parametrize(
    ("arms", "count"),
    [pytest.param(["C"], 1, id="ours"), pytest.param(["A", "B", "S", "ladder"], 3 + 5, id="rest", marks=pytest.mark.extra)],
)  # fmt: skip
def test_every_arm_of_the_gpu_benchmark_trains_a_miniature_on_a_cpu(arms: list[str], count: int) -> None:
    ended = run("throughput_gpu.py", "--size", "tiny", "--steps", "1", "--arm", *arms)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("same work, first loss") == count
    assert "no speed is shown" in ended.stdout
    assert "MFU" not in ended.stdout


def test_kernels_agree_on_a_cpu_and_need_a_gpu_for_a_speed() -> None:
    ended = run("kernels_gpu.py", "--cpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("same output and gradients") == 2
    refused = run("kernels_gpu.py")
    assert refused.returncode == 2
    assert refused.stdout.count("\n") == 1


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


def test_transformers_saving_and_ours_write_the_same_tensors() -> None:
    ended = run("checkpoint_cost.py", "--size", "tiny", "--rounds", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Same work: both wrote the same" in ended.stdout
    assert ended.stdout.count("transformers, synced") == 4
