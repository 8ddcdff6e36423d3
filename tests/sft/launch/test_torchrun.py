"""How torchrun is called, and which failure is named and what status a job ends with."""

import os
import signal
from dataclasses import dataclass

import pytest

from sft.launch.topology import Topology
from sft.launch.torchrun import _report_failures, first_failure, torchrun_arguments

PROGRAM = ["-m", "sft.train", "a.yaml", "train.seed=1"]


@dataclass
class Failed:
    exitcode: int
    timestamp: int = 5


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: Failed(1), 1: Failed(1)}, 0),
        ({0: Failed(143), 1: Failed(-9)}, 1),  # torchrun has ended rank 0 itself
        ({0: Failed(-15), 2: Failed(7)}, 2),
        ({0: Failed(1), 1: Failed(2)}, 1),  # rank 0 has lost rank 1, which had a mistake to report
        ({0: Failed(1), 1: Failed(-11)}, 1),
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
        ([130, 130], 130, False),
        ([1, 143], 1, True),
        ([-signal.SIGKILL, 143], 1, True),
        ([2, 1], 2, False),
        ([3, 0], 3, False),
        ([75, 1], 75, False),
    ],
)
def test_the_exit_status_says_whether_a_restart_may_help(codes: list[int], status: int, may_restart: bool) -> None:
    failures = {rank: Failed(code) for rank, code in enumerate(codes) if code}
    assert _report_failures(failures, None) == (status, may_restart)


def test_torchrun_understands_what_it_is_called_with() -> None:
    from torch.distributed.run import parse_args

    understood = parse_args(torchrun_arguments(Topology(8, 2, 1, "host0", 4242), PROGRAM, 600))
    assert (understood.nnodes, understood.node_rank, understood.nproc_per_node) == ("2", 1, "8")
    assert (understood.master_addr, understood.master_port) == ("host0", 4242)
    assert understood.rdzv_conf == "timeout=600"
    assert understood.module
    assert (understood.training_script, understood.training_script_args) == ("sft.train", ["a.yaml", "train.seed=1"])
    assert "MASTER_PORT" not in os.environ
