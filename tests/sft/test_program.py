from pathlib import Path

import pytest

from sft.program import shown_command
from sft.recipe.schema import REPOSITORY


def test_a_command_is_one_that_works_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert shown_command("sft", "a b.yaml", "--show", "3") == "bash scripts/sft.sh 'a b.yaml' --show 3"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert shown_command("eval", "run") == f"bash {REPOSITORY}/scripts/eval.sh run"
    (tmp_path / "sft").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shown_command("sft", "run") == "sft train run"
    assert shown_command("chat", "run") == "sft chat run"
