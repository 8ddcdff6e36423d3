"""Each schedule trains, is what runs, and resumes bit by bit."""

import pytest

from sft.run.directory import Run
from tests.slow.engine_runs import SAVED, EngineRuns, assert_identical, lines

pytestmark = pytest.mark.slow

SCHEDULES = {
    "warmup_stable_decay": (
        "train.lr_scheduler_type=warmup_stable_decay train.lr_decay_ratio=0.5 train.lr_decay_type=linear",
        [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    ),
    "inverse_sqrt": (
        "train.lr_scheduler_type=inverse_sqrt train.warmup_steps=0 train.warmup_ratio=0.2",
        [0, 1 / 3, 2 / 3, *[(1 + step / 3) ** -0.5 for step in range(9)]],
    ),
    "polynomial": (
        "train.lr_scheduler_type=polynomial train.lr_power=2 train.min_lr_ratio=0.1",
        [0, 1 / 3, 2 / 3, *[0.1 + 0.9 * (1 - step / 9) ** 2 for step in range(9)]],
    ),
}
"""Overrides, and the rate of each of the 12 steps over the peak."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_trains_is_read_back_and_resumes_bit_by_bit(name: str, runs: EngineRuns) -> None:
    overrides, rates = SCHEDULES[name][0].split(), SCHEDULES[name][1]
    runs.train("1", "packed", name, *overrides)
    run = runs.named("packed", name)
    assert [line["learning_rate"] / 1e-3 for line in lines(run)] == pytest.approx(rates)
    killed: Run = runs.killed_after_step(SAVED, run, f"{name}-killed")
    runs.train("1", "packed", killed.path.name, *overrides)
    assert_identical(killed, run)
