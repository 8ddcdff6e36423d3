"""Which run a start opens: a new one, or an unfinished one that it resumes; and what it refuses."""

import fcntl
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sft.checkpoint.manifest import write_manifest
from sft.checkpoint.resume import writer_here
from sft.data.prepare import prepare
from sft.errors import DataError, RecipeError, RunError
from sft.files import write_json
from sft.hub.demo import Demo
from sft.launch.evaluation import unfinished_evaluation
from sft.launch.job import open_job
from sft.launch.open_run import (
    OWN_RUN,
    check_start,
    claim,
    claim_directory,
    open_run,
    other_unfinished,
    unfinished_run,
)
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.run.directory import Run

LeftBehind = Callable[..., Run]
MakeJob = Callable[..., Job]
NEVER = "train.resume=never"


def job_of(recipe_file: Path, *overrides: str, ranks: int = 1) -> Job:
    return open_job(recipe_file, overrides, Hardware(None, ranks, ranks, 2, 16.0))


def open_here(recipe_file: Path, *overrides: str, ranks: int = 1) -> Run:
    job = job_of(recipe_file, *overrides, ranks=ranks)
    check_start(job)
    return claim_directory(job)


@pytest.fixture
def folder(recipe_file: Path, tmp_path: Path) -> Path:
    """Where the recipe's runs go."""
    recipe_file.write_text(recipe_file.read_text() + f"output_dir: {tmp_path / 'out'}\n")
    return tmp_path / "out" / "mine"


@pytest.fixture
def left_behind(recipe_file: Path, folder: Path) -> LeftBehind:
    """A run as a process that has ended leaves it."""

    def leave(status: str, *overrides: str, checkpoint: str = "", name: str = "first", **record: Any) -> Run:
        run = Run(folder / name)
        run.checkpoints.mkdir(parents=True)
        run.recipe_file.write_bytes(recipe_file.read_bytes())
        run.update(status=status, overrides=list(overrides), **record)
        write_json(run.plan_file, {"decisions": [], "deepspeed": None})
        if checkpoint:
            (run.checkpoints / checkpoint).mkdir()
        (folder / "latest").unlink(missing_ok=True)
        (folder / "latest").symlink_to(name)
        return run

    return leave


@contextmanager
def claimed(run: Run) -> Iterator[None]:
    """Another holds it: a lock belongs to what opened the file, not to the process."""
    descriptor = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def test_a_new_run_holds_the_recipe_byte_for_byte_and_is_latest(recipe_file: Path, folder: Path) -> None:
    recipe_file.write_text("# a comment stays, ünï\r\n" + recipe_file.read_text(), newline="")
    run = open_here(recipe_file, "tracking.run_name=first")
    assert (run.path, run.checkpoints.is_dir()) == (folder / "first", True)
    assert run.recipe_file.read_bytes() == recipe_file.read_bytes()
    assert (folder / "latest").readlink() == Path("first")
    one, two = open_here(recipe_file, NEVER), open_here(recipe_file, NEVER)  # within one second
    assert one.path != two.path
    assert (folder / "latest").resolve() == two.path
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_finished_run_is_never_overwritten_and_the_message_says_what_can_be_done(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    run = left_behind("finished", "tracking.run_name=first", checkpoint="checkpoint-5")
    with pytest.raises(RunError, match=r"first exists and is never overwritten. Choose another") as refused:
        open_here(recipe_file, "tracking.run_name=first")
    assert f"model.name_or_path={run.final}" in str(refused.value)
    assert open_here(recipe_file).path != run.path


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_resumes_and_what_changes_no_training_may_differ(
    status: str, recipe_file: Path, left_behind: LeftBehind
) -> None:
    unfinished = left_behind(status, checkpoint="checkpoint-5")
    recipe_file.write_text(recipe_file.read_text() + "# later\n")
    assert open_here(recipe_file, "train.save_steps=7", "eval.limit=3", "debug=true").path == unfinished.path


def test_a_run_that_another_process_trains_is_left_alone(recipe_file: Path, left_behind: LeftBehind) -> None:
    with claimed(mine := left_behind("running", checkpoint="checkpoint-5")):
        with pytest.raises(RunError, match=r"train.resume=must, and another process is training"):
            open_here(recipe_file, "train.resume=must")
        assert open_here(recipe_file).path != mine.path
    with claimed(mine := left_behind("running", checkpoint="checkpoint-5", name="second")):
        assert open_here(recipe_file, "train.learning_rate=2e-3").path != mine.path  # a sweep
        with pytest.raises(RunError, match=r"Another process is training .*second. Wait for it, or choose another"):
            open_here(recipe_file, "tracking.run_name=second")


def test_a_changed_recipe_is_refused_with_what_differs(recipe_file: Path, left_behind: LeftBehind) -> None:
    unfinished = left_behind("interrupted", "train.max_steps=20", checkpoint="checkpoint-5")
    with pytest.raises(RunError) as refused:
        open_here(recipe_file, "train.max_steps=30", "train.save_steps=7")
    assert str(refused.value).splitlines() == [
        f"{unfinished.path} is unfinished (checkpoint-5), and this start differs from it:",
        "  train.max_steps: 20 -> 30",
        "  train.save_steps: 500 -> 7 (may differ)",
        "Change that back to resume, or allow it: 'train.resume_allow_changes=[train.max_steps]', or start a new run with "
        "train.resume=never. See docs/resume.md.",
    ]
    allowed = "train.resume_allow_changes=[train.max_steps]"
    assert open_here(recipe_file, "train.max_steps=30", allowed).path == unfinished.path
    assert open_here(recipe_file, "train.max_steps=30", NEVER).path != unfinished.path


def test_a_change_that_no_run_can_resume_with_is_not_offered(recipe_file: Path, left_behind: LeftBehind) -> None:
    left_behind("interrupted", checkpoint="checkpoint-5")
    with pytest.raises(RunError, match=r"train.seed: 0 -> 1 \(no run can resume with that\)") as refused:
        open_here(recipe_file, "train.seed=1", "train.max_steps=3")
    assert "resume_allow_changes" not in str(refused.value)
    with pytest.raises(RecipeError, match=r"train.seed: cannot change when a run resumes: it decides which rows"):
        open_here(recipe_file, "train.resume_allow_changes=[train.seed]")


def test_the_recipe_is_compared_with_what_it_meant_then(recipe_file: Path, left_behind: LeftBehind) -> None:
    """A default that has changed since is a change; a key that is new is none."""
    older = job_of(recipe_file).recipe.model_dump(mode="json")
    del older["train"]["save_canary"]
    unfinished = left_behind("interrupted", checkpoint="checkpoint-5", recipe_values=older)
    assert unfinished_run(job_of(recipe_file)) == unfinished
    older["train"]["adam_beta2"] = 0.999
    unfinished.update(recipe_values=older)
    with pytest.raises(RunError, match=r"train.adam_beta2: 0.999 -> 0.95"):
        unfinished_run(job_of(recipe_file))
    unfinished.update(recipe_values=older | {"gone": 1})
    with pytest.raises(RunError, match=r"was started by another version of this program"):
        unfinished_run(job_of(recipe_file))
    # A later session that wrote no checkpoint counts for nothing.
    trained = job_of(recipe_file).recipe.model_dump(mode="json", exclude_defaults=True)
    write_manifest(unfinished.checkpoints / "checkpoint-5", {"recipe": trained})
    assert unfinished_run(job_of(recipe_file)) == unfinished


def test_resume_can_be_required_and_forbidden(
    recipe_file: Path, left_behind: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"train.resume=must, and .* has no unfinished run"):
        open_here(recipe_file, "train.resume=must")
    unfinished = left_behind("failed")
    assert unfinished_run(job_of(recipe_file, "train.learning_rate=2e-3")) is None, (
        "without a checkpoint nothing is lost"
    )
    with pytest.raises(RunError, match=r"which is unfinished, has no checkpoint. train.resume=auto starts it again"):
        open_here(recipe_file, "train.resume=must")
    (unfinished.checkpoints / "checkpoint-5").mkdir()
    assert unfinished_run(job_of(recipe_file, "train.resume=must")) == unfinished
    assert unfinished_run(job_of(recipe_file, NEVER)) is None
    # A restart by a launcher, and a job that Slurm has requeued, resume the run that they have begun.
    for count, found in {"0": None, "1": unfinished}.items():
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert unfinished_run(job_of(recipe_file, NEVER)) == found


def test_a_restart_resumes_its_own_run_beside_a_newer_one(
    recipe_file: Path, left_behind: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = left_behind("failed", NEVER, checkpoint="checkpoint-5")
    newer = left_behind("failed", checkpoint="checkpoint-5", name="second")
    assert unfinished_run(job_of(recipe_file)) == newer
    monkeypatch.setenv(OWN_RUN, str(own.path))
    assert unfinished_run(job_of(recipe_file, NEVER)) == own


def test_what_wrote_the_newest_checkpoint_decides_before_the_data_is_prepared(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    unfinished = left_behind("interrupted", checkpoint="checkpoint-5", ranks=4)
    written = writer_here(job_of(recipe_file, ranks=4))
    writer = asdict(replace(written, ranks=2, precision="fp16"))
    write_manifest(unfinished.checkpoints / "checkpoint-5", {"writer": writer})
    with pytest.raises(RunError, match=r"checkpoint-5 was written by 2 ranks.*train.resume=never"):
        open_here(recipe_file, ranks=4)
    write_manifest(unfinished.checkpoints / "checkpoint-5", {"writer": asdict(written)})
    assert open_here(recipe_file, ranks=4).path == unfinished.path


def test_a_model_whose_name_on_the_hub_stands_for_another_commit_is_refused(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    job, then, now = job_of(recipe_file), "a" * 40, "b" * 40
    unfinished = left_behind("interrupted", checkpoint="checkpoint-5", base_model={"revision": then})
    with pytest.raises(RunError, match=rf"commit {then} .*now stands for {now}. Set model.revision={then}"):
        check_start(replace(job, model=replace(job.model, commit=now)))
    named = job.recipe.model.model_copy(update={"revision": then})
    pinned = replace(job, recipe=job.recipe.model_copy(update={"model": named}))
    check_start(pinned)
    assert unfinished_run(pinned) == unfinished


def test_every_other_unfinished_run_is_listed_with_its_command(left_behind: LeftBehind) -> None:
    older, killed = (
        left_behind(status, checkpoint="checkpoint-5", name=status) for status in ("interrupted", "running")
    )
    left_behind("finished", checkpoint="checkpoint-9", name="done")
    left_behind("failed", name="without a checkpoint")
    trained, newest = (left_behind("running", checkpoint="checkpoint-7", name=name) for name in ("other", "newest"))
    with claimed(trained):
        assert other_unfinished(newest) == [
            f"Also unfinished, at checkpoint-5: bash scripts/sft.sh {run.path}" for run in (killed, older)
        ]


def test_a_process_forked_from_the_one_that_trains_does_not_hold_the_run(left_behind: LeftBehind) -> None:
    """Workers that load data outlive one that is killed, by seconds."""
    run = left_behind("running")
    held = claim(run)
    assert held is not None and claim(run) is None
    with multiprocessing.get_context("fork").Pool(1) as workers:
        workers.apply(os.getpid)
        os.close(held)
        again = claim(run)
    assert again is not None
    os.close(again)


@pytest.mark.parametrize(("status", "evaluation"), [("finished", "running"), ("interrupted", "interrupted")])
def test_an_unfinished_evaluation_resumes_as_the_recipe_says_now_and_trains_nothing(
    status: str, evaluation: str, recipe_file: Path, left_behind: LeftBehind
) -> None:
    run = left_behind(status, checkpoint="checkpoint-5", evaluation=evaluation)
    run.final.mkdir()
    (run.final / "config.json").write_text("{}")
    free = ["eval.limit=5", "tracking.project=other", "train.resume=auto"]
    assert unfinished_evaluation(job_of(recipe_file, *free)) == run
    assert run.recipe().eval.limit == 5
    other = ["train.max_steps=9", "train.resume_allow_changes=[train.max_steps]"]
    with pytest.raises(RunError, match=r"is trained, its evaluation is not complete.*\n  train.max_steps: .*\n.*never"):
        unfinished_evaluation(job_of(recipe_file, *other))
    run.update(status="finished", evaluation="finished")
    assert unfinished_evaluation(job_of(recipe_file)) is None


def write_rows(path: Path, count: int, *more: str) -> None:
    rows = [{"prompt": f"Question {number}", "completion": f"Answer {number}"} for number in range(count)]
    rows += [{"prompt": "?", "completion": text} for text in more]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def make_job(recipe_file: Path, demo: Demo, tmp_path: Path) -> MakeJob:
    """A run over rows.jsonl, on a CPU, whose data is prepared."""
    words = [f"model.name_or_path={demo.model}", f"output_dir={tmp_path / 'out'}"]
    words.append(f"data.train={tmp_path / 'rows.jsonl'}")

    def make(*overrides: str) -> Job:
        job = job_of(recipe_file, *words, *overrides)
        prepare(job.recipe, job.model)
        return job

    return make


def test_a_run_keeps_the_ledger_of_what_it_is_trained_on(make_job: MakeJob, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 9, "{{name}}")
    started = open_run(make_job())
    kept = json.loads(started.run.ledger_file.read_text())
    assert kept == started.prepared.ledger | {"findings": started.prepared.findings}
    assert [found["kind"] for found in kept["findings"]] == ["placeholder"]
    assert started.run.record["data_fingerprint"] == started.prepared.fingerprint


def test_data_beyond_a_limit_leaves_no_run(make_job: MakeJob, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 9, "Oslo " * 500)
    with pytest.raises(DataError, match=r"1 of 10 rows \(10.0%\)"):
        open_run(make_job())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".prepared"]


def test_a_run_resumes_on_no_other_data(make_job: MakeJob, recipe_file: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 9)
    run = open_run(make_job("tracking.run_name=first")).run
    run.path.rename(tmp_path / "left")  # this process holds the folder that it has made
    shutil.copytree(tmp_path / "left", run.path)
    (run.checkpoints / "checkpoint-5").mkdir()
    write_manifest(run.checkpoints / "checkpoint-5")
    run.update(status="interrupted")
    write_rows(tmp_path / "rows.jsonl", 8)
    with pytest.raises(RunError, match=r"The data, tokenizer or chat template .*train.resume=never"):
        open_run(make_job("tracking.run_name=first"))
