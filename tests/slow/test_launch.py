"""Real processes: how a job starts on one machine and on two, what its end looks like, and how it restarts."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from sft.terminal import FAILURE
from tests.slow.conftest import Start, decisions, latest, lines_of, losses, rows, until, write_recipe
from tests.slow.engine_runs import ENGINES, EngineRuns
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"
LAUNCH = [sys.executable, "-m", "sft.launch"]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recipe(own_recipe: Path) -> Path:
    return write_recipe(
        own_recipe,
        train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 6, "save_steps": 2, "logging_steps": 1},
    )


def steps(run: Run) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]


def process_at_step(recipe: Path, rank: int, step: int, launcher: "subprocess.Popen[str]") -> int:
    """The process id of a rank, once the job has come to a step."""
    log = recipe.parent / "outputs" / recipe.stem / "latest" / "logs" / f"rank-{rank}.log"

    def processes() -> list[str]:
        return re.findall(r"process (\d+)", log.read_text()) if log.exists() else []

    until(lambda: processes() and lines_of(latest(recipe)) >= step, launcher)
    return int(processes()[-1])


def test_a_killed_rank_ends_the_job_and_is_named(recipe: Path, start: Start) -> None:
    """Restarts are those of the two machines below."""
    job = start([*LAUNCH, recipe, "train.max_steps=100000"], NPROC="2")
    os.kill(process_at_step(recipe, 1, 3, job), signal.SIGKILL)
    printed = job.communicate()[0]
    assert job.returncode == 1  # the same command resumes
    assert len(re.findall(r"\nRank 1 on \S+ was ended by signal 9 \(SIGKILL\)", printed)) == 1, printed
    assert "Traceback" not in printed
    run = latest(recipe)
    assert f"The same command resumes from {run.last_checkpoint().name}." in printed  # type: ignore[union-attr]
    assert (run.record["status"], "Rank 1 on" in run.record["error"]) == ("failed", True)
    assert (run.path / "logs" / FAILURE).read_text().startswith("Rank 1 on ")
    assert steps(run) == list(range(1, len(steps(run)) + 1))


def launcher_of(restarts: int, ranks: int) -> list[str | Path]:
    """Our launcher, around a training with a fault."""
    program = (
        "from sft.launch.topology import Topology; from sft.launch.torchrun import start; import sys; "
        f"start(Topology({ranks}), sys.argv[1:], restarts={restarts})"
    )
    return [sys.executable, "-c", program, FAULTS]


@pytest.mark.extra
def test_one_process_that_failed_restarts_as_one_process(recipe: Path, command: Command) -> None:
    words = [*launcher_of(1, ranks=1), recipe, "train.save_steps=1", "train.deepspeed=zero2", "train.resume=never"]
    printed = command(words, PYTHONPATH=str(REPOSITORY), AT="after step 3", DO="SIGKILL", STARTS="1")
    assert "Restarting all processes; restarts left: 0." in printed.stderr
    assert "it resumes from checkpoint-2" in printed.stdout
    run = latest(recipe)
    assert decisions(run)["engine"] == "ZeRO-2"
    assert (run.record["status"], steps(run)) == ("finished", list(range(1, 7)))


@pytest.mark.extra  # a cut link (test_two_hosts.py) ends a real one; this is NCCL's way of saying it
def test_a_rank_that_nccls_watchdog_has_aborted_is_one_message(recipe: Path, command: Command) -> None:
    words, fault = (
        [*launcher_of(0, ranks=2), recipe, "train.ddp_timeout=60"],
        {"AT": "after step 3", "DO": "NCCL", "ON": "1"},
    )
    printed = command(words, expect=1, PYTHONPATH=str(REPOSITORY), **fault)
    said = r"\nRank 1 on \S+ lost the other ranks: NCCL's watchdog ended it, because a collective .*rank-1\.log.*train\.ddp_timeout=60 s"
    assert len(re.findall(said, printed.stderr)) == 1, printed.stderr
    assert "The same command resumes from checkpoint-2." in printed.stderr
    assert "SIGABRT" not in printed.stderr and "Traceback" not in printed.stderr


def test_one_process_trains_in_the_process_that_planned(recipe: Path, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IN_ONE_PROCESS)
    words = [tmp_path / "program.py", recipe, "train.max_steps=2"]
    printed = ranks.run(1, words, NPROC="1")["stdout"]
    (planned, trained) = re.findall(r"(?:planned|trained) by (\d+)", printed)
    assert planned == trained


IN_ONE_PROCESS = """
import os, sys
from sft.train import main as training
print("planned by", os.getpid())
train = training.train
training.train = lambda *given, **named: print("trained by", os.getpid()) or train(*given, **named)
sys.argv[1:1] = ["train"]
from sft.cli import main
main()
"""


@pytest.mark.extra
def test_two_processes_meet_on_a_machine_whose_name_has_no_address(recipe: Path, start: Start) -> None:
    """As in a container without an entry for itself."""
    words = ["unshare", "--uts", "sh", "-c", 'hostname no-such-name && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --uts needs root, or user namespaces")
    job = start([*words, *LAUNCH, recipe], NPROC="2")
    printed = job.communicate(timeout=120)[0]
    assert job.returncode == 0, printed
    finished(recipe)


# `--multi_gpu` is accelerate's word for several processes; without a GPU they are CPU ranks.
BY_HAND = {
    "torchrun": (["torchrun", "--standalone", "--nproc-per-node", "2"], "2 ZeRO-3"),
    "accelerate": (["accelerate", "launch", "--multi_gpu", "--num_processes", "2"], "2 ZeRO-2"),
    "deepspeed": (["deepspeed", "--num_gpus", "2", "--master_port", "PORT"], "2 ZeRO-1"),
}


@pytest.mark.parametrize("launcher", rows(BY_HAND, ["accelerate"]))
def test_every_launcher_trains_the_same_and_the_first_error_is_shown_once(
    launcher: str, runs: EngineRuns, start: Start
) -> None:
    """With debug=true, which changes nothing either."""
    words, engine = BY_HAND[launcher]
    overrides = [*ENGINES[engine].overrides, "debug=true", f"tracking.run_name={launcher}"]
    job = start(
        [*(str(free_port()) if word == "PORT" else word for word in words), FAULTS, runs.recipe("packed"), *overrides],
        AT="after step 3",
        DO="raise",
        ON="1",
    )
    printed = job.communicate()[0]
    run = runs.named("packed", launcher)
    assert job.returncode == 1, printed
    assert printed.count("ZeroDivisionError: made by the test") == 1, printed
    assert re.search(r"Rank 1 on \S+ failed; the others are stopped\. Its log: \S+/logs/rank-1\.log", printed)
    assert "by peer" not in printed
    assert "ZeroDivisionError: made by the test" in (run.path / "logs" / "rank-1.log").read_text()
    assert run.record["running"]["engine"] == ENGINES[engine].engine
    assert run.record["running"]["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert steps(run)[:2] == [1, 2]
    assert losses(run) == pytest.approx(losses(runs("1"))[: len(losses(run))], abs=1e-5)


@pytest.mark.extra  # test_faulty_inputs.py has what an environment holds of accelerate's
def test_an_accelerate_configuration_of_another_project_is_refused_in_one_message(
    recipe: Path, tmp_path: Path, start: Start
) -> None:
    config = tmp_path / "accelerate" / "default_config.yaml"
    config.parent.mkdir()
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2}
    config.write_text(yaml.safe_dump(settings | {"num_machines": 1, "mixed_precision": "no", "use_cpu": False}))
    job = start(["accelerate", "launch", "-m", "sft.train", recipe], HF_HOME=str(tmp_path))
    printed = job.communicate()[0]
    assert job.returncode != 0
    assert printed.count("accelerate launch requests FSDP (its options, or a configuration left by") == 1, printed


def finished(recipe: Path) -> None:
    run = latest(recipe)
    assert (run.record["status"], run.record["ranks"]) == ("finished", 2)
    assert steps(run) == list(range(1, len(steps(run)) + 1))
    assert (run.path / "logs" / "rank-1.log").is_file()


def test_the_command_of_the_kubernetes_file_trains_on_two_machines_and_both_restart_together(
    recipe: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    job = yaml.safe_load((REPOSITORY / "scripts" / "kubernetes" / "pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    words = [*container["command"], recipe, f"output_dir={recipe.parent / 'outputs'}", "--max-restarts", "1"]
    # All that the training operator 1.9 sets in a pod: setPodEnv in its pkg/controller.v1/pytorch/envvar.go, nprocPerNode by default auto.
    both = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "2", "PYTHONUNBUFFERED": "1"}
    both |= dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), "127.0.0.1")
    both |= dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), str(free_port()))
    both |= {one["name"]: one["value"] for one in container["env"] if one["name"] != "HF_HOME"}
    ranks = ({"PET_NODE_RANK": str(rank), "RANK": str(rank)} for rank in (0, 1))
    first, second = (start([*words, "train.max_steps=40"], **both, **own) for own in ranks)
    os.kill(process_at_step(recipe, 1, 4, first), signal.SIGKILL)
    printed, elsewhere = first.communicate()[0], second.communicate()[0]
    assert (first.returncode, second.returncode) == (0, 0), printed + elsewhere
    finished(recipe)
    # Each machine names the first rank of the job to go.
    assert all(re.search(r"Rank 1 on \S+ was ended by signal 9", text) for text in (printed, elsewhere)), (
        printed + elsewhere
    )
    assert "Restarting all processes; restarts left: 0." in printed + elsewhere
    assert "step 40/40" in printed
    assert "step " not in re.sub(r"Rank 1 on .*", "", elsewhere)
    assert re.search(r"Rank 1 on \S+ and the other ranks of this node write to ", elsewhere)
