"""What is made of how the parts of the evaluation after a training have ended."""

import re
import signal
from pathlib import Path

import pytest

from sft.errors import EXIT_GATE
from sft.launch.evaluation import _exit_status, closing_lines
from sft.run.directory import Run


def test_a_part_that_was_killed_is_told_and_ends_as_an_evaluation_that_is_not_complete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _exit_status(EXIT_GATE, "eval.run") == EXIT_GATE
    assert _exit_status(-signal.SIGKILL, "eval.run") == 1
    assert "eval.run was ended by SIGKILL, as the kernel does when memory runs out." in capsys.readouterr().err


def test_the_last_lines_name_the_warnings_the_next_commands_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "out puts" / "mine" / "1")
    run.path.mkdir(parents=True)
    run.update(status="finished")
    assert not any("Worth knowing" in line for line in closing_lines(run))
    run.warn("plan", "The run has only 12 optimizer steps.")
    *lines, last = closing_lines(run)
    assert str(run.page_file) in last
    assert any("only 12" in line for line in lines)
    monkeypatch.chdir(tmp_path)
    shown = "\n".join(closing_lines(run))
    for script in ("chat", "eval", "export"):
        assert re.search(rf"^  .*\b{script}(\.sh)? 'out puts/mine/1'", shown, re.MULTILINE)
