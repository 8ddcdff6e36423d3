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
