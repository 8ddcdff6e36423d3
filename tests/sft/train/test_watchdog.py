import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft.parallel.progress import CHECKPOINT, DATA, Progress
from sft.train.watchdog import Watchdog, main_frames

Watched = Callable[[int], tuple[list[Watchdog], list[list[str]]]]


@pytest.fixture
def watchdogs(tmp_path: Path) -> Iterator[Watched]:
    """Ranks in one process, each with a clock of the test's; and what each tells."""
    made: list[Watchdog] = []

    def make(count: int) -> tuple[list[Watchdog], list[list[str]]]:
        told: list[list[str]] = [[] for _ in range(count)]
        ranks = [Watchdog(Progress(), tmp_path, rank, count, 600, False, told[rank].append) for rank in range(count)]
        for dog in ranks:
            dog.open(0.0)
            dog.progress.begin(3)
        made.extend(ranks)
        return ranks, told

    yield make
    for dog in made:
        dog.close()


def pass_time(ranks: list[Watchdog], begin: int, end: int) -> None:
    for now in range(begin, end, 5):
        for dog in ranks:
            dog.look(float(now))


def test_one_message_names_the_rank_behind_and_one_tells_that_it_moves_again(
    watchdogs: Watched, tmp_path: Path
) -> None:
    ranks, told = watchdogs(3)
    for dog in ranks[:1] + ranks[2:]:
        dog.progress.at("count of tokens")
    pass_time(ranks, 5, 900)
    assert [len(each) for each in told] == [1, 0, 0]
    assert "Rank 1 (" in told[0][0] and "is behind: step 3, data, micro-batch 1" in told[0][0]
    assert ranks[0].late() in told[0][0] and ranks[0].late().startswith("Rank 1 (")
    assert "thread 0x" in (tmp_path / "rank-1.stacks.txt").read_text()
    for dog in ranks:
        dog.progress.at("forward", 1)
    pass_time(ranks, 900, 950)
    assert ranks[0].late() == ""
    assert told[0][1:] == ["The training moves again, after 895 s."] and not told[1] and not told[2]
    assert not json.loads((tmp_path / "rank-0.json").read_text())["stalled"]


def test_a_rank_that_is_not_heard_of_is_named_and_the_next_one_speaks_for_the_first(
    watchdogs: Watched,
) -> None:
    ranks, told = watchdogs(3)
    pass_time(ranks[1:], 5, 900)
    assert [len(each) for each in told] == [0, 1, 0]
    assert "Rank 0 (" in told[1][0] and "says nothing" in told[1][0]


def test_a_job_that_moves_is_never_told_to_stall(
    watchdogs: Watched,
) -> None:
    ranks, told = watchdogs(1)
    for now in range(5, 3000, 5):
        if now % 200 == 0:
            ranks[0].progress.at(DATA, 1)
        ranks[0].look(float(now))
    assert told == [[]]


def test_a_process_that_was_stopped_itself_does_not_count_that_time(
    watchdogs: Watched,
) -> None:
    ranks, told = watchdogs(1)
    pass_time(ranks, 5, 100)
    pass_time(ranks, 10_000, 10_100)
    assert told == [[]]


def test_frames_are_those_of_the_main_thread() -> None:
    assert any("test_watchdog.py" in frame and "test_frames" in frame for frame in main_frames()[-3:])


def test_a_process_that_stands_still_is_ended_once_and_a_save_is_not(tmp_path: Path) -> None:
    progress, ended = Progress(), list[str]()
    dog = Watchdog(progress, tmp_path, 0, 1, 600, False, lambda text: None, ended.append)
    dog.open(0.0)
    for step in range(1, 5):
        progress.begin(step)
        progress.end()
    progress.at(CHECKPOINT)
    pass_time([dog], 5, 5000)
    assert not ended
    progress.begin(5)
    pass_time([dog], 5000, 5610)
    assert len(ended) == 1 and "step 5, data, micro-batch 1" in ended[0] and ended[0].endswith("So it is ended.")
    dog.close()
