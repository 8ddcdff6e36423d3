"""Two hosts train one job, lose the link between them, and go on: real processes in network namespaces (tests/slow/two_hosts.py)."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft.parallel.process_group import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import BIN, lines_of, losses, until, write_recipe
from tests.slow.engine_runs import assert_same_weights
from tests.slow.ranks import Ranks
from tests.slow.two_hosts import Done, Host, Running, two_hosts

pytestmark = pytest.mark.slow
TIMEOUT = 10
"""train.ddp_timeout of every job here, in seconds."""

STEPS = 30
PARAMETERS = 563_200
BYTES = {"DDP": 12, "ZeRO-2": 20}
"""Of a parameter in a checkpoint, in fp32."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


@pytest.fixture(scope="module")
def recipe(hosts: tuple[Host, Host]) -> Path:
    return write_recipe(
        hosts[0].folder / "job.yaml",
        train={
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "save_steps": 5,
            "logging_steps": 1,
            "ddp_timeout": TIMEOUT,
        },
    )


def finished(started: list[Running], expect: int = 0, seconds: float = 240) -> list[Done]:
    done = [running.wait(seconds) for running in started]
    assert [one.status for one in done] == [expect] * len(done), "\n".join(one.output[-3000:] for one in done)
    return done


Pair = tuple[Host, Host]


def by_torchrun(hosts: Pair, port: int, *program: str | Path) -> list[Running]:
    """Nothing is set for gloo: without help it would take the address of the host's own name, which nobody else reaches."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", str(port)]
    ranked = enumerate(hosts)
    return [
        host.start(["torchrun", *words, "--node-rank", str(rank), "-m", "sft.train", *program]) for rank, host in ranked
    ]


def by_slurm(hosts: Pair, port: int, *program: str | Path) -> list[Running]:
    """With the variables that srun sets, and a scontrol that names the hosts by their addresses."""
    tools = hosts[0].folder / "bin"
    tools.mkdir(exist_ok=True)
    scontrol = tools / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nprintf '%s\\n' {hosts[0].address} {hosts[1].address}\n")
    scontrol.chmod(0o755)
    words = ["env", f"PATH={tools}:{BIN}:{os.environ['PATH']}", "bash", REPOSITORY / "scripts" / "sft.sh", *program]
    job = {
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "sft[1-2]",
        "MASTER_PORT": str(port),
    }
    return [host.start(words, **job, SLURM_NODEID=str(rank)) for rank, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("start", "engine", "overrides"),
    [(by_slurm, "ZeRO-2", ["train.deepspeed=zero2"]), pytest.param(by_torchrun, "DDP", [], marks=pytest.mark.extra)],
)
def test_a_cut_link_ends_in_one_message_on_each_host_and_the_same_command_resumes(
    start: Callable[..., list[Running]], engine: str, overrides: list[str], hosts: Pair, recipe: Path, ranks: Ranks
) -> None:
    run, alone = (Run(recipe.parent / "outputs" / recipe.stem / name) for name in (engine, "alone"))
    if not alone.path.exists():
        ranks.run(1, ["sft.train", recipe, "tracking.run_name=alone"])
    program = [recipe, f"tracking.run_name={engine}", *overrides]
    started = start(hosts, free_port(), *program)
    try:
        until(lambda: lines_of(run) >= 7 or any(one.process.poll() is not None for one in started), seconds=240)
        assert lines_of(run) >= 7, started[0].output()[-3000:]
        hosts[0].pull_cable()
        for done in finished(started, expect=1):
            assert done.output.count("lost the other ranks while step") == 1
            assert f"train.ddp_timeout={TIMEOUT}" in done.output
            assert "The same command resumes from checkpoint-" in done.output
            assert "Traceback" not in done.output
        until(lambda: not [pid for host in hosts for pid in host.processes()])
    finally:
        hosts[0].plug_cable()
        hosts[1].plug_cable()
    assert run.record["status"] == "failed"
    assert "lost the other ranks" in run.record["error"]
    assert run.record["running"]["timeout"] == f"{TIMEOUT} s"
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(checkpoint.name[11:])
    first, _ = finished(start(hosts, free_port(), *program))
    assert f"resumes from {checkpoint.name}" in first.output
    assert (run.record["ranks"], run.record["running"]["engine"]) == (2, engine)
    assert run.record["status"] == "finished"
    assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
    assert_same_weights(run, alone, 1e-4)
    size = sum(file.stat().st_size for file in run.last_checkpoint().rglob("*") if file.is_file())  # type: ignore[union-attr]
    assert size == pytest.approx(PARAMETERS * BYTES[engine], rel=0.06), "the plan reckons with as many"
