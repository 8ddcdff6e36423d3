import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from sft.train.profiling import RECORDED, Profile


@pytest.mark.parametrize(
    ("steps", "max_steps", "traced", "said"),
    [
        (15, 115, RECORDED, "Profile, one file per rank"),
        (8, 8, None, "8 steps are left and 9 are needed"),
        (7, 50, 1, "Profile"),  # training ends before the profile does
    ],
)
def test_the_steps_after_the_warm_up_are_traced_and_no_others(
    steps: int, max_steps: int, traced: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Profile(tmp_path, on_gpu=False)
    state = TrainerState(global_step=100 if max_steps > 100 else 0, max_steps=max_steps)
    profile.on_train_begin(None, state, TrainerControl())
    for _ in range(steps):
        torch.ones(4, 4) @ torch.ones(4, 4)
        state.global_step += 1
        profile.on_step_end(None, state, TrainerControl())
    profile.on_train_end(None, state, TrainerControl())
    assert said in capsys.readouterr().out
    if traced is None:
        assert not list(tmp_path.iterdir())
        return
    with gzip.open(tmp_path / "rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == traced
