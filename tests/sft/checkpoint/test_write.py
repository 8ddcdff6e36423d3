import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.checkpoint.manifest import fault
from sft.checkpoint.write import CheckpointWriter
from sft.errors import RunError
from sft.run.directory import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6.unusable"):
        (run.checkpoints / name).mkdir(parents=True)
    return run


def names(run: Run) -> set[str]:
    return {path.name for path in run.checkpoints.iterdir()}


def writing(run: Run, step: int) -> Callable[[], None]:
    folder = run.checkpoints / ".incomplete" / f"checkpoint-{step}"

    def write() -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(step))

    return write


def test_a_checkpoint_is_complete_and_the_newest_are_kept(run: Run) -> None:
    writer = CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0)
    for step, kept in ((4, {2, 4}), (5, {4, 5}), (7, {5, 7})):  # 4 is written again: the run resumed from it
        assert writer.save(step, writing(run, step))
        assert names(run) == {*(f"checkpoint-{one}" for one in kept), "checkpoint-6.unusable"}
        assert fault(run.checkpoints / f"checkpoint-{step}") is None


def test_a_checkpoint_that_will_not_fit_is_not_begun(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in run.all_checkpoints():
        checkpoint.rmdir()
    writer = CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, expected=10**18)
    assert not writer.save(5, writing(run, 5))
    assert "of step 5 was not written: it takes 1000000000.0 GB and " in capsys.readouterr().err
    assert writer.shortage is not None
    assert run.all_checkpoints() == []


def test_a_disk_that_fills_a_bug_and_a_folder_that_is_gone_are_errors_and_the_ones_before_stay(run: Run) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before, writer = names(run), CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0)
    with pytest.raises(OSError, match="No space left"):
        writer.save(5, fail)
    assert names(run) == before
    run.checkpoints.rename(run.path / "moved")
    with pytest.raises(RunError, match="is gone"):
        writer.save(6, fail)
