"""Faults planted on one of two real ranks: which one, and where, is said; and debug=true changes nothing that is trained."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import BIN, latest, losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = [
    sys.executable,
    "-c",
    "import sys; from sft.plan.topology import Topology; from sft.launch.torchrun import start; start(Topology(2), sys.argv[1:])",
]
PROGRAM = REPOSITORY / "tests" / "slow" / "train_and_stall.py"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def recipe(own_recipe: Path) -> Path:
    return write_recipe(
        own_recipe,
        model={"name_or_path": "builtin:demo"},
        data={"train": [{"path": "builtin:demo", "split": "train[:300]"}], "max_length": 128},
        train={
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "max_steps": 7,
            "logging_steps": 1,
            "ddp_timeout": 12,  # a stall is told after half of it
        },
    )


@pytest.fixture
def start(recipe: Path) -> Iterator[Start]:
    """Start two ranks with a fault on the second."""
    begun: list[subprocess.Popen[str]] = []

    def begin(
        fault: str, *overrides: str, command: Sequence[str] = TORCHRUN, **environment: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, str(PROGRAM), str(recipe), *overrides],
            env=os.environ
            | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
            | {"FAULT": fault}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        # torchrun waits for a rank that is stopped, and it starts each in a session of its own.
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for pid in [*(int(pid) for pid in (ranks.read_text().split() if ranks.exists() else [])), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], line: str) -> str:
    """What the job says up to a line."""
    assert process.stdout is not None
    read = ""
    for text in process.stdout:
        read += text
        if line in text:
            return read
    raise AssertionError(read[-4000:])


def test_a_rank_that_hangs_in_its_data_is_named_with_the_stacks_of_both(start: Start, recipe: Path) -> None:
    # Steps enough that the watchdog, which looks twice a second, still sees it move.
    said = read_until(start("sleep", "train.max_steps=60"), "The training moves again")
    assert said.count("The training has not moved") == 1
    assert "is behind: step 6, data, micro-batch 1" in said and "data_that_sleeps" in said
    assert "Waiting: rank 0 in step 6, count of tokens (torch/distributed/" in said
    logs = latest(recipe).path / "logs"
    assert "in data_that_sleeps" in (logs / "rank-1.stacks.txt").read_text()
    assert "in all_gather" in (logs / "rank-0.stacks.txt").read_text()


def test_a_stopped_rank_is_named_and_a_signal_dumps_the_stacks_of_the_other(start: Start, recipe: Path) -> None:
    # Told after 10 s; the other 10 s are for what a loaded machine does late.
    # By our launcher, which ends a stopped rank at once.
    process = start("stop", "train.ddp_timeout=20", command=LAUNCHER)
    said = read_until(process, "waiting the ranks give up")
    logs = latest(recipe).path / "logs"
    reports = [json.loads((logs / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert f"Rank 1 ({reports[1]['host']}, pid {reports[1]['pid']}) says nothing: it is stopped" in said
    assert reports[0]["stalled"] and not reports[1]["stalled"]
    stacks = logs / "rank-0.stacks.txt"
    before = stacks.read_text().count("in all_gather")
    os.kill(reports[0]["pid"], signal.SIGUSR2)
    deadline = time.monotonic() + 30
    # The stacks are written line by line.
    while stacks.read_text().count("in all_gather") == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stacks.read_text().count("in all_gather") > before
    ending = read_until(process, "The same command")
    gave_up = time.monotonic()
    assert f"Rank 0 on {reports[0]['host']} waited train.ddp_timeout=20 s" in ending
    assert f"Rank 1 ({reports[1]['host']}, pid {reports[1]['pid']}) says nothing" in ending
    assert process.wait() == 1
    assert time.monotonic() - gave_up < 15  # torchrun gives a stopped rank 30 s before it kills it


@pytest.mark.parametrize(
    ("fault", "differs"),
    [
        ("skip", "place: micro-batch 2 of 4 on rank 0; micro-batch 3 of 4 on rank 1"),
        pytest.param("fewer", "micro-batches: 4 on rank 0; 3 on rank 1", marks=pytest.mark.extra),
    ],
)
def test_ranks_that_come_apart_end_with_one_message(fault: str, differs: str, start: Start) -> None:
    # The program has imported torch before it reads the recipe.
    process = start(fault, "debug=true", TORCH_DISTRIBUTED_DEBUG="INFO")
    said, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert said.count("The ranks have come apart") == 1 and differs in said
    assert "Error" not in said.split("Traceback")[0], said[-3000:]


def test_debug_trains_the_same_and_leaves_its_files(
    recipe: Path, ranks: Ranks, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = ["sft.train", recipe, "train.resume=never", "train.ddp_timeout=100"]

    def debug(*overrides: str) -> Run:
        """By a launcher: torch reads TORCH_DISTRIBUTED_DEBUG where it is imported."""
        command([*TORCHRUN, "-m", *words, "debug=true", *overrides], PYTHONPATH=str(REPOSITORY))
        return latest(recipe)

    ranks.run(2, words)
    plain = latest(recipe)
    debugged, zero2 = debug(), debug("train.deepspeed=zero2")
    assert losses(plain) == losses(debugged) == pytest.approx(losses(zero2), abs=1e-5) and len(losses(plain)) == 7
    assert not list(plain.path.glob("logs/rank-*.json*")) and not list(plain.path.glob("logs/*.stacks.txt"))
    for run, level in ((debugged, "INFO"), (zero2, "DETAIL")):
        assert run.record["running"]["TORCH_DISTRIBUTED_DEBUG"] == level
        for rank in range(2):
            file = run.path / "logs" / f"rank-{rank}.memory.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            assert [line["step"] for line in lines] == list(range(1, 8))
            assert all(2**27 < line["cpu_rss"] <= line["cpu_rss_peak"] * 1.05 for line in lines)


def test_torch_still_crashes_where_cpu_ranks_of_ddp_are_compared_in_detail(
    tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """When this fails, set_debug_environment needs no exception for DDP."""
    (tmp_path / "program.py").write_text(
        "import torch\ntorch.distributed.init_process_group('gloo')\n"
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    )
    words = ["torchrun", "--standalone", "--nproc-per-node", "1", tmp_path / "program.py"]
    crashed = command(words, expect=1, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert "SIGSEGV" in crashed.stderr
