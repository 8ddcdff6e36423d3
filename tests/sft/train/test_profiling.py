import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from sft.train.profiling import RECORDED, SKIPPED, WARMUP, Profile, profile_window


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_window_never_wants_more_steps_than_there_are(on_gpu: bool) -> None:
    assert profile_window(0, on_gpu) is None
    assert profile_window(1, on_gpu) is None
    for steps in range(2, 40):
        window = profile_window(steps, on_gpu)
        assert window is not None
        assert window.warmup > 0 and window.recorded > 0
        assert window.skipped + window.warmup + window.recorded + window.memory <= steps


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_long_run_skips_warms_up_and_records(on_gpu: bool) -> None:
    window = profile_window(1000, on_gpu)
    assert window is not None
    assert (window.skipped, window.warmup, window.recorded, window.memory) == (SKIPPED, WARMUP, RECORDED, int(on_gpu))


def run(folder: Path, steps: int, max_steps: int, start: int = 0, rank: int = 0) -> Profile:
    """Steps of a run that each multiply once; it may end before max_steps."""
    profile = Profile(folder, rank, on_gpu=False)
    state, control = TrainerState(global_step=start, max_steps=max_steps), TrainerControl()
    profile.on_train_begin(None, state, control)
    for _ in range(steps):
        torch.ones(4, 4) @ torch.ones(4, 4)
        state.global_step += 1
        profile.on_step_end(None, state, control)
    profile.on_train_end(None, state, control)
    return profile


def multiplications(folder: Path, rank: int = 0) -> int:
    with gzip.open(folder / f"rank{rank}.json.gz") as file:
        return sum(event.get("name") == "aten::matmul" for event in json.load(file)["traceEvents"])


def test_the_steps_after_the_warm_up_are_traced_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "profile", steps=15, max_steps=115, start=100, rank=0)
    assert multiplications(tmp_path / "profile") == RECORDED
    shown = capsys.readouterr().out
    assert "Profile of steps 107 to 109" in shown
    assert str(tmp_path / "profile") in shown


def test_other_ranks_write_theirs_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "profile", steps=10, max_steps=10, rank=3)
    assert multiplications(tmp_path / "profile", rank=3) == RECORDED
    assert capsys.readouterr().out == ""


def test_a_short_run_traces_what_it_has_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "profile", steps=3, max_steps=3)
    assert multiplications(tmp_path / "profile") == 2
    shown = capsys.readouterr().out
    assert "only 3 steps are left of the 9 it takes" in shown
    assert "Profile of steps 2 to 3" in shown


def test_a_run_of_one_step_is_not_profiled_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "profile", steps=1, max_steps=1)
    assert not (tmp_path / "profile").exists()
    assert capsys.readouterr().out == "train.profile: 1 step is left, too few to profile.\n"


def test_a_run_that_ends_early_leaves_no_profiler_running(tmp_path: Path) -> None:
    for steps in (2, 5, 7):
        assert run(tmp_path / str(steps), steps=steps, max_steps=50)._profiler is None
    assert multiplications(tmp_path / "7") == 1
