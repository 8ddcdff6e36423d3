import json
import os
from pathlib import Path

import pytest

from sft.launch.job import open_job
from sft.launch.open_run import claim_directory
from sft.plan.hardware import Hardware
from sft.recipe.changes import Change
from sft.run.record import close_session, installed_versions, record_end, record_start


@pytest.fixture
def folder(recipe_file: Path, tmp_path: Path) -> Path:
    """Where the recipe's runs go."""
    recipe_file.write_text(recipe_file.read_text() + f"output_dir: {tmp_path / 'out'}\n")
    return tmp_path / "out" / "mine"


def test_the_record_says_what_was_run_and_nothing_of_the_environment(
    recipe_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN": "hf_abcdefgh12345", "WANDB_API_KEY": "0123456789abcdef", "MY_OWN": "planted-value-77"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    overrides = ["tracking.run_name=first", "train.seed=3"]
    job = open_job(recipe_file, overrides, Hardware(None, 2, 2, 2, 16.0))
    run = claim_directory(job)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x")
    text = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    assert not [word for word in (*secrets, *secrets.values(), os.environ["PATH"]) if word in text]
    record = run.record
    assert (record["status"], record["recipe"], record["ranks"]) == ("running", "mine", 2)
    assert (record["overrides"], record["data_fingerprint"]) == (overrides, "fingerprint-x")
    assert (record["versions"], set(record["git"])) == (installed_versions(), {"commit", "dirty"})
    assert run.recipe() == job.recipe


def test_every_session_is_kept_and_their_seconds_are_added_up(recipe_file: Path, folder: Path) -> None:
    job = open_job(recipe_file, ["tracking.run_name=first"], Hardware(None, 1, 1, 2, 16.0))
    run = claim_directory(job)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x")
    started = run.record["started"]
    # Killed: it can say nothing itself, and its last line was cut off.
    run.metrics_file.write_text('{"step": 8, "loss": 4.0, "seconds": 30.0}\n{"step": 12, "lo')
    changes = [Change("train.max_steps", 10, 20)]
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x", "checkpoint-5", {"checkpoint-8": "cut"}, changes)
    first, second = run.record["sessions"]
    assert (first["status"], first["last_step"], first["seconds"]) == ("killed", 8, 30.0)
    assert (second["checkpoint"], second["passed_over"]) == ("checkpoint-5", {"checkpoint-8": "cut"})
    assert second["changes"] == {"train.max_steps": [10, 20]}
    # Stopped before it trained a step: the line after its checkpoint is that of the session before.
    os.utime(run.metrics_file, (0, 0))
    close_session(run, "interrupted")
    assert (run.record["sessions"][1]["seconds"], run.record["timings"]["train_seconds"]) == (None, 30.0)
    assert run.record["sessions"][1]["last_step"] is None
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x", "checkpoint-5")
    run.metrics_file.write_text('{"step": 5, "loss": 4.0, "seconds": 20.0}\n')  # cut back to the checkpoint
    close_session(run, "interrupted")
    assert (run.record["sessions"][2]["seconds"], run.record["timings"]["train_seconds"]) == (None, 30.0)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x", "checkpoint-5")
    run.metrics_file.write_text('{"step": 5, "loss": 4.0}\n{"step": 20, "loss": 2.0, "seconds": 9.0}\n')
    record_end(run, 50.0, evaluates=False)
    record = run.record
    assert [one["status"] for one in record["sessions"]] == ["killed", "interrupted", "interrupted", "finished"]
    assert (record["started"], record["status"]) == (started, "finished")
    assert record["timings"] == {"prepare_seconds": 1.5, "train_seconds": 80.0}
    assert record["train_loss"] == (5 * 4.0 + 15 * 2.0) / 20
    close_session(run, "failed")
    assert run.record == record


def test_a_finished_training_is_judged_by_its_lines(recipe_file: Path, folder: Path) -> None:
    job = open_job(recipe_file, ["tracking.run_name=first"], Hardware(None, 1, 1, 2, 16.0))
    run = claim_directory(job)
    record_start(run, job, {}, "fingerprint-x")
    lines = [{"step": step, "loss": loss, "seconds": 1.0} for step, loss in ((1, 1.0), (4, None), (8, 3.0))]
    lines[1]["skipped_steps"] = 3
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.update(held_out_loss_before=1.0)
    record_end(run, 5.0, False)
    assert run.record["train_loss"] == pytest.approx((1 + 4 * 3) / 5)
    assert set(run.record["warnings"]) == {"loss"}
