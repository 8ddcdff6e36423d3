"""A rank that hangs or is stopped ends the job within train.ddp_timeout; and debug=true changes nothing that is trained."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import BIN, latest, losses, until, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = [
    sys.executable,
    "-c",
    "import sys; from sft.launch.topology import Topology; from sft.launch.torchrun import start; start(Topology(2), sys.argv[1:])",
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
            "ddp_timeout": 12,  # stacks are written after half of it
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


def test_a_rank_that_hangs_ends_the_job_with_the_stacks_of_both(start: Start, recipe: Path) -> None:
    process = start("sleep")
    said, _ = process.communicate(timeout=150)
    logs = latest(recipe).path / "logs"
    assert "train.ddp_timeout=12 s" in said and "while step 6 was trained" in said
    assert f"Stacks: {logs}/rank-*.stacks.txt" in said and "None from" not in said
    assert "in data_that_sleeps" in (logs / "rank-1.stacks.txt").read_text()
    assert "in all_gather" in (logs / "rank-0.stacks.txt").read_text()
    assert process.returncode == 1


def test_a_stopped_rank_does_not_hold_the_job_and_a_signal_dumps_the_stacks_of_another(
    start: Start, recipe: Path
) -> None:
    # By our launcher, which ends a stopped rank at once; torchrun gives it 30 s.
    process = start("stop", "train.ddp_timeout=20", command=LAUNCHER)
    read_until(process, "step 1/7")
    stacks = latest(recipe).path / "logs" / "rank-0.stacks.txt"
    (rank,) = [
        int(child)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if b"\0RANK=0\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes()
    ]
    until(
        lambda: stacks.exists() and stacks.read_text().count("in all_gather") == 1, process, 60
    )  # after half of the timeout
    os.kill(rank, signal.SIGUSR2)
    until(lambda: stacks.read_text().count("in all_gather") > 1, process, 30)
    said, _ = process.communicate(timeout=60)
    assert "train.ddp_timeout=20 s" in said and "None from rank 1: stopped" in said
    assert process.returncode == 1


def test_debug_trains_the_same(
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
    assert not list(plain.path.glob("logs/*.stacks.txt"))
    for run, level in ((debugged, "INFO"), (zero2, "DETAIL")):
        assert run.record["running"]["TORCH_DISTRIBUTED_DEBUG"] == level


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
