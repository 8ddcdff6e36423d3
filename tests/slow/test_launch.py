"""Real processes: how a job starts, what its end looks like, and how it goes on.

Chosen are a failure under torchrun, a start by Slurm's example and by the one whose variables torchrun reads, and a restart of one
process under an engine and of eight ranks. Other launchers' failures, and a second way to start what is started already, are `extra`.
"""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.parallel.process_group import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from sft.terminal import FAILURE
from tests.slow.conftest import BIN, decisions, latest, lines_of, rows, until, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FAILING = REPOSITORY / "tests" / "slow" / "train_and_fail.py"
LAUNCH = [sys.executable, "-m", "sft.launch"]
Command = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def recipe(own_recipe: Path) -> Path:
    return write_recipe(
        own_recipe,
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={
            "global_batch_size": 24,
            "learning_rate": 1e-3,
            "max_steps": 6,
            "save_steps": 2,
            "logging_steps": 1,
        },
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command and go on; whatever it has started ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(words: list[Any], **environment: str) -> subprocess.Popen[str]:
        path = f"{BIN}:{environment.pop('PATH', os.environ['PATH'])}"
        settings = {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            [str(word) for word in words],
            env=os.environ | settings | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)


def steps(run: Run) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]


def process_at_step(recipe: Path, rank: int, step: int, launcher: "subprocess.Popen[str]") -> int:
    """The process id of a rank, once the job has come to a step."""
    log = recipe.parent / "outputs" / recipe.stem / "latest" / "logs" / f"rank-{rank}.log"
    until(lambda: log.exists() and lines_of(latest(recipe)) >= step, launcher)
    return int(re.findall(r"process (\d+)", log.read_text())[-1])


def test_a_killed_rank_ends_the_job_and_is_named(recipe: Path, start: Start) -> None:
    job = start([*LAUNCH, recipe, "train.max_steps=400"], NPROC="3")
    os.kill(process_at_step(recipe, 2, 3, job), signal.SIGKILL)
    told = job.communicate(timeout=60)[0]  # well before the timeout of the ranks that wait for it
    assert job.returncode == 1  # the same command goes on
    assert re.search(r"\nRank 2 on \S+ was ended by signal 9 \(SIGKILL\)", told)
    assert "Traceback" not in told
    run = latest(recipe)
    assert f"The same command resumes from {run.last_checkpoint().name}." in told  # type: ignore[union-attr]
    assert (run.record["status"], "Rank 2 on" in run.record["error"]) == ("failed", True)
    assert (run.path / "logs" / FAILURE).read_text().startswith("Rank 2 on ")


def test_eight_ranks_train_and_start_again_after_one_was_killed(recipe: Path, start: Start) -> None:
    job = start([*LAUNCH, recipe, "--max-restarts", "1", "train.max_steps=30"], NPROC="8")
    os.kill(process_at_step(recipe, 5, 4, job), signal.SIGKILL)
    told = job.communicate(timeout=280)[0]
    assert job.returncode == 0, told
    assert told.count("was ended by signal 9") == 1
    assert "Restarting all processes; 0 restarts left." in told
    went_on = re.search(r"it resumes from checkpoint-(\d+)", told)
    assert went_on is not None
    assert int(went_on[1]) >= 2  # that of step 4 may not be whole yet
    run = latest(recipe)
    assert (run.record["status"], run.record["ranks"]) == ("finished", 8)
    assert steps(run) == list(range(1, 31))
    assert (run.final / "model.safetensors").is_file()
    logs = {path.name for path in (run.path / "logs").iterdir()}
    assert logs - {"rank-0.log"} == {f"rank-{rank}.log" for rank in range(1, 8)}  # the first has lost the killed one


def launcher_of(restarts: int, how: str, starts: int, ranks: int = 2) -> list[str]:
    """Our launcher, around a training in which the last rank fails at step 3 in the first starts."""
    program = (
        f"from sft.launch.topology import Topology; from sft.launch.torchrun import start; import sys; "
        f"start(Topology({ranks}), [{str(FAILING)!r}, '{ranks - 1}', '3', {how!r}, '{starts}', *sys.argv[1:]], restarts={restarts})"
    )
    return [sys.executable, "-c", program]


@pytest.mark.extra  # one restart is chosen, of eight ranks
def test_two_failures_are_two_restarts(recipe: Path, command: Command) -> None:
    words = [*launcher_of(2, "raise", 2), recipe, "train.save_steps=1"]
    told = command(words, PYTHONPATH=str(REPOSITORY))
    assert told.stderr.count("ZeroDivisionError: made by the test") == 2
    assert told.stdout.count("resumes from checkpoint-2") == 2
    run = latest(recipe)
    assert run.record["status"] == "finished"
    assert steps(run) == list(range(1, 7))


@pytest.mark.parametrize(
    ("engine", "overrides"),
    [("ZeRO-2", ["train.deepspeed=zero2"]), pytest.param("one process", [], marks=pytest.mark.extra)],
)
def test_one_process_that_failed_starts_again_as_one_process(
    engine: str, overrides: list[str], recipe: Path, command: Command
) -> None:
    words = [*launcher_of(1, "kill", 1, ranks=1), recipe, "train.save_steps=1", *overrides]
    told = command([*words, "train.resume=never"], PYTHONPATH=str(REPOSITORY))
    assert "Restarting all processes; 0 restarts left." in told.stderr
    assert "it resumes from checkpoint-2" in told.stdout
    run = latest(recipe)
    assert decisions(run)["engine"] == engine
    assert (run.record["status"], steps(run)) == ("finished", list(range(1, 7)))


def test_one_process_under_torchrun_trains_as_one_process(recipe: Path, command: Command) -> None:
    words = ["torchrun", "--standalone", "--nproc-per-node", "1", "-m", "sft.train", recipe, "train.max_steps=2"]
    command(words, PYTHONPATH=str(REPOSITORY))
    assert decisions(latest(recipe))["engine"] == "one process"


def test_a_mistake_is_not_tried_again(recipe: Path, command: Command) -> None:
    told = command([*launcher_of(3, "mistake", 3), recipe], expect=2, PYTHONPATH=str(REPOSITORY))
    assert told.stderr.count("a mistake made by the test") == 1
    assert "Restarting all processes" not in told.stderr
    assert "Traceback" not in told.stderr


def test_one_process_trains_in_the_process_that_planned(recipe: Path, start: Start) -> None:
    job = start([*LAUNCH, recipe, "train.max_steps=400"], NPROC="1")
    until(lambda: lines_of(latest(recipe)) >= 2, job)
    assert b"sft.launch" in Path(f"/proc/{job.pid}/cmdline").read_bytes()
    job.send_signal(signal.SIGTERM)
    told = job.communicate(timeout=60)[0]
    assert job.returncode == 143, told
    assert told.count("Interrupted by SIGTERM after step") == 1


BY_HAND = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"],
    "deepspeed": ["deepspeed", "--num_gpus", "2"],
}


@pytest.mark.parametrize("launcher", rows(BY_HAND, ["torchrun"]))
def test_the_first_error_is_shown_once_under_every_launcher(launcher: str, recipe: Path, start: Start) -> None:
    words = [*BY_HAND[launcher], FAILING, "1", "3", "raise", "9", recipe]
    if launcher == "deepspeed":
        words[1:1] = ["--master_port", str(free_port())]
    job = start(words)
    told = job.communicate(timeout=120)[0]
    assert job.returncode == 1, told
    assert told.count("ZeroDivisionError: made by the test") == 1, told
    assert re.search(r"Rank 1 on \S+ failed; the others are stopped\. Its log: \S+/logs/rank-1\.log", told)
    assert "by peer" not in told
    logs = latest(recipe).path / "logs"
    assert "by peer" in (logs / "rank-0.log").read_text()
    assert "ZeroDivisionError: made by the test" in (logs / "rank-1.log").read_text()


def two_machines(kind: str, port: int) -> dict[str, str]:
    """What a cluster sets on both of two machines, which are this one."""
    return {
        "slurm": {
            "SLURM_NNODES": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_JOB_NODELIST": "localhost,other",
            "SLURM_JOB_ID": str(port - 20000 if 20000 <= port < 30000 else port),
            "MASTER_PORT": str(port),
        },
        "kubernetes": {"PET_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "skypilot": {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            "MASTER_PORT": str(port),
            "OUTPUT_DIR": "",
        },
        "user": {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }[kind]


def test_the_deepspeed_launcher_trains_with_a_hostfile_and_without_ssh(
    recipe: Path, tmp_path: Path, start: Start
) -> None:
    hosts, port = tmp_path / "hosts", free_port()
    hosts.write_text("localhost slots=1\nother slots=1\n")
    where = ["--hostfile", hosts, "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port]
    program = ["--module", "sft.train", recipe, "train.deepspeed=zero2"]
    jobs = [start(["deepspeed", *where, "--node_rank", rank, *program]) for rank in (0, 1)]
    told = [job.communicate(timeout=200)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(told)
    finished(recipe)


def write_accelerate(config: Path, engine: str) -> Path:
    config.parent.mkdir(exist_ok=True)
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": engine, "num_processes": 2}
    config.write_text(yaml.safe_dump(settings | {"num_machines": 1, "mixed_precision": "no", "use_cpu": False}))
    return config


@pytest.mark.extra  # test_same_result.py trains under accelerate's own options
def test_accelerate_trains_with_a_configuration(recipe: Path, tmp_path: Path, command: Command) -> None:
    config = write_accelerate(tmp_path / "mine_accelerate.yaml", "MULTI_GPU")
    command(["accelerate", "launch", "--config_file", config, "-m", "sft.train", recipe], PYTHONPATH=str(REPOSITORY))
    finished(recipe)


def test_an_accelerate_configuration_of_another_project_is_refused_in_one_message(
    recipe: Path, tmp_path: Path, start: Start
) -> None:
    write_accelerate(tmp_path / "accelerate" / "default_config.yaml", "FSDP")
    job = start(["accelerate", "launch", "-m", "sft.train", recipe], HF_HOME=str(tmp_path))
    told = job.communicate(timeout=100)[0]
    assert job.returncode != 0
    assert told.count("accelerate launch requests FSDP (its options, or a configuration left by") == 1, told


NODE_RANK = {
    "slurm": "SLURM_NODEID",
    "kubernetes": "PET_NODE_RANK",
    "skypilot": "SKYPILOT_NODE_RANK",
    "user": "NODE_RANK",
}
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; status=$?; wait $! && exit $status
"""


def finished(recipe: Path) -> None:
    run = latest(recipe)
    assert (run.record["status"], run.record["ranks"]) == ("finished", 2)
    assert steps(run) == list(range(1, 7))
    assert (run.path / "logs" / "rank-1.log").is_file()


def test_the_slurm_script_trains_on_two_machines(recipe: Path, tmp_path: Path, start: Start) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    job = start(
        ["bash", REPOSITORY / "scripts" / "slurm" / "sft.sbatch", recipe, "train.learning_rate=2e-3"],
        **two_machines("slurm", free_port()),
        SLURM_SUBMIT_DIR=str(REPOSITORY),
        PATH=f"{srun.parent}:{os.environ['PATH']}",
    )
    told = job.communicate(timeout=200)[0]
    assert job.returncode == 0, told
    finished(recipe)
    assert latest(recipe).record["overrides"] == ["train.learning_rate=2e-3"]


def entry(kind: str, recipe: Path) -> list[str]:
    """The command of an example file, with the recipe of the test."""
    outputs = recipe.parent / "outputs"
    if kind == "skypilot":
        run = yaml.safe_load((REPOSITORY / "scripts" / "skypilot" / "sft.yaml").read_text())["run"]
        return ["bash", "-c", f"RECIPE={shlex.quote(str(recipe))} OUTPUT_DIR={shlex.quote(str(outputs))}\n{run}"]
    job = yaml.safe_load((REPOSITORY / "scripts" / "kubernetes" / "pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return [*container["command"], str(recipe), f"output_dir={outputs}"]


@pytest.mark.parametrize("kind", rows(["kubernetes", "skypilot"], ["kubernetes"]))
def test_the_command_of_an_example_file_trains_on_two_machines(
    kind: str, recipe: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    both, words = two_machines(kind, free_port()), entry(kind, recipe)
    first, second = (start(words, **both, **{NODE_RANK[kind]: str(rank)}) for rank in (0, 1))
    told, elsewhere = first.communicate(timeout=200)[0], second.communicate(timeout=60)[0]
    assert (first.returncode, second.returncode) == (0, 0), told + elsewhere
    finished(recipe)
    assert "step 6/6" in told
    assert "step" not in elsewhere
    assert re.search(r"Rank 1 on \S+ and the other ranks of this node write to ", elsewhere)


def test_two_machines_start_again_together(recipe: Path, start: Start) -> None:
    both = two_machines("user", free_port())
    words = [*LAUNCH, recipe, "--max-restarts", "1", "train.max_steps=30"]
    jobs = [start(words, **both, NODE_RANK=str(rank)) for rank in (0, 1)]
    os.kill(process_at_step(recipe, 1, 4, jobs[0]), signal.SIGKILL)
    told = [job.communicate(timeout=250)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(told)
    # Each machine says who was the first of the job to go.
    assert all(re.search(r"Rank 1 on \S+ was ended by signal 9", text) for text in told), told
    assert sum("Restarting all processes; 0 restarts left." in text for text in told) >= 1
    run = latest(recipe)
    assert run.record["status"] == "finished"
    assert steps(run) == list(range(1, 31))
