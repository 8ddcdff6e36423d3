import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from sft.train.profiling import RECORDED, SKIPPED, WARMUP, Profile, profile_window


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_window_never_needs_more_steps_than_there_are(on_gpu: bool) -> None:
    assert profile_window(0, on_gpu) is profile_window(1, on_gpu) is None
    for steps in range(2, 40):
        window = profile_window(steps, on_gpu)
        assert window is not None
        assert window.warmup > 0 and window.recorded > 0
        assert window.skipped + window.warmup + window.recorded + window.memory <= steps
    assert (window.skipped, window.warmup, window.recorded, window.memory) == (SKIPPED, WARMUP, RECORDED, int(on_gpu))


@pytest.mark.parametrize(
    ("steps", "max_steps", "traced", "said"),
    [
        (15, 115, RECORDED, "Profile of steps 107 to 109"),
        (3, 3, 2, "only 3 steps are left of the 9 it takes"),
        (1, 1, 0, "1 step is left, too few to profile"),
        (7, 50, 1, ""),  # ends before its window does
    ],
)
def test_the_steps_of_the_window_are_traced_and_no_others(
    steps: int, max_steps: int, traced: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Profile(tmp_path, rank=0, on_gpu=False)
    start = 100 if max_steps > 100 else 0
    state, control = TrainerState(global_step=start, max_steps=max_steps), TrainerControl()
    profile.on_train_begin(None, state, control)
    for _ in range(steps):
        torch.ones(4, 4) @ torch.ones(4, 4)
        state.global_step += 1
        profile.on_step_end(None, state, control)
    profile.on_train_end(None, state, control)
    assert said in capsys.readouterr().out
    if not traced:
        assert not list(tmp_path.iterdir())
        return
    with gzip.open(tmp_path / "rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == traced
