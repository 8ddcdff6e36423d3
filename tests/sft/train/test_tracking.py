import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from sft.errors import RunError
from sft.recipe.schema import Tracking
from sft.run.directory import Run
from sft.train.tracking import set_up_trackers

NAMES = (
    *("WANDB_PROJECT", "WANDB_DIR", "WANDB_SILENT", "WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_RESUME"),
    "TENSORBOARD_LOGGING_DIR",
)


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_without_trackers_nothing_is_set(tmp_path: Path) -> None:
    assert set_up_trackers(Tracking(), Run(tmp_path)) == []
    assert not [name for name in NAMES if name in os.environ]


def test_wandb_is_offline_where_nobody_is_logged_in_and_says_how_to_go_on(tmp_path: Path) -> None:
    (note,) = set_up_trackers(Tracking(report_to=("wandb",), project="mine"), Run(tmp_path))
    assert os.environ["WANDB_MODE"] == "offline"
    assert os.environ["WANDB_PROJECT"] == "mine"
    assert os.environ["WANDB_DIR"] == str(tmp_path)
    assert f"wandb sync {tmp_path}/wandb/offline-run-*" in note


def test_settings_that_came_with_a_run_send_no_key_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere\n")
    with pytest.raises(RunError, match=r"wandb/settings would decide where wandb sends this run and its key"):
        set_up_trackers(Tracking(report_to=("wandb",)), Run(tmp_path))


def test_wandb_is_online_for_who_is_logged_in_and_no_key_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", 5 * "01234567")
    assert set_up_trackers(Tracking(report_to=("wandb",)), Run(tmp_path)) == []
    assert "WANDB_MODE" not in os.environ


@pytest.mark.parametrize(("mode", "refused"), [(None, True), ("online", True), ("offline", False)])
def test_a_key_that_is_cut_off_is_refused_where_it_is_used(
    mode: str | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(RunError, match="WANDB_API_KEY has 16") if refused else nullcontext():
        set_up_trackers(Tracking(report_to=("wandb",)), Run(tmp_path))


@pytest.mark.parametrize(
    ("netrc", "offline"),
    [
        ("machine api.wandb.ai login user password 0123456789abcdef\n", False),
        ("machine github.com login user password x\n", True),
        ("machine\n", True),
    ],
)
def test_a_login_in_netrc_counts(netrc: str, offline: bool, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    notes = set_up_trackers(Tracking(report_to=("wandb",)), Run(tmp_path))
    assert (os.environ.get("WANDB_MODE") == "offline") == offline
    assert "0123456789abcdef" not in "".join(notes)


def test_the_mode_that_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert set_up_trackers(Tracking(report_to=("wandb",)), Run(tmp_path)) == []
    assert os.environ["WANDB_MODE"] == "disabled"


def test_tensorboard_writes_into_the_run(tmp_path: Path) -> None:
    (note,) = set_up_trackers(Tracking(report_to=("tensorboard",)), Run(tmp_path))
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")
    assert note == f"tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"


def test_transformers_reads_the_folder_that_is_set() -> None:
    """What `set_up_trackers` leans on."""
    import inspect

    from transformers.integrations.integration_utils import TensorBoardCallback

    assert "TENSORBOARD_LOGGING_DIR" in inspect.getsource(TensorBoardCallback)


def test_every_session_of_a_run_writes_to_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = Run(tmp_path / "a"), Run(tmp_path / "b")
    names = []
    for one in (run, run, other):
        one.path.mkdir(exist_ok=True)
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        set_up_trackers(Tracking(report_to=("wandb",)), one)
        names.append(os.environ["WANDB_RUN_ID"])
        assert os.environ["WANDB_RESUME"] == "allow"
    assert names[0] == names[1] == run.record["wandb_id"] != names[2]


def test_a_name_that_the_user_gave_the_run_of_wandb_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    set_up_trackers(Tracking(report_to=("wandb",)), Run(tmp_path))
    assert (os.environ["WANDB_RUN_ID"], Run(tmp_path).record["wandb_id"]) == ("mine", "mine")
