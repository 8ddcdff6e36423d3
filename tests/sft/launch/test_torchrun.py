"""How torchrun is called, and which failure is named and what status a job ends with."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from sft.launch.topology import Topology
from sft.launch.torchrun import _report_failures, _where_nccl_says, first_failure, torchrun_arguments
from sft.recipe.load import load_recipe
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from sft.terminal import FAILURE, STATUS

PROGRAM = ["-m", "sft.train", "a.yaml", "train.seed=1"]


@dataclass
class Failed:
    exitcode: int
    timestamp: int = 5


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: Failed(143), 1: Failed(-9)}, 1),  # torchrun has ended rank 0 itself
        ({0: Failed(1), 1: Failed(2)}, 1),  # rank 0 has lost rank 1, which had a mistake to report
        (
            {0: Failed(-6), 1: Failed(2)},
            1,
        ),  # NCCL aborted rank 0, which waited for rank 1's mistake, such as a GPU without memory
        ({0: Failed(7, 6), 1: Failed(7, 5)}, 1),
        ({0: Failed(-9, 36), 1: Failed(-9, 5)}, 1),  # torchrun has killed rank 0, which waited for rank 1
    ],
)
def test_the_first_failure_is_of_a_rank_that_was_not_ended(failures: dict[int, Failed], first: int) -> None:
    assert first_failure(failures) == first


@pytest.mark.parametrize(
    ("codes", "status", "may_restart"),
    [
        ([-signal.SIGTERM, 143], 143, False),
        ([1, 143], 1, True),
        ([-signal.SIGKILL, 143], 1, True),
        ([2, 1], 2, False),
    ],
)
def test_the_exit_status_says_whether_a_restart_may_help(codes: list[int], status: int, may_restart: bool) -> None:
    failures = {rank: Failed(code) for rank, code in enumerate(codes) if code}
    assert _report_failures(failures) == (status, may_restart)


@pytest.mark.parametrize("code", [1, -signal.SIGABRT])
def test_a_node_that_only_lost_a_rank_of_another_ends_as_that_one_and_does_not_restart(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr("sft.launch.torchrun._run", lambda: run)
    monkeypatch.setattr(Run, "recipe", lambda _: load_recipe(REPOSITORY / "recipes" / "tiny.yaml"))
    run.update(status="running")
    assert _report_failures({0: Failed(code)}) == (1, True)
    (tmp_path / "logs" / FAILURE).write_text("Rank 9 on node1 ran out of GPU memory")
    (tmp_path / "logs" / STATUS).write_text("2")
    assert _report_failures({0: Failed(code)}) == (2, False)
    assert run.record["error"] == "Rank 9 on node1 ran out of GPU memory"


def test_torchrun_understands_what_it_is_called_with() -> None:
    from torch.distributed.run import parse_args

    here = parse_args(torchrun_arguments(Topology(2), PROGRAM))
    # torch would look for the address of this machine's name, which in a container may have none, for minutes.
    assert (here.standalone, here.local_addr, here.nproc_per_node) == (True, "127.0.0.1", "2")
    understood = parse_args(torchrun_arguments(Topology(8, 2, 1, "host0", 4242), PROGRAM, 600))
    assert (understood.nnodes, understood.node_rank, understood.nproc_per_node) == ("2", 1, "8")
    assert (understood.master_addr, understood.master_port) == ("host0", 4242)
    assert understood.rdzv_conf == "timeout=600"
    assert understood.module
    assert (understood.training_script, understood.training_script_args) == ("sft.train", ["a.yaml", "train.seed=1"])
    assert "MASTER_PORT" not in os.environ


def test_a_rank_that_nccl_has_aborted_is_known_by_what_it_printed_in_its_last_start_or_by_the_flight_recorder(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    (run.path / "logs").mkdir(parents=True)
    log = run.path / "logs" / "rank-1.log"
    start = "[2026-11-22T19:00:00+0000] rank 1 on host, process 7: sft.train\n"
    thrown = "[Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote process exited\n"
    log.write_text(start + thrown)
    assert _where_nccl_says(1, run) == log
    log.write_text(start + thrown + start)
    assert _where_nccl_says(1, run) is None
    (run.path / "logs" / "flight-recorder-0").touch()
    assert _where_nccl_says(0, run) == run.path / "logs" / "flight-recorder-0"
