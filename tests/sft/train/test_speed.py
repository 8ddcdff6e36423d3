from collections.abc import Iterator

import pytest
from transformers import TrainerControl, TrainerState

from sft.plan.hardware import Gpu, Hardware
from sft.train.batches import Work
from sft.train.speed import StepClock, peak_flops, speed


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a slice is not as fast as the GPU
    ],
)
def test_the_peak_is_that_of_the_gpu_or_unknown(name: str, peak: float | None) -> None:
    hardware = Hardware(Gpu(name, 80.0, 9.0), 8, 8, 16, 128.0)
    assert peak_flops(hardware) == (None if peak is None else 8 * peak)


def test_the_speed_is_tokens_and_flops_over_the_seconds_of_the_steps() -> None:
    work, times = Work(1000, 400, 5e15, "", ()), ([1.0, 2.0, 3.0, 4.0], 0.5)
    found = speed(work, *times, peak=2e15)
    assert (found["tokens_per_second"], found["labelled_tokens_per_second"]) == (100, 40)
    assert (found["step_seconds_p50"], found["step_seconds_p90"]) == (2.5, pytest.approx(3.7))
    assert (found["mfu"], found["data_seconds"]) == (0.25, 0.5)
    assert speed(work, *times, peak=None)["mfu"] is speed(Work(1, 1, None, "", ()), *times, 1.0)["mfu"] is None


def test_batches_go_on_after_a_step_has_taken_its_own() -> None:
    """The trainer takes those of one step at a time from the iterator of the epoch."""

    def epoch() -> Iterator[int]:
        yield from range(6)

    clock, batches = StepClock(on_gpu=False), epoch()
    for step in range(3):
        clock.start()
        some = clock.timed(batches)
        assert [next(some), next(some)] == [2 * step, 2 * step + 1]
        del some
        clock.on_step_end(None, TrainerState(), TrainerControl())
    assert next(clock.timed(batches), None) is None
    assert len(clock.take()[0]) == 3
    assert clock.take() == ([], 0.0)
