from dataclasses import replace

import pytest

from sft.parallel.progress import BACKWARD, CHECKPOINT, DATA, FORWARD, OPTIMIZER, START, Place, Progress
from sft.parallel.stall import ALWAYS, DEBUG, Patience, Report, behind, end_limit, message, ranks

HERE = Place(7, 5, FORWARD, 2)


def report(rank: int, place: Place | None = HERE, *, stalled: bool = True, frame: str = "") -> Report:
    return Report(rank, f"node-{rank}", 4000 + rank, stalled, place, 60.0, (frame,) if frame else ())


def numbers(reports: list[Report]) -> list[int]:
    return [each.rank for each in behind(reports)]


def test_the_rank_that_has_come_least_far_is_the_one_behind() -> None:
    assert numbers([report(0), report(1, Place(7, 1, DATA, 1)), report(2)]) == [1]
    assert numbers([report(0), report(1), report(2, Place(6, 9, OPTIMIZER, 0))]) == [2]
    assert numbers([report(0, Place(7, 4, BACKWARD, 1)), report(1), report(2)]) == [0]


def test_a_rank_that_says_nothing_is_named_before_one_that_is_behind() -> None:
    silent, gone = report(2, stalled=False), report(3, None, stalled=False)
    assert numbers([report(0), report(1, Place(7, 0, DATA, 1)), silent, gone]) == [2, 3]


def test_of_ranks_as_far_as_each_other_those_outside_a_collective_are_behind() -> None:
    waits, works = "torch/distributed/distributed_c10d.py:3 all_reduce", "sft/train/loss.py:40 plain_loss"
    assert numbers([report(0, frame=waits), report(1, frame=works), report(2, frame=waits)]) == [1]
    assert numbers([report(0, frame=waits), report(1, frame=waits)]) == []
    assert numbers([report(0, frame=works), report(1, frame=works)]) == []


def test_a_process_alone_is_the_one_that_stands() -> None:
    assert numbers([report(0)]) == [0]


def test_the_message_names_rank_host_place_and_files() -> None:
    late = replace(report(1, Place(7, 1, DATA, 1)), frames=("mine.py:3 read", "sft/data/store.py:9 document"))
    text = message([report(0), late, report(2), report(3)], 0.5, "logs/rank-*.stacks.txt", "It ends.")
    assert "Rank 1 (node-1, pid 4001) is behind: step 7, data, micro-batch 1, for 60 s." in text
    assert "mine.py:3 read\n    sft/data/store.py:9 document" in text
    assert "Waiting: ranks 0, 2-3 in step 7, forward, micro-batch 2" in text
    assert "A step takes 0.5 s." in text and text.endswith("logs/rank-*.stacks.txt\nIt ends.")


def test_a_message_of_a_large_job_stays_short() -> None:
    silent = [report(rank, stalled=False) for rank in range(8, 64)]
    text = message([*(report(rank) for rank in range(8)), *silent], None, "logs", "It ends.")
    assert "So are ranks 12-63." in text and "ranks 0-7 in step 7" in text
    assert len(text.splitlines()) == 9


@pytest.mark.parametrize("patience", [ALWAYS, DEBUG])
@pytest.mark.parametrize("phase", [DATA, CHECKPOINT])
@pytest.mark.parametrize("step_seconds", [None, 0.1, 30.0, 5000.0])
def test_a_stall_is_told_before_the_group_gives_up(patience: Patience, phase: str, step_seconds: float | None) -> None:
    assert 0 < patience.limit(phase, step_seconds, timeout=20) <= 10


def test_slow_steps_are_waited_for_longer_and_a_checkpoint_longest() -> None:
    assert ALWAYS.limit(DATA, 0.1, timeout=600) == 60
    assert ALWAYS.limit(DATA, 12.0, timeout=600) == 120
    assert ALWAYS.limit(CHECKPOINT, 0.1, timeout=600) == 300
    assert DEBUG.limit(DATA, 0.1, timeout=600) < ALWAYS.limit(DATA, 0.1, timeout=600)


def test_a_report_is_read_as_it_was_written() -> None:
    for each in (report(3, frame="a.py:1 b"), Report(0, "node", 1)):
        assert Report.from_json(each.as_json()) == each


def test_ranks_are_written_in_runs() -> None:
    assert ranks([4]) == "rank 4"
    assert ranks([3, 1, 2, 7, 9, 8]) == "ranks 1-3, 7-9"


def one_step(progress: Progress, batches: int) -> list[Place]:
    places, source = [], iter(range(100))
    progress.begin(progress.place.step + 1)
    asked = progress.watched(source)
    for _ in range(batches):
        next(asked)
        places.append(progress.place)
    for _ in range(batches):
        progress.forward()
        places.append(progress.place)
        progress.loss_known(training=True)
        places.append(progress.place)
        progress.passed()
    places.append(progress.place)
    progress.end()
    return [*places, progress.place]


def test_a_place_only_goes_forward() -> None:
    progress = Progress()
    places = [place for _ in range(3) for place in one_step(progress, 2)]
    order = [place[:2] for place in places]
    assert order == sorted(set(order))
    assert places[-2].phase == OPTIMIZER and progress.passes == progress.batches == 2


def test_the_batches_can_be_taken_up_again_after_a_step() -> None:
    progress, source = Progress(), iter(range(4))
    for first in (0, 2):
        progress.begin(1)
        asked = progress.watched(source)
        assert [next(asked), next(asked)] == [first, first + 1]
        del asked


def test_the_median_step_is_known_after_three_and_without_the_first() -> None:
    progress = Progress()
    for _ in range(2):
        one_step(progress, 1)
    assert progress.step_seconds() is None
    one_step(progress, 1)
    seconds = progress.step_seconds()
    assert seconds is not None and 0 <= seconds < 1


def test_a_job_is_ended_after_many_steps_and_never_before_its_ranks_give_up() -> None:
    assert end_limit(DATA, 1.0, 600, 1) == 600
    assert end_limit(DATA, 60.0, 600, 1) == 1200
    for step_seconds in (None, 0.1, 60.0):
        assert (end_limit(DATA, step_seconds, 600, 2) or 0) > 600


def test_a_save_is_never_ended_and_the_first_steps_may_compile() -> None:
    assert end_limit(CHECKPOINT, 1.0, 600, 1) is None
    assert end_limit(DATA, None, 600, 1) == end_limit(START, None, 600, 1) == 6000
