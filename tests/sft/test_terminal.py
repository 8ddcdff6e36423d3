import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sft import terminal as rank_logs
from sft.errors import DataError
from sft.program import exit_on_error
from sft.recipe.schema import REPOSITORY
from sft.terminal import ENDING, Ending, forget_ending, is_echo, launched_folder, read_ending, seen_ending, written_run

Become = Callable[[int], None]


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Be a rank of two that this process's parent has started; nothing ends for real."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def stop(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", stop)
    monkeypatch.setattr(rank_logs, "_voice", rank_logs._Voice(2))
    monkeypatch.setattr(rank_logs, "_PATIENCE", 0.0)

    def rank(number: int) -> None:
        for name, value in {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    return rank


def fail(error: Exception) -> object:
    with pytest.raises(SystemExit) as stop, exit_on_error():
        raise error
    return stop.value.code


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
    first = seen_ending(os.getppid())
    assert first is not None
    assert first.rank == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_mistake_that_all_ranks_have_made_is_shown_once(
    order: tuple[int, int], become: Become, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in order:
        become(rank)
        assert fail(DataError("the data is wrong")) == 2
    assert capsys.readouterr().err.strip() == "the data is wrong"


def test_every_machine_shows_the_first_ending_of_the_job(
    become: Become, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    become(0)
    rank_logs.move_to(run)
    assert written_run(os.getppid()) == run
    other = Ending(9, "host1", "2026-01-01T00:00:00+0000", "Rank 9 on host1 failed")
    (run / "logs" / ENDING).write_text(json.dumps(vars(other)))
    fail(RuntimeError("Connection closed by peer [10.0.0.9]:1"))
    assert capsys.readouterr().err.strip() == "Rank 9 on host1 failed"
    assert "Connection closed by peer" in (run / "logs" / "rank-0.log").read_text()  # kept, though not shown
    forget_ending(run)
    assert read_ending(run / "logs" / ENDING) is None


def test_a_process_that_a_signal_ended_is_told_once(become: Become, capsys: pytest.CaptureFixture[str]) -> None:
    become(1)
    for _ in range(2):
        Ending.of(1, "was ended by signal 9").claim(os.getppid())
    assert capsys.readouterr().err.count("was ended by signal 9") == 1


class LostRank(Exception):
    """As another part of the program raises it."""


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:423."), True),
        (RuntimeError("Read error [::1]:3255: Connection reset by peer"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (LostRank("rank 0 lost the others"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_who_only_lost_another_rank_is_not_the_reason(error: Exception, echo: bool) -> None:
    assert is_echo(error) == echo


def test_torchs_own_error_of_a_lost_rank_is_known() -> None:
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    for kind in (DistBackendError, DistNetworkError, DistStoreError):
        assert is_echo(kind("gone"))


PROGRAM = """
import os, sys
from pathlib import Path
from sft import rank_logs
rank_logs.begin()
print("before", flush=True)
rank_logs.move_to(Path(sys.argv[1]))
print("after", flush=True)
os.system("echo from another language >&2")
"""


def run_as(rank: int, run: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - 8),
        "WORLD_SIZE": "16",
        "TMPDIR": str(run),
        "PYTHONPATH": str(REPOSITORY),
    }
    program = run / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(run)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_what_a_rank_prints_is_in_its_log_from_the_beginning_and_start_after_start(tmp_path: Path) -> None:
    for start in (1, 2):
        assert run_as(9, tmp_path).stdout == ""
        lines = (tmp_path / "logs" / "rank-9.log").read_text().splitlines()
        assert [line for line in lines if not line.startswith("[")] == [
            "before",
            "after",
            "from another language",
        ] * start
    told = run_as(8, tmp_path)
    assert told.stdout == ""
    assert told.stderr.startswith("Rank 8 on ")  # the only sign of life on its machine
    assert str(tmp_path / "logs") in told.stderr
    assert not list(launched_folder(os.getpid()).glob("rank-*"))


@pytest.mark.slow
def test_the_first_rank_and_a_single_process_speak(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    for ranks in ({}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}):
        done = subprocess.run(words, env=environment | ranks, capture_output=True, text=True, check=True)
        assert done.stdout == "before\nafter\n"


def test_a_single_process_tells_our_launcher_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rank_logs, "_voice", rank_logs._Voice(2))
    rank_logs.move_to(tmp_path / "run")
    assert written_run(os.getppid()) is None
    monkeypatch.setenv("SFT_LAUNCHER", str(os.getppid()))
    rank_logs.move_to(tmp_path / "run")
    assert written_run(os.getppid()) == tmp_path / "run"
