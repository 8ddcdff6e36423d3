import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sft import terminal
from sft.errors import DataError, OutOfMemory
from sft.program import exit_on_error
from sft.recipe.schema import REPOSITORY
from sft.terminal import FAILURE, final_status, forget_failure, launch_folder, run_of, shown_failure

Become = Callable[[int], None]


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Be one of two ranks that this process's parent has started; nothing ends for real."""

    def exit_now(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "_exit", exit_now)
    monkeypatch.setattr(terminal, "_output", terminal._Output())
    monkeypatch.setattr(terminal, "_WAIT_SECONDS", 0.0)

    def rank(number: int) -> None:
        for name, value in {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    return rank


def fail(error: Exception) -> object:
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise error
    return ended.value.code


def test_of_two_ranks_that_fail_the_first_is_shown(become: Become, capsys: pytest.CaptureFixture[str]) -> None:
    become(1)
    assert fail(ZeroDivisionError("the reason")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("\nRank 1 on ")
    assert "Traceback" in shown
    assert "ZeroDivisionError: the reason" in shown
    become(0)
    assert fail(ValueError("a consequence")) == 1
    assert capsys.readouterr().err == ""
    assert (shown_failure() or "").startswith("Rank 1 on ")


def test_a_mistake_that_all_ranks_make_is_shown_once(become: Become, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        become(rank)
        assert fail(DataError("the data is wrong")) == 2
    assert capsys.readouterr().err.strip() == "the data is wrong"


def test_every_node_shows_the_first_failure_of_the_job(
    become: Become, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    become(0)
    terminal.move_rank_log(run)
    assert run_of(os.getppid()) == run
    (run / "logs" / FAILURE).write_text("Rank 9 on node1 failed")
    fail(RuntimeError("[gloo/tcp/pair.cc:553] Connection closed by peer [10.0.0.9]:1"))
    assert capsys.readouterr().err.strip() == "Rank 9 on node1 failed"
    assert final_status(run) is None  # another start may end otherwise
    forget_failure(run)
    (launch_folder(os.getppid()) / FAILURE).unlink()
    fail(OutOfMemory("Rank 0 ran out of GPU memory"))
    assert (shown_failure(run), final_status(run)) == ("Rank 0 ran out of GPU memory", 2)
    forget_failure(run)
    assert (shown_failure(run), final_status(run)) == (None, None)


PROGRAM = """
import os, sys
from pathlib import Path
from sft import terminal
terminal.start_rank_log()
print("before", flush=True)
terminal.move_rank_log(Path(sys.argv[1]))
print("after", flush=True)
os.system("echo from another language >&2")
"""


def run_as(run: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    own |= {"TMPDIR": str(run), "PYTHONPATH": str(REPOSITORY)}
    (run / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(run / "program.py"), str(run)]
    return subprocess.run(words, env=own | environment, capture_output=True, text=True, check=True)


def test_the_output_of_other_ranks_is_in_their_logs_from_the_beginning(tmp_path: Path) -> None:
    for start in (1, 2):
        assert run_as(tmp_path, RANK="9", LOCAL_RANK="1", WORLD_SIZE="16").stdout == ""
        lines = (tmp_path / "logs" / "rank-9.log").read_text().splitlines()
        own = [line for line in lines if not line.startswith("[")]
        assert own == ["before", "after", "from another language"] * start
    first_of_its_node = run_as(tmp_path, RANK="8", LOCAL_RANK="0", WORLD_SIZE="16")
    assert first_of_its_node.stdout == ""
    assert first_of_its_node.stderr.startswith("Rank 8 on ")  # the only sign of life on its node
    assert str(tmp_path / "logs") in first_of_its_node.stderr


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}])
def test_rank_0_and_a_single_process_print_to_the_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    assert run_as(tmp_path, **environment).stdout == "before\nafter\n"


def test_a_single_process_tells_only_our_launcher_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(terminal, "_output", terminal._Output())
    terminal.move_rank_log(tmp_path / "run")
    assert run_of(os.getppid()) is None
    monkeypatch.setenv("SFT_LAUNCHER", str(os.getppid()))
    terminal.move_rank_log(tmp_path / "run")
    assert run_of(os.getppid()) == tmp_path / "run"
    assert launch_folder(os.getppid()).parent == tmp_path
