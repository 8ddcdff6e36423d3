import json
import os
from pathlib import Path
from typing import Any

import pytest

from sft.hardware import Hardware
from sft.job import open_job
from sft.opening import open_run
from sft.record import installed_versions, record_start


@pytest.fixture
def folder(recipe_file: Path, tmp_path: Path) -> Path:
    """Where the recipe's runs go."""
    recipe_file.write_text(recipe_file.read_text() + f"output_dir: {tmp_path / 'out'}\n")
    return tmp_path / "out" / "mine"


def test_nothing_of_the_environment_is_in_the_runs_files(
    recipe_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN": "hf_abcdefgh12345", "WANDB_API_KEY": "0123456789abcdef", "MY_OWN": "planted-value-77"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    overrides = ["tracking.run_name=first", "train.seed=3"]
    job = open_job(recipe_file, overrides, Hardware(None, 2, 2, 2, 16.0))
    run = open_run(job)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x")
    text = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    for name, value in secrets.items():
        assert value not in text
        assert name not in text
    assert os.environ["PATH"] not in text


def test_the_record_says_what_was_run_on_what(recipe_file: Path, folder: Path) -> None:
    overrides = ["tracking.run_name=first", "train.seed=3"]
    job = open_job(recipe_file, overrides, Hardware(None, 2, 2, 2, 16.0))
    run = open_run(job)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x")
    record: dict[str, Any] = json.loads((run.path / "run.json").read_text())
    assert record["status"] == "running"
    assert (record["recipe"], record["recipe_version"], record["ranks"]) == ("mine", 1, 2)
    assert record["overrides"] == overrides
    assert record["data_fingerprint"] == "fingerprint-x"
    assert record["timings"] == {"prepare_seconds": 1.5}
    assert record["hardware"]["cpu_cores"] == 2
    assert record["versions"] == installed_versions()
    assert record["versions"]["trl"][0].isdigit()
    assert set(record["git"]) == {"commit", "dirty"}
    assert run.recipe() == job.recipe
    run.update(status="finished")
    assert run.record == record | {"status": "finished"}
