"""Two hosts train one job, lose the link between them, and go on: real processes in network namespaces (tests/slow/two_hosts.py)."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import BIN, losses, write_recipe
from tests.slow.ranks import Ranks
from tests.slow.two_hosts import Done, Host, Running, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TIMEOUT = 10
"""train.ddp_timeout of every job here, in seconds."""

STEPS = 30
PARAMETERS = 563_200
BYTES = {"DDP": 12, "ZeRO-2": 20}
"""Of a parameter in a checkpoint, in fp32: tests/sft/plan/test_disk.py has the same sums."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


@pytest.fixture(scope="module")
def recipe(hosts: tuple[Host, Host]) -> Path:
    return write_recipe(
        hosts[0].folder / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
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


def run_named(recipe: Path, name: str) -> Run:
    return Run(recipe.parent / "outputs" / recipe.stem / name)


@pytest.fixture(scope="module")
def alone(recipe: Path, ranks: Ranks) -> Run:
    """The same recipe in one process."""
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=alone"])
    return run_named(recipe, "alone")


def finished(started: list[Running], expect: int = 0, seconds: float = 180) -> list[Done]:
    done = [running.wait(seconds) for running in started]
    assert [one.status for one in done] == [expect] * len(done), "\n".join(one.output[-3000:] for one in done)
    return done


def same_result(run: Run, alone: Run) -> None:
    assert run.record["status"] == "finished"
    assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
    weights, expected = (load_file(one.final / "model.safetensors") for one in (run, alone))
    assert all(float((weights[name] - expected[name]).abs().max()) < 1e-4 for name in expected)


def by_launcher(hosts: tuple[Host, Host], recipe: Path, name: str, port: int, *overrides: str) -> list[Running]:
    words = ["bash", REPOSITORY / "scripts" / "sft.sh", recipe, f"tracking.run_name={name}", *overrides]
    place = {"NNODES": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port), "NPROC": "1"}
    return [host.start(words, **place, NODE_RANK=str(rank)) for rank, host in enumerate(hosts)]


def by_slurm(hosts: tuple[Host, Host], recipe: Path, name: str, port: int, *overrides: str) -> list[Running]:
    """With the variables that srun sets, and a scontrol that names the hosts by their addresses."""
    tools = recipe.parent / "bin"
    tools.mkdir(exist_ok=True)
    scontrol = tools / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nprintf '%s\\n' {hosts[0].address} {hosts[1].address}\n")
    scontrol.chmod(0o755)
    words = ["bash", REPOSITORY / "scripts" / "sft.sh", recipe, f"tracking.run_name={name}", *overrides]
    job = {
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "sft[1-2]",
        "MASTER_PORT": str(port),
    }
    return [
        host.start(["env", f"PATH={tools}:{BIN}:{os.environ['PATH']}", *words], **job, SLURM_NODEID=str(rank))
        for rank, host in enumerate(hosts)
    ]


def test_two_hosts_train_what_one_process_trains_started_by_torchrun(
    hosts: tuple[Host, Host], recipe: Path, alone: Run
) -> None:
    """Nothing is set for gloo: without help it would take the address of the host's own name, which nobody else reaches."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", "29701"]
    program = ["-m", "sft.train", recipe, "tracking.run_name=torchrun"]
    finished([host.start(["torchrun", *words, "--node-rank", str(rank), *program]) for rank, host in enumerate(hosts)])
    run = run_named(recipe, "torchrun")
    assert run.record["ranks"] == 2
    assert run.record["running"]["processes"] == "2"
    assert run.record["running"]["timeout"] == f"{TIMEOUT} s"
    same_result(run, alone)


@pytest.mark.parametrize(
    ("start", "engine", "overrides", "port"),
    [(by_slurm, "DDP", [], 29702), (by_launcher, "ZeRO-2", ["train.deepspeed=zero2"], 29703)],
)
def test_a_cut_link_ends_in_one_message_on_each_host_and_the_same_command_goes_on(
    start: Callable[..., list[Running]],
    engine: str,
    overrides: list[str],
    port: int,
    hosts: tuple[Host, Host],
    recipe: Path,
    alone: Run,
) -> None:
    run = run_named(recipe, engine)
    started = start(hosts, recipe, engine, port, *overrides)
    try:
        wait_for_lines(run, 7, started)
        hosts[0].pull_cable()
        cut = time.monotonic()
        for done in finished(started, expect=1, seconds=TIMEOUT + 45):
            assert done.output.count("lost the other ranks while step") == 1
            assert f"train.ddp_timeout={TIMEOUT}" in done.output
            assert "The same command resumes from checkpoint-" in done.output
            assert "Traceback" not in done.output
            assert done.ended - cut < TIMEOUT + 45  # the machine may be busy; the message came within the timeout
        assert not [pid for host in hosts for pid in host.processes()]
    finally:
        hosts[0].plug_cable()
        hosts[1].plug_cable()
    assert run.record["status"] == "failed"
    assert "lost the other ranks" in run.record["error"]
    checkpoint = checkpoint_after(run)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(
        checkpoint.name.split("-")[1]
    )
    # `tracking.run_name` names the run to go on with.
    first, _ = finished(start(hosts, recipe, engine, port + 10, *overrides))
    assert f"resumes from {checkpoint.name}" in first.output
    assert run.record["running"]["engine"] == engine
    same_result(run, alone)
    size = sum(file.stat().st_size for file in checkpoint_after(run).rglob("*") if file.is_file())
    assert size == pytest.approx(PARAMETERS * BYTES[engine], rel=0.06), "sft/plan/job.py reckons with as many"


def checkpoint_after(run: Run) -> Path:
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None
    return checkpoint


def wait_for_lines(run: Run, lines: int, started: list[Running]) -> None:
    """Return once the first host has logged so many steps."""
    deadline = time.monotonic() + 180
    while not run.metrics_file.exists() or len(run.metrics_file.read_text().splitlines()) < lines:
        for running in started:
            assert running.process.poll() is None, running.output()[-3000:]
        assert time.monotonic() < deadline, started[0].output()[-3000:]
        time.sleep(0.05)
