"""mlflow and trackio have each figure once, in order, also where a run was killed and resumed; read by their own clients."""

import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.beside import python_with
from tests.slow.conftest import Start, write_recipe
from tests.slow.engine_runs import lines
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"
STEPS = list(range(1, 13))


def killed_and_resumed(
    ranks: Ranks, folder: Path, trackers: list[str], ending: str = "SIGKILL", **environment: str
) -> tuple[Run, str]:
    """A run killed after step 7, with a checkpoint of step 4, or stopped with one of step 8; resumed with another batch per process."""
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
        tracking={"report_to": trackers, "project": "mine", "run_name": "one"},
    )
    killed = ending == "SIGKILL"
    ranks.run(1, [FAULTS, recipe], expect=-9 if killed else 143, AT="after step 7", DO=ending, **environment)
    printed = ranks.run(1, ["sft.train", recipe, "train.micro_batch_size=4"], **environment)
    assert f"resumes from checkpoint-{4 if killed else 8}" in printed["stdout"]
    return Run(folder / "outputs" / "job" / "one"), printed["stdout"]


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return killed_and_resumed(ranks, tmp_path_factory.mktemp("tracked"), ["mlflow", "trackio"])[0]


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
    # Steps 5 to 7 are those of the first session, whose batch per process rounds otherwise.
    assert [one.value for one in history] == pytest.approx([line["loss"] for line in lines(run)], rel=1e-5)
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
    assert [one["train/global_step"] for one in logs] == STEPS
    assert [one["train/loss"] for one in logs] == pytest.approx([line["loss"] for line in lines(run)], rel=1e-5)
    losses = sqlite_storage.SQLiteStorage.get_logs("mine", found.name)
    assert [one["train/global_step"] for one in losses if "eval/loss" in one] == [0, 6, 12]
    assert found.config["recipe"]["train"]["max_steps"] == 12


def test_nothing_is_written_outside_of_the_run(run: Run) -> None:
    kept = {path.name for path in Path(run.output_dir).parent.iterdir()}
    assert kept <= {"job.yaml", "outputs"}, json.dumps(sorted(kept))


def _wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file, which is a log as LevelDB writes it: blocks of 32 KiB, pieces with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, text = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        text += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(text)
            text = b""


@pytest.mark.extra
def test_wandb_and_tensorboard_have_the_recipe_and_each_step_in_order(ranks: Ranks, tmp_path: Path) -> None:
    """Offline, wandb writes its file when a session ends: of one that is killed outright, nothing may be left."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = killed_and_resumed(ranks, tmp_path, ["wandb", "tensorboard"], "SIGTERM", WANDB_MODE="offline")
    expected = {line["step"]: line["loss"] for line in lines(run)}
    board = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert {one.step: one.value for one in board.Scalars("train/loss")} == pytest.approx(expected, rel=1e-6)
    assert [one.step for one in board.Scalars("train/loss")] == STEPS
    assert [one.step for one in board.Scalars("eval/loss")] == [0, 6, 12]
    assert b'"max_steps": 12' in board.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]

    sessions = []
    for file in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        records = list(_wandb_records(file))
        assert {one.run.run_id for one in records if one.HasField("run")} == {run.record["wandb_id"]}
        items = [item for one in records for item in (*one.run.config.update, *one.config.update)]
        recipe = [json.loads(item.value_json) for item in items if (item.key or item.nested_key[0]) == "recipe"][-1]
        assert recipe["train"]["max_steps"] == 12
        rows = [
            {item.key or item.nested_key[0]: item.value_json for item in one.history.item}
            for one in records
            if one.HasField("history")
        ]
        sessions.append(
            [(int(row["train/global_step"]), float(row["train/loss"])) for row in rows if "train/loss" in row]
        )
    first, second = sessions
    assert [step for step, _ in [*first, *second]] == STEPS
    assert dict(first + second) == pytest.approx(expected)


def _answers(address: str, server: "subprocess.Popen[str]") -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        with suppress(requests.RequestException):
            requests.get(address, timeout=1)
            return
        time.sleep(0.2)
    raise AssertionError(f"{address} does not answer")


@pytest.fixture
def mlflow_server(tmp_path: Path, start: Start) -> str:
    """The address of mlflow's own server, which is not part of mlflow-skinny; on a database."""
    mlflow, port = python_with("mlflow").with_name("mlflow"), free_port()
    words = [
        mlflow,
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--workers",
        1,
        "--backend-store-uri",
        "sqlite:///m.db",
    ]
    place = ["env", "-C", tmp_path, "-u", "PYTHONPATH", "MLFLOW_DISABLE_TELEMETRY=true"]
    _answers(f"http://127.0.0.1:{port}/health", start([*place, *words]))
    return f"http://127.0.0.1:{port}"


@pytest.mark.extra
def test_mlflows_server_has_each_step_once_in_order_and_the_recipe(
    mlflow_server: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = killed_and_resumed(ranks, tmp_path, ["mlflow"], MLFLOW_TRACKING_URI=mlflow_server)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_server)
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (
        run.record["mlflow_id"],
        "job-one",
        "FINISHED",
    )
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [one.step for one in history] == STEPS
    # Steps 5 to 7 are those of the first session, whose batch per process rounds otherwise.
    assert [one.value for one in history] == pytest.approx([line["loss"] for line in lines(run)], rel=1e-5)
    assert [one.step for one in client.get_metric_history(found.info.run_id, "eval_loss")] == [0, 6, 12]
    assert found.data.params["recipe.train.max_steps"] == "12"
    assert not (run.path / "mlflow").exists()


@pytest.mark.extra
def test_trackios_server_has_each_step_once_in_order_and_the_recipe(ranks: Ranks, tmp_path: Path, start: Start) -> None:
    port = free_port()
    program = (
        f"import trackio; trackio.show(open_browser=False, block_thread=True, host='127.0.0.1', server_port={port})"
    )
    server = start([sys.executable, "-u", "-P", "-c", program], TRACKIO_DIR=str(tmp_path / "server"))
    assert server.stdout is not None
    address = next(found[0] for line in server.stdout if (found := re.search(r"http\S+write_token=\S+", line)))
    run, printed = killed_and_resumed(ranks, tmp_path, ["trackio"], TRACKIO_SERVER_URL=address)
    assert address.partition("write_token=")[2] not in printed
    from trackio.remote_client import RemoteClient

    client = RemoteClient(address.partition("?")[0], verbose=False)
    (found,) = client.predict(project="mine", api_name="/get_runs_for_project")
    assert (found["name"], found["id"]) == ("job-one", run.record["trackio_id"])
    logs = client.predict(project="mine", run="job-one", run_id=found["id"], api_name="/get_logs")
    sent = [one for one in logs if "train/loss" in one]
    assert [one["train/global_step"] for one in sent] == STEPS
    assert [one["train/loss"] for one in sent] == pytest.approx([line["loss"] for line in lines(run)], rel=1e-5)
    assert [one["train/global_step"] for one in logs if "eval/loss" in one] == [0, 6, 12]
    (config,) = client.predict(project="mine", api_name="/get_run_configs").values()
    assert config["recipe"]["train"]["max_steps"] == 12
