"""What is made of how the parts of the evaluation after a training have ended."""

import re
from pathlib import Path

import pytest

from sft.launch.evaluation import closing_lines
from sft.run.directory import Run


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
