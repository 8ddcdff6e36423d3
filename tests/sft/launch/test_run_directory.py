import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sft.checkpoint.manifest import write_manifest
from sft.checkpoint.resume import writer_here
from sft.errors import RecipeError, RunError
from sft.files import write_json
from sft.launch.evaluation import unfinished_evaluation
from sft.launch.job import open_job
from sft.launch.open_run import (
    OWN_RUN,
    broken_latest,
    check_start,
    claim,
    claim_directory,
    keep_recipe,
    unfinished_run,
)
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.run.directory import Run

LeftBehind = Callable[..., Run]
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

    def leave(
        status: str, *overrides: str, checkpoint: str = "", ranks: int = 1, name: str = "first", **record: Any
    ) -> Run:
        run = Run(folder / name)
        run.checkpoints.mkdir(parents=True)
        run.recipe_file.write_bytes(recipe_file.read_bytes())
        run.update(status=status, overrides=list(overrides), ranks=ranks, **record)
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


def test_a_new_run_is_the_recipe_byte_for_byte_and_latest(recipe_file: Path, folder: Path) -> None:
    recipe_file.write_text("# a comment stays, ünï\r\n" + recipe_file.read_text(), newline="")
    run = open_here(recipe_file, "tracking.run_name=first")
    assert run.path == folder / "first"
    assert run.recipe_file.read_bytes() == recipe_file.read_bytes()
    assert run.checkpoints.is_dir()
    assert (folder / "latest").readlink() == Path("first")


def test_a_finished_run_is_never_written_over(recipe_file: Path, left_behind: LeftBehind) -> None:
    finished = left_behind("finished", "tracking.run_name=first", checkpoint="checkpoint-5")
    with pytest.raises(RunError, match=r"first exists and is never overwritten. Choose another tracking.run_name"):
        open_here(recipe_file, "tracking.run_name=first")
    assert finished.record["status"] == "finished"
    assert open_here(recipe_file).path != finished.path


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_goes_on(status: str, recipe_file: Path, left_behind: LeftBehind) -> None:
    unfinished = left_behind(status, checkpoint="checkpoint-5")
    assert open_here(recipe_file).path == unfinished.path


def test_a_run_that_another_process_trains_is_left_alone(recipe_file: Path, left_behind: LeftBehind) -> None:
    mine = left_behind("running", checkpoint="checkpoint-5")
    with claimed(mine):
        with pytest.raises(RunError, match=r"train.resume=must, and another process is training"):
            open_here(recipe_file, "train.resume=must")
        assert open_here(recipe_file).path != mine.path
    mine = left_behind("running", checkpoint="checkpoint-5", name="second")
    with claimed(mine):  # a sweep: another learning rate beside it
        assert open_here(recipe_file, "train.learning_rate=2e-3").path != mine.path
        with pytest.raises(RunError, match=r"Another process is training .*second. Wait for it, or choose another"):
            open_here(recipe_file, "tracking.run_name=second")


def test_a_changed_recipe_is_refused_with_what_differs(recipe_file: Path, left_behind: LeftBehind) -> None:
    unfinished = left_behind("interrupted", "train.max_steps=20", checkpoint="checkpoint-5")
    with pytest.raises(RunError) as refused:
        open_here(recipe_file, "train.max_steps=30", "train.save_steps=7")
    lines = str(refused.value).splitlines()
    assert lines == [
        f"{unfinished.path} is unfinished (checkpoint-5), and this start differs from it:",
        "  train.max_steps: 20 -> 30",
        "  train.save_steps: 500 -> 7 (may differ)",
        "Change it back to resume, or allow it: 'train.resume_allow_changes=[train.max_steps]', or start a new run with "
        "train.resume=never. See docs/resume.md.",
    ]
    allowed = "train.resume_allow_changes=[train.max_steps]"
    assert open_here(recipe_file, "train.max_steps=30", allowed).path == unfinished.path
    assert open_here(recipe_file, "train.max_steps=30", NEVER).path != unfinished.path


def test_what_no_run_can_go_on_with_is_not_offered(recipe_file: Path, left_behind: LeftBehind) -> None:
    left_behind("interrupted", checkpoint="checkpoint-5")
    with pytest.raises(RunError, match=r"train.seed: 0 -> 1 \(no run can resume with that\)") as refused:
        open_here(recipe_file, "train.seed=1", "train.max_steps=3")
    assert "resume_allow_changes" not in str(refused.value)
    with pytest.raises(RecipeError, match=r"train.seed: cannot change when a run resumes: it decides which rows"):
        open_here(recipe_file, "train.resume_allow_changes=[train.seed]")
    with pytest.raises(RecipeError, match=r"max_step: unknown key; did you mean `train.max_steps`\?"):
        open_here(recipe_file, "train.resume_allow_changes=[max_step]")


def test_comments_and_what_changes_no_training_may_differ(recipe_file: Path, left_behind: LeftBehind) -> None:
    unfinished = left_behind("interrupted", checkpoint="checkpoint-5")
    recipe_file.write_text(recipe_file.read_text() + "# later\n")
    assert open_here(recipe_file, "train.save_steps=7", "eval.limit=3", "debug=true").path == unfinished.path


def test_the_recipe_is_compared_with_what_it_meant_then(recipe_file: Path, left_behind: LeftBehind) -> None:
    """A default that has changed since is a change; a key that is new is none."""
    values = job_of(recipe_file).recipe.model_dump(mode="json")
    older = json.loads(json.dumps(values))
    del older["train"]["save_canary"]
    assert unfinished_run(job_of(recipe_file)) is None
    unfinished = left_behind("interrupted", checkpoint="checkpoint-5", recipe_values=older)
    assert unfinished_run(job_of(recipe_file)) == unfinished
    older["train"]["adam_beta2"] = 0.999
    unfinished.update(recipe_values=older)
    with pytest.raises(RunError, match=r"train.adam_beta2: 0.999 -> 0.95"):
        unfinished_run(job_of(recipe_file))
    unfinished.update(recipe_values=older | {"gone": 1})
    with pytest.raises(RunError, match=r"was started by another version of this program"):
        unfinished_run(job_of(recipe_file))


def test_a_changed_recipe_loses_nothing_where_there_is_no_checkpoint(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    failed = left_behind("failed")
    assert open_here(recipe_file, "train.learning_rate=2e-3").path != failed.path
    with pytest.raises(RunError, match=r"train.resume=must, and .* has no unfinished run"):
        open_here(recipe_file, "train.learning_rate=4e-3", "train.resume=must")


def test_resume_can_be_asked_for_and_forbidden(
    recipe_file: Path, left_behind: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=r"train.resume=must, and .* has no unfinished run"):
        open_here(recipe_file, "train.resume=must")
    unfinished = left_behind("interrupted")
    with pytest.raises(RunError, match=r"which is unfinished, has no checkpoint. train.resume=auto starts it again"):
        open_here(recipe_file, "train.resume=must")
    (unfinished.checkpoints / "checkpoint-5").mkdir()
    assert unfinished_run(job_of(recipe_file, "train.resume=must")) == unfinished
    assert unfinished_run(job_of(recipe_file, NEVER)) is None
    # What a launcher starts again after a failure, or Slurm after it has requeued the job, goes on with the run that it has begun.
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        for count, found in {"0": None, "1": unfinished}.items():
            monkeypatch.setenv(name, count)
            assert unfinished_run(job_of(recipe_file, NEVER)) == found
        monkeypatch.delenv(name)


def test_what_wrote_the_newest_checkpoint_is_asked_before_the_data_is_prepared(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    """Not what the newest session was: it may have ended before it wrote one."""
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
    job = job_of(recipe_file)
    unfinished = left_behind("interrupted", checkpoint="checkpoint-5", base_model={"revision": "a" * 40})
    moved = replace(job, model=replace(job.model, commit="b" * 40))
    with pytest.raises(
        RunError, match=rf"commit {'a' * 40} .*now stands for {'b' * 40}. Set model.revision={'a' * 40}"
    ):
        check_start(moved)
    named = job.recipe.model.model_copy(update={"revision": "a" * 40})
    pinned = replace(job, recipe=job.recipe.model_copy(update={"model": named}))
    check_start(pinned)
    assert unfinished_run(pinned) == unfinished


def test_latest_points_at_the_newest(recipe_file: Path, folder: Path) -> None:
    for name in ("b", "a", "c"):
        open_here(recipe_file, f"tracking.run_name={name}")
        assert (folder / "latest").resolve() == folder / name
    one, two = open_here(recipe_file, NEVER), open_here(recipe_file, NEVER)  # within one second
    assert one.path != two.path
    assert (folder / "latest").resolve() == two.path
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_latest_that_leads_nowhere_is_named(recipe_file: Path, left_behind: LeftBehind, folder: Path) -> None:
    assert broken_latest(job_of(recipe_file)) is None
    run = left_behind("running", checkpoint="checkpoint-2")
    assert broken_latest(job_of(recipe_file)) is None
    run.path.rename(folder / "moved")
    assert "first" in (broken_latest(job_of(recipe_file)) or "")
    assert broken_latest(job_of(recipe_file, NEVER)) is None
    with pytest.raises(RunError, match="leads to first"):
        check_start(job_of(recipe_file, "train.resume=must"))


def test_the_recipe_of_an_earlier_session_is_kept(recipe_file: Path, left_behind: LeftBehind) -> None:
    run = left_behind("interrupted", checkpoint="checkpoint-5", sessions=[{}, {}])
    before = run.recipe_file.read_bytes()
    keep_recipe(run, job_of(recipe_file))
    assert {path.name for path in run.path.glob("recipe*")} == {"recipe.yaml"}
    recipe_file.write_text(recipe_file.read_text() + "# later\n")
    keep_recipe(run, job_of(recipe_file))
    assert run.recipe_file.read_bytes() == recipe_file.read_bytes()
    assert (run.path / "recipe.session-2.yaml").read_bytes() == before


def test_a_process_forked_from_the_one_that_trains_does_not_hold_the_run(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    """Workers that load data outlive one that is killed, by seconds."""
    run = left_behind("running")
    held = claim(run)
    assert held is not None
    reading, writing = os.pipe()
    there, here = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.write(here, b".")
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.read(there, 1)
    assert claim(run) is None
    os.close(held)
    again = claim(run)
    os.close(writing)
    os.waitpid(child, 0)
    assert again is not None
    for descriptor in (again, there, here):
        os.close(descriptor)


def test_a_job_that_goes_back_goes_on_with_its_own_run(
    recipe_file: Path, left_behind: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = left_behind("failed", NEVER, checkpoint="checkpoint-5")
    newer = left_behind("failed", checkpoint="checkpoint-5", name="second")
    assert unfinished_run(job_of(recipe_file)) == newer
    monkeypatch.setenv(OWN_RUN, str(own.path))
    assert unfinished_run(job_of(recipe_file, NEVER)) == own


@pytest.mark.parametrize(("status", "evaluation"), [("finished", "running"), ("interrupted", "interrupted")])
def test_an_evaluation_that_is_left_goes_on_as_it_is_asked_for_now_and_trains_nothing(
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


def test_a_session_that_trained_nothing_is_not_what_the_next_is_compared_with(
    recipe_file: Path, left_behind: LeftBehind
) -> None:
    trained = job_of(recipe_file).recipe
    killed = job_of(recipe_file, "train.learning_rate=5e-3").recipe
    run = left_behind("running", checkpoint="checkpoint-5", recipe_values=killed.model_dump(mode="json"))
    recipe = trained.model_dump(mode="json", exclude_defaults=True)
    write_manifest(run.checkpoints / "checkpoint-5", {"recipe": recipe})
    assert unfinished_run(job_of(recipe_file)) == run


def test_the_next_start_of_a_run_is_a_command(left_behind: LeftBehind) -> None:
    older, newest = (left_behind("running", checkpoint="checkpoint-5", name=name) for name in ("older", "newest"))
    assert newest.next_start == "The same command resumes from checkpoint-5"
    assert older.next_start == f"`bash scripts/sft.sh {older.path}` resumes from checkpoint-5"


def test_a_finished_run_of_this_name_is_told_with_what_can_be_done(recipe_file: Path, left_behind: LeftBehind) -> None:
    run = left_behind("finished", "tracking.run_name=first")
    with pytest.raises(RunError) as refused:
        open_here(recipe_file, "tracking.run_name=first")
    for remedy in (f"scripts/eval.sh {run.path}", f"scripts/sft.sh {run.path}", f"model.name_or_path={run.final}"):
        assert remedy in str(refused.value)
