"""mlflow and trackio have each figure once, in order, also where a run was killed and resumed; read by their own clients."""

import json
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.engine_runs import lines
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"
STEPS = list(range(1, 13))


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was killed after step 7, whose last checkpoint is of step 4, and resumed with another batch per process."""
    folder = tmp_path_factory.mktemp("tracked")
    recipe = write_recipe(
        folder / "job.yaml",
        data={"train": "builtin:demo", "max_length": 128, "held_out": 0.01},
        train={
            "eval_steps": 6,
            "max_steps": 12,
            "save_steps": 4,
            "logging_steps": 1,
            "global_batch_size": 4,
            "micro_batch_size": 2,
        },
        tracking={"report_to": ["mlflow", "trackio"], "project": "mine", "run_name": "one"},
    )
    ranks.run(1, [FAULTS, recipe], expect=-9, AT="after step 7", DO="SIGKILL")
    printed = ranks.run(1, ["sft.train", recipe, "train.micro_batch_size=4"])
    assert "resumes from checkpoint-4" in printed["stdout"]
    return Run(folder / "outputs" / "job" / "one")


def test_mlflow_has_each_step_once_in_one_run_and_the_recipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient((run.path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.info.run_id) == (
        "job-one",
        "FINISHED",
        run.record["mlflow_id"],
    )
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(line["step"], line["loss"]) for line in lines(run)]
    assert [one.step for one in history] == STEPS
    assert [one.step for one in client.get_metric_history(found.info.run_id, "eval_loss")] == [0, 6, 12]
    assert found.data.params["recipe.train.max_steps"] == "12"


def test_trackio_has_each_step_once_in_one_run_and_the_recipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", run.path / "trackio")
    (found,) = trackio.Api().runs("mine")
    assert (found.name, found.id) == ("job-one", run.record["trackio_id"])
    logs = [one for one in sqlite_storage.SQLiteStorage.get_logs("mine", found.name) if "train/loss" in one]
    assert [(one["train/global_step"], one["train/loss"]) for one in logs] == [
        (line["step"], line["loss"]) for line in lines(run)
    ]
    losses = sqlite_storage.SQLiteStorage.get_logs("mine", found.name)
    assert [one["train/global_step"] for one in losses if "eval/loss" in one] == [0, 6, 12]
    assert found.config["recipe"]["train"]["max_steps"] == 12


def test_nothing_is_written_outside_of_the_run(run: Run) -> None:
    kept = {path.name for path in Path(run.output_dir).parent.iterdir()}
    assert kept <= {"job.yaml", "outputs"}, json.dumps(sorted(kept))
