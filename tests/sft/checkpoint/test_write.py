import errno
import os
from pathlib import Path

import pytest

from sft.checkpoint.write import CheckpointWriter
from sft.run.directory import Run


def test_where_a_checkpoint_has_no_room_the_one_that_stays_is_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    for name in ("checkpoint-2", "checkpoint-4"):
        (run.checkpoints / name).mkdir(parents=True)
    run.update(sessions=[{"started": "2026-11-21T09:00:00+0000", "passed_over": {"checkpoint-4": "cut"}}])

    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert not CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0).save(5, write)
    assert "The run goes on, checkpoint-2 stays, and the next interval" in capsys.readouterr().err


def test_a_damaged_checkpoint_of_an_earlier_step_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        (run.checkpoints / name).mkdir(parents=True)
    run.update(sessions=[{"started": "2026-11-21T09:00:00+0000", "passed_over": {"checkpoint-3": "cut"}}])
    writer = CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0)
    for step, left in ((4, {"2", "3", "4"}), (5, {"4", "5"})):
        assert writer.save(step, lambda: (run.checkpoints / ".incomplete" / f"checkpoint-{step}").mkdir(parents=True))  # noqa: B023
        assert {path.name.removeprefix("checkpoint-") for path in run.checkpoints.glob("checkpoint-*")} == left


def test_the_new_checkpoint_is_kept_whatever_the_clocks_say(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints.mkdir()
    run.update(sessions=[{"started": "2999-01-01T00:00:00+0000", "passed_over": {"checkpoint-4": "cut"}}])
    writer = CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0)
    assert writer.save(4, lambda: (run.checkpoints / ".incomplete" / "checkpoint-4").mkdir(parents=True))
    assert (run.checkpoints / "checkpoint-4").is_dir()
