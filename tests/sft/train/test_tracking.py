import os
import sys
from pathlib import Path

import pytest

from sft.errors import RunError
from sft.recipe.schema import Tracking
from sft.run.directory import Run
from sft.train.tracking import check_trackers, set_up_trackers

NAMES = (
    *(
        "WANDB_PROJECT",
        "WANDB_DIR",
        "WANDB_SILENT",
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_RUN_ID",
        "WANDB_RESUME",
        "WANDB_BASE_URL",
    ),
    *("TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    *(
        "MLFLOW_TRACKING_URI",
        "MLFLOW_ALLOW_FILE_STORE",
        "MLFLOW_RUN_ID",
        "MLFLOW_EXPERIMENT_NAME",
        "MLFLOW_MAX_LOG_PARAMS",
    ),
    *("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"),
)
WANDB = Tracking(report_to=("wandb",), project="mine")


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "run.json").write_text("{}")
    return Run(tmp_path)


def test_without_trackers_nothing_is_set(run: Run) -> None:
    assert set_up_trackers(Tracking(), run) == []
    assert not [name for name in NAMES if name in os.environ]


@pytest.mark.parametrize(
    ("key", "netrc", "expected"),
    [
        (None, "", "offline"),
        (40 * "0", "", None),
        (None, "machine api.wandb.ai login user password 0123456789abcdef\n", None),
        (None, "machine github.com login user password x\n", "offline"),
    ],
)
def test_wandb_is_offline_where_nobody_is_logged_in(
    key: str | None, netrc: str, expected: str | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "netrc").write_text(netrc)
    (run.path / "netrc").chmod(0o600)
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    notes = set_up_trackers(WANDB, run)
    assert (os.environ.get("WANDB_MODE"), os.environ["WANDB_PROJECT"]) == (expected, "mine")
    assert os.environ["WANDB_DIR"] == str(run.path)
    assert [f"wandb sync {run.path}/wandb/offline-run-*" in note for note in notes] == [True] * (expected == "offline")


def test_settings_that_came_with_a_run_send_no_key_elsewhere(run: Run) -> None:
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere\n")
    with pytest.raises(RunError, match="wandb/settings would decide"):
        set_up_trackers(WANDB, run)


def test_all_sessions_of_a_run_write_to_one_run_of_wandb(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for _ in range(2):
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        set_up_trackers(WANDB, run)
        names.append(os.environ["WANDB_RUN_ID"])
        assert os.environ["WANDB_RESUME"] == "allow"
    assert names == [run.record["wandb_id"]] * 2


def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    (tmp_path / "trackio").mkdir()  # a folder that a tracker wrote here is no package
    with pytest.raises(RunError, match=r"report_to=trackio: trackio is not installed.*pip install"):
        check_trackers(Tracking(report_to=("trackio",)))


def test_trackio_writes_into_the_run_unless_the_user_says_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = set_up_trackers(Tracking(report_to=("trackio",)), run)
    assert os.environ["TRACKIO_DIR"] == str(run.path / "trackio") in note
    monkeypatch.setenv("TRACKIO_DIR", "/mine")
    assert set_up_trackers(Tracking(report_to=("trackio",)), run) == []
    assert os.environ["TRACKIO_DIR"] == "/mine"


def test_a_resumed_run_continues_its_run_of_mlflow(run: Run) -> None:
    set_up_trackers(Tracking(report_to=("mlflow",), project="mine"), run)
    assert os.environ["MLFLOW_TRACKING_URI"] == (run.path / "mlflow").as_uri()
    assert os.environ["MLFLOW_EXPERIMENT_NAME"] == "mine"
    run.update(mlflow_id="5")
    set_up_trackers(Tracking(report_to=("mlflow",), project="other"), run)
    assert (os.environ["MLFLOW_RUN_ID"], os.environ["MLFLOW_MAX_LOG_PARAMS"]) == ("5", "0")
    assert "MLFLOW_EXPERIMENT_NAME" not in os.environ


def test_a_server_of_mlflow_that_does_not_answer_is_one_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RunError, match="report_to=mlflow: ") as raised:
        set_up_trackers(Tracking(report_to=("mlflow",)), run)
    assert "secret" not in str(raised.value)
