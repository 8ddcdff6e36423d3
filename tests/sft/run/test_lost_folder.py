from pathlib import Path

import pytest

from sft.errors import RunError
from sft.run.lost_folder import folder_fault, told_of_a_lost_folder


def test_a_folder_that_can_be_written_has_no_fault_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert folder_fault(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_writes_is_told_with_the_systems_reason() -> None:
    assert "cannot be written" in str(folder_fault(Path("/proc")))  # as a read-only disk, also to root


def test_an_error_of_writing_is_one_message_where_the_folder_is_gone(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is gone"), told_of_a_lost_folder(tmp_path / "checkpoints"):
        (tmp_path / "checkpoints" / "metrics.jsonl").write_text("")


def test_an_error_that_the_folder_is_not_to_blame_for_stays(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), told_of_a_lost_folder(tmp_path):
        (tmp_path / "elsewhere" / "file").write_text("")
