"""What is made of how the parts of the evaluation after a training have ended."""

import signal

import pytest

from sft.errors import EXIT_GATE
from sft.finish import _status


@pytest.mark.parametrize("status", [0, 1, 2, EXIT_GATE, 143])
def test_a_part_that_ends_by_itself_keeps_its_exit_status(status: int) -> None:
    assert _status(status, "eval.run") == status


def test_a_part_that_was_killed_is_told_and_ends_as_an_evaluation_that_is_not_complete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _status(-signal.SIGKILL, "eval.run") == 1
    assert "eval.run was ended by SIGKILL, as the kernel does where memory runs out." in capsys.readouterr().err
