from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft.run.directory import Run
from sft.terminal import FAILURE
from sft.train.watchdog import CHECKPOINT, Progress, Watchdog


class Watched:
    """A rank's watchdog, which looks every five seconds."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.progress = Progress()
        self.watchdog = Watchdog(self.progress, Run(folder), rank, ranks, timeout=600)
        self.watchdog.open()

    def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            self.progress.begin(step)
            self.progress.end()

    def wait(self, seconds: int) -> list[str]:
        """Why the rank must be ended, each time that it looks."""
        return [text for text in (self.watchdog.look() for _ in range(0, seconds, 5)) if text is not None]


MakeWatched = Callable[..., Watched]


@pytest.fixture
def make_watched(tmp_path: Path) -> Iterator[MakeWatched]:
    made: list[Watched] = []

    def make(rank: int = 0, ranks: int = 1) -> Watched:
        made.append(Watched(tmp_path, rank, ranks))
        return made[-1]

    yield make
    for watched in made:
        watched.watchdog.close()


def test_a_process_that_stands_still_is_ended_with_its_stacks(make_watched: MakeWatched, tmp_path: Path) -> None:
    watched = make_watched()
    watched.train(4)
    watched.progress.begin(5)
    assert watched.wait(600) == []
    (message,) = watched.wait(10)
    assert "step 5, data. Stacks" in message
    assert "thread 0x" in (tmp_path / "logs" / "rank-0.stacks.txt").read_text()


def test_a_rank_that_stands_while_another_has_failed_is_ended(make_watched: MakeWatched, tmp_path: Path) -> None:
    """On another node too, whose ranks no launcher here hears of."""
    watched = make_watched(ranks=2)
    watched.train(4)
    (tmp_path / "logs" / FAILURE).write_text("Rank 1 on node1 failed")
    watched.progress.begin(5)
    assert watched.wait(20) == []
    assert watched.wait(10) == ["Rank 1 on node1 failed"] * 2


def test_a_save_is_never_ended(make_watched: MakeWatched, tmp_path: Path) -> None:
    watched = make_watched()
    watched.train(4)
    watched.progress.at(CHECKPOINT)
    assert watched.wait(5000) == []


def test_a_job_that_moves_is_not_ended(make_watched: MakeWatched, tmp_path: Path) -> None:
    watched = make_watched()
    watched.train(4)
    for step in range(5, 30):
        watched.progress.begin(step)
        assert watched.wait(200) == []
    assert not (tmp_path / "logs" / "rank-0.stacks.txt").read_text()


@pytest.mark.parametrize("silent", [True, False])
def test_whoever_waits_names_the_rank_that_wrote_no_stacks(
    silent: bool, make_watched: MakeWatched, tmp_path: Path
) -> None:
    ranks = [make_watched(rank, ranks=2) for rank in range(2)]
    assert ranks[0].watchdog.stacks() == ""
    for watched in ranks[: 1 if silent else 2]:
        watched.wait(400)
    told = ranks[0].watchdog.stacks()
    assert str(tmp_path / "logs") in told
    assert ("None from rank 1" in told) == silent
