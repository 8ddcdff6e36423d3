import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from sft.errors import RunError
from sft.recipe.schema import Tracking
from sft.run.directory import Run
from sft.train.tracking import check_trackers, set_up_trackers

NAMES = (
    *("WANDB_PROJECT", "WANDB_DIR", "WANDB_SILENT", "WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_RESUME"),
    *("TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "DISABLE_MLFLOW_INTEGRATION"),
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


def test_without_trackers_nothing_is_set(tmp_path: Path) -> None:
    assert set_up_trackers(Tracking(), Run(tmp_path)) == []
    assert not [name for name in NAMES if name in os.environ]


@pytest.mark.parametrize(
    ("key", "netrc", "mode", "expected"),
    [
        (None, "", None, "offline"),
        (40 * "0", "", None, None),
        (None, "machine api.wandb.ai login user password 0123456789abcdef\n", None, None),
        (None, "machine github.com login user password x\n", None, "offline"),
        (None, "machine\n", None, "offline"),
        (None, "", "disabled", "disabled"),
    ],
)
def test_wandb_is_offline_where_nobody_is_logged_in(
    key: str | None,
    netrc: str,
    mode: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    for name, value in {"WANDB_API_KEY": key, "WANDB_MODE": mode}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    notes = set_up_trackers(WANDB, Run(tmp_path))
    assert (os.environ.get("WANDB_MODE"), os.environ["WANDB_PROJECT"]) == (expected, "mine")
    assert os.environ["WANDB_DIR"] == str(tmp_path)
    assert [f"wandb sync {tmp_path}/wandb/offline-run-*" in note for note in notes] == [True] * (expected == "offline")


@pytest.mark.parametrize(("mode", "refused"), [(None, True), ("offline", False)])
def test_a_key_that_is_cut_off_is_refused_where_it_is_used(
    mode: str | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(RunError, match="WANDB_API_KEY has 16") if refused else nullcontext():
        set_up_trackers(WANDB, Run(tmp_path))


def test_settings_that_came_with_a_run_send_no_key_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere\n")
    with pytest.raises(RunError, match="wandb/settings would decide"):
        set_up_trackers(WANDB, Run(tmp_path))


def test_all_sessions_of_a_run_write_to_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other, names = Run(tmp_path / "a"), Run(tmp_path / "b"), []
    for one in (run, run, other):
        one.path.mkdir(exist_ok=True)
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        set_up_trackers(WANDB, one)
        names.append(os.environ["WANDB_RUN_ID"])
        assert os.environ["WANDB_RESUME"] == "allow"
    assert names[0] == names[1] == run.record["wandb_id"] != names[2]


def test_tensorboard_writes_into_the_run(tmp_path: Path) -> None:
    set_up_trackers(Tracking(report_to=("tensorboard",)), Run(tmp_path))
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # a folder that a tracker wrote here is no package
    with pytest.raises(RunError, match=f"report_to={name}: {name} is not installed.*pip install"):
        check_trackers(Tracking(report_to=(name,)))  # type: ignore[arg-type]


def test_a_tracker_that_the_environment_turns_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "true")
    with pytest.raises(RunError, match="DISABLE_MLFLOW_INTEGRATION"):
        check_trackers(Tracking(report_to=("mlflow",)))


def test_trackio_writes_into_the_run_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = set_up_trackers(Tracking(report_to=("trackio",)), Run(tmp_path))
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio") in note
    monkeypatch.setenv("TRACKIO_DIR", "/mine")
    set_up_trackers(Tracking(report_to=("trackio",)), Run(tmp_path))
    assert os.environ["TRACKIO_DIR"] == "/mine"
    monkeypatch.delenv("TRACKIO_DIR")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://me:secret@host")
    (note,) = set_up_trackers(Tracking(report_to=("trackio",)), Run(tmp_path))
    assert "TRACKIO_DIR" not in os.environ
    assert "TRACKIO_SERVER_URL" in note and "secret" not in note


def test_all_sessions_of_a_run_write_to_one_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, names = Run(tmp_path / "job" / "a"), []
    run.path.mkdir(parents=True)
    for project, parameters in (("mine", None), ("other", "0")):
        for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
            monkeypatch.delenv(name, raising=False)
        set_up_trackers(Tracking(report_to=("mlflow",), project=project), run)
        names.append(os.environ["MLFLOW_RUN_ID"])
        assert os.environ["MLFLOW_TRACKING_URI"] == (run.path / "mlflow").as_uri()
        assert os.environ["MLFLOW_EXPERIMENT_NAME"] == "mine"
        assert os.environ.get("MLFLOW_MAX_LOG_PARAMS") == parameters
    assert names[0] == names[1] == run.record["mlflow_id"]


def test_a_server_of_mlflow_that_does_not_answer_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RunError, match="report_to=mlflow: ") as raised:
        set_up_trackers(Tracking(report_to=("mlflow",)), Run(tmp_path))
    assert "secret" not in str(raised.value)
