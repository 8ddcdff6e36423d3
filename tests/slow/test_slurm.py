"""scripts/slurm on a real cluster of two nodes, which tests/slurm_cluster.py starts on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import lines_of, losses, until, write_recipe
from tests.slow.ranks import Ranks
from tests.slurm_cluster import Cluster, slurm_cluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.extra, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
SCRIPTS = REPOSITORY / "scripts" / "slurm"
STEPS = 60

# A first start takes long enough for Slurm, which looks at its jobs' time limits every 30 seconds.
SLOW = """
import os, time
from transformers import TrainerCallback

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ.get("SLOW") and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(1)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs of slurm")
    (folder / "slow.py").write_text(SLOW)
    return write_recipe(
        folder / "job.yaml",
        train={
            "global_batch_size": 8,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "save_steps": 1000,
            "logging_steps": 1,
            "callbacks": ["slow.py:Slow"],
        },
        eval={"tasks": ["builtin:demo"], "limit": 4},
    )


@pytest.fixture(scope="module")
def alone(recipe: Path, ranks: Ranks) -> Run:
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=alone"])
    return Run(recipe.parent / "outputs" / "job" / "alone")


@pytest.fixture(scope="module")
def on_two_nodes(cluster: Cluster, recipe: Path) -> Run:
    """The run of an undisturbed job."""
    job = cluster.submit(SCRIPTS / "sft.sbatch", recipe, "tracking.run_name=nodes")
    assert cluster.end_of(job) == "COMPLETED", cluster.printed(job)
    return Run(recipe.parent / "outputs" / "job" / "nodes")


def test_two_nodes_train_as_one_process(on_two_nodes: Run, alone: Run) -> None:
    assert (on_two_nodes.record["status"], on_two_nodes.record["ranks"]) == ("finished", 2)
    assert losses(on_two_nodes) == pytest.approx(losses(alone), rel=1e-4)
    assert len(losses(on_two_nodes)) == STEPS
    assert on_two_nodes.comparison_file.is_file()


def test_rank_0_evaluates_as_long_as_it_takes_when_the_other_node_is_done(
    cluster: Cluster, recipe: Path, alone: Run
) -> None:
    """All that is left of this run is its evaluation. The cluster's WaitTime would end a step two seconds after its first task."""
    assert not alone.comparison_file.exists()
    job = cluster.submit(SCRIPTS / "sft.sbatch", recipe, "tracking.run_name=alone")
    assert cluster.end_of(job) == "COMPLETED", cluster.printed(job)
    assert alone.comparison_file.is_file()


def test_a_job_whose_time_is_up_saves_requeues_itself_and_resumes(cluster: Cluster, recipe: Path, alone: Run) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "limited")
    job = cluster.submit(SCRIPTS / "sft.sbatch", recipe, "tracking.run_name=limited", SLOW="1")
    until(lambda: lines_of(run) >= 3)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=5")  # minutes, of which --signal=B:USR1@300 takes all
    until(lambda: cluster.state(job) == "PENDING")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    stopped_at = lines_of(run)
    assert run.record["status"] == "interrupted"
    assert cluster.end_of(job) == "COMPLETED", cluster.printed(job)
    printed = cluster.printed(job)
    assert "The time is up: requeued, 1 of 20." in printed
    assert f"Interrupted by SIGUSR1 after step {stopped_at}. The same command resumes from" in printed
    assert 3 <= stopped_at < STEPS
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


def test_a_cancelled_job_leaves_a_checkpoint_and_is_not_queued_again(cluster: Cluster, recipe: Path) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "cancelled")
    job = cluster.submit(SCRIPTS / "sft.sbatch", recipe, "tracking.run_name=cancelled", SLOW="1")
    until(lambda: lines_of(run) >= 3)
    cluster.run("scancel", job)
    assert cluster.end_of(job) == "CANCELLED"
    assert run.record["status"] == "interrupted"
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None and f"SIGTERM after step {lines_of(run)}" in run.record["error"]


def test_a_run_is_evaluated_by_a_job(cluster: Cluster, on_two_nodes: Run) -> None:
    job = cluster.submit(SCRIPTS / "eval.sbatch", on_two_nodes.path, "tasks=builtin:demo", "limit=8")
    assert cluster.end_of(job) == "COMPLETED", cluster.printed(job)
    assert json.loads(on_two_nodes.comparison_file.read_text())
    assert "tuned: 8 documents of demo_extraction" in cluster.printed(job)


def test_each_task_of_an_array_trains_with_its_own_argument(cluster: Cluster, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "job.yaml", train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 2})
    words = [f"{recipe} tracking.run_name={name} train.seed={seed}" for name, seed in (("a", 1), ("b", 2))]
    job = cluster.submit(SCRIPTS / "sft.sbatch", *words, options=["--array=1-3", "--nodes=1"])
    assert cluster.end_of(f"{job}_1") == cluster.end_of(f"{job}_2") == "COMPLETED"
    assert [Run(tmp_path / "outputs" / "job" / name).recipe().train.seed for name in "ab"] == [1, 2]
    assert cluster.end_of(f"{job}_3") == "FAILED"
    assert "SLURM_ARRAY_TASK_ID=3, and there are 2 arguments" in cluster.printed(job)


def test_a_mistake_ends_every_task_with_status_2_and_another_folder_is_refused(cluster: Cluster, recipe: Path) -> None:
    job = cluster.submit(SCRIPTS / "sft.sbatch", recipe, "train.learning_rate=high")
    assert cluster.end_of(job) == "FAILED"
    assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", job)
    elsewhere = cluster.submit(SCRIPTS / "sft.sbatch", recipe, options=["--chdir=/"])
    assert cluster.end_of(elsewhere) == "FAILED"
    assert cluster.printed(elsewhere).startswith("/ is not the repository: submit this there")


def test_an_allocation_without_srun_is_refused(cluster: Cluster, recipe: Path) -> None:
    command = f"bash {REPOSITORY}/scripts/sft.sh '{recipe}' 2>&1; echo status $?"
    printed = cluster.run("salloc", "--nodes=2", "bash", "-c", command)
    assert "SLURM_NODEID is not set. srun sets it" in printed
    assert "start the command with srun --ntasks-per-node=1" in printed
    assert "status 2" in printed
