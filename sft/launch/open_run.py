"""Open the run of a job: a new one, or the unfinished one that it resumes, or refuse. Rank 0 does it for all.

A start resumes the latest run of its recipe, or the one that tracking.run_name names, if that is unfinished. A recipe that has changed
meanwhile resumes only where that is allowed (sft/recipe/changes.py). A finished run is never overwritten.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sft.checkpoint.manifest import read_manifest
from sft.checkpoint.resume import Choice, ResumePlan, choose_checkpoint, lost_lines, resolve_resume
from sft.data.prepared import Prepared
from sft.errors import RecipeError, RunError
from sft.files import read_json, remove, write_json
from sft.launch.job import command_of
from sft.launch.prepare import prepared_data
from sft.launch.rerun import check_same_data
from sft.launch.tuning_result import find_result
from sft.parallel import process_group as distributed
from sft.plan.job import Job, keep_decisions
from sft.program import shown_command
from sft.recipe.changes import Change, check_allowed_changes, differences, not_allowed, recipe_differences
from sft.recipe.local_code import code_hashes, copy_code
from sft.recipe.schema import Recipe
from sft.run.directory import EVALUATION_LEFT, INCOMPLETE, LATEST, Run
from sft.run.record import installed_versions, record_interruptions, record_start
from sft.run.trust import OWN_RUN, base_changes
from sft.terminal import forget_failure

_NEW_RUN = "start a new run with train.resume=never"


# Which run.


def runs_folder(job: Job) -> Path:
    """Where the runs of a recipe are: <output_dir>/<recipe>."""
    return Path(job.recipe.output_dir).expanduser().resolve() / job.name


def unfinished_run(job: Job) -> Run | None:
    """The run that a start resumes, if any. Raises RunError if it has checkpoints and the recipe now differs."""
    own = _own_run()
    run = own or Run(runs_folder(job) / (job.recipe.tracking.run_name or LATEST))
    if not (own or _may_resume(job.recipe)) or not (run.path / "run.json").is_file():
        return None
    run = Run(run.path.resolve())
    trained = run.record.get("evaluation") in EVALUATION_LEFT
    if run.record["status"] == "finished" and not trained:
        return None
    changes = recipe_changes(run, job.recipe)
    # If only the evaluation is left, no change of the training could take effect.
    refused = not_allowed(changes, () if trained else job.recipe.train.resume_allow_changes)
    if not refused:
        return run
    if not (trained or run.all_checkpoints()) or (_is_claimed(run) and job.recipe.tracking.run_name is None):
        return None
    raise RunError(_explain(run, changes, refused, trained))


def _may_resume(recipe: Recipe) -> bool:
    # `never` is for the first start: a restart after a failure resumes, and so does a job that Slurm has requeued.
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return recipe.train.resume != "never" or any(os.environ.get(name, "0") != "0" for name in counts)


def _own_run() -> Run | None:
    """The run that this same job opened before its launcher restarted it; another start may have made a newer one meanwhile."""
    folder = os.environ.get(OWN_RUN)
    return Run(Path(folder)) if folder and (Path(folder) / "run.json").is_file() else None


def recipe_changes(run: Run, recipe: Recipe) -> list[Change]:
    """What differs between the recipe that a run was last trained with and this one. Raises RunError if the run's cannot be read."""
    newest = None
    for checkpoint in run.all_checkpoints():  # a later session may have ended before it wrote one
        with suppress(ValueError):
            newest = read_manifest(checkpoint).get("recipe")
            break
    try:
        values = newest or run.record.get("recipe_values")
        then = Recipe.model_validate(values, strict=False) if values else run.recipe()
    except (RecipeError, ValueError) as error:
        raise RunError(
            f"{run.path} is unfinished, and was started by another version of this program, whose recipe this one does not read: {error}. "
            f"Resume with that version, or {_NEW_RUN}."
        ) from None
    commit = run.record.get("base_model", {}).get("revision")
    # To name the commit that it was started with changes nothing.
    same = (None, commit)
    return [one for one in recipe_differences(then, recipe) if one.key != "model.revision" or one.new not in same]


def _explain(run: Run, changes: list[Change], refused: list[Change], trained: bool) -> str:
    if trained:
        first = f"{run.path} is trained, its evaluation is not complete, and this start differs from it:"
        lines = [f"  {change}" for change in refused]
        return "\n".join([first, *lines, f"Change that back to resume the evaluation, or {_NEW_RUN}."])
    first = f"{run.path} is unfinished ({run.all_checkpoints()[0].name}), and this start differs from it:"
    ends = {"fixed": " (no run can resume with that)"}
    lines = [f"  {change}{ends.get(change.kind, '') if change in refused else ' (may differ)'}" for change in changes]
    allow = ""
    if all(change.kind != "fixed" for change in refused):
        keys = ",".join(change.key for change in changes if change.kind == "named")
        allow = f"allow it: 'train.resume_allow_changes=[{keys}]', or "
    return "\n".join([first, *lines, f"Change that back to resume, or {allow}{_NEW_RUN}. See docs/resume.md."])


def check_start(job: Job) -> None:
    """Refuse, before the data is prepared, what could not be started after it (RecipeError, RunError). Reads no checkpoint."""
    check_allowed_changes(job.recipe.train.resume_allow_changes)
    run, name, must = unfinished_run(job), job.recipe.tracking.run_name, job.recipe.train.resume == "must"
    if run is None:
        if must:
            raise RunError(f"train.resume=must, and {runs_folder(job)} has no unfinished run of this recipe.")
        if name is not None and (runs_folder(job) / name).exists():
            raise _name_is_taken(runs_folder(job) / name)
        return
    if (must or name is not None) and _is_claimed(run):
        raise RunError(
            f"{'train.resume=must, and a' if must else 'A'}nother process is training {run.path}. Wait for it, or choose another "
            "tracking.run_name."
        )
    checkpoints = run.all_checkpoints()
    if checkpoints:
        _check_same_model(run, job)
        with suppress(ValueError):  # a damaged one is passed over later, when all of it is verified
            resolve_resume(checkpoints[0], job)
    elif must:
        raise RunError(
            f"train.resume=must, and {run.path}, which is unfinished, has no checkpoint. train.resume=auto starts it again."
        )


def _name_is_taken(folder: Path) -> RunError:
    return RunError(
        f"{folder} exists and is never overwritten. Choose another tracking.run_name, or remove the folder. To train its model further: "
        f"model.name_or_path={Run(folder).final} with another tracking.run_name."
    )


def _check_same_model(run: Run, job: Job) -> None:
    then = run.record.get("base_model", {}).get("revision")
    now = job.model.commit or job.recipe.model.revision
    if then and now and then != now:
        raise RunError(
            f"{run.path} is unfinished and was started with commit {then} of {job.recipe.model.name_or_path}; the hub's name now stands "
            f"for {now}. Set model.revision={then} to resume, or {_NEW_RUN}."
        )


# Whose run.

_claims: set[int] = set()


def _let_go() -> None:
    # A lock is held as long as any process has it open, and the workers that load data may outlive this one by seconds.
    while _claims:
        with suppress(OSError):
            os.close(_claims.pop())


os.register_at_fork(after_in_child=_let_go)


def claim(run: Run) -> int | None:
    """Claim a run's folder until this process ends, or the descriptor is closed; None: another process has it. Raises RunError."""
    try:
        # NFS locks only what is open for writing, which a folder never is.
        descriptor = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(
            f"{run.path} cannot be written: {error.strerror}. Make it writable, or choose another run."
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        note = f"The file system of {run.path} has no locks ({error.strerror}): do not start this run a second time while it runs."
        print(note, file=sys.stderr, flush=True)
    _claims.add(descriptor)
    return descriptor


def _is_claimed(run: Run) -> bool:
    """Whether another process is training it now."""
    descriptor = claim(run)
    if descriptor is not None:
        _claims.discard(descriptor)
        os.close(descriptor)
    return descriptor is None


def other_unfinished(run: Run) -> list[str]:
    """The recipe's other unfinished runs with a checkpoint, newest first, each with the command that resumes it."""
    lines = []
    for folder in sorted({one.resolve() for one in run.path.parent.iterdir()} - {run.path}, reverse=True):
        with suppress(RunError, OSError):  # no run, or another user's
            other, checkpoint = Run(folder), Run(folder).last_checkpoint()
            if checkpoint is not None and other.record["status"] != "finished" and not _is_claimed(other):
                lines.append(f"Also unfinished, at {checkpoint.name}: {shown_command('sft', str(folder))}")
    return lines[:5]


def claim_directory(job: Job) -> Run:
    """Claim the folder of the run to resume, or make a new run's, beside one that another process is training. Raises RunError."""
    run = unfinished_run(job)
    if run is not None and claim(run) is not None:
        remove(run.checkpoints / INCOMPLETE)  # its writer has ended
        return run
    if job.recipe.train.resume == "must":
        raise RunError(f"train.resume=must, and another process has begun to train {run.path if run else 'the run'}.")
    run = _make(runs_folder(job), job.recipe.tracking.run_name)
    claim(run)
    run.recipe_file.write_bytes(job.recipe_path.read_bytes())
    copy_code(job.recipe, run.path)
    temporary = run.path.with_name(f".{LATEST}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.path.name)
    temporary.replace(run.path.with_name(LATEST))
    return run


def _make(folder: Path, name: str | None) -> Run:
    """A new run's folder, empty but for checkpoints/."""
    started = time.strftime("%Y%m%d-%H%M%S")
    # Two jobs may start in one second.
    for candidate in [name] if name else [started, *(f"{started}-{number}" for number in range(2, 100))]:
        with suppress(FileExistsError):
            (folder / candidate / "checkpoints").mkdir(parents=True)
            return Run(folder / candidate)
    raise _name_is_taken(folder / (name or started))


# Opening it.


@dataclass(frozen=True)
class OpenedRun:
    """A run, its data, how it resumes, and lines for the user."""

    run: Run
    prepared: Prepared
    planned: Job
    """The job with its data counted, and with what was decided when the run was started."""
    choice: Choice
    resume_plan: ResumePlan | None
    notes: tuple[str, ...]


def open_run(job: Job) -> OpenedRun:
    """Find or prepare the data, then claim the run's folder: a mistake in the data leaves none behind. Raises UserError."""
    return distributed.from_rank_0(lambda: _open(job))


def _open(job: Job) -> OpenedRun:
    check_start(job)
    prepared = _intact_data(job)
    check_same_data(job, prepared.fingerprint)
    unfinished = unfinished_run(job)
    run = claim_directory(job)
    record_interruptions(run)
    resumes = (run.path / "run.json").exists()
    choice = choose_checkpoint(run) if resumes else Choice(None, {})
    missing = None
    if choice.checkpoint is not None:
        _check_unchanged(run, job, prepared)
        missing = lost_lines(run, choice.checkpoint)
        run.warn("metrics", missing)
        decided = {row["name"]: row["value"] for row in read_json(run.plan_file).get("decisions", [])}
        planned = keep_decisions(job, prepared.facts(), decided)
        _check_steps_left(run, choice.step, planned.plan.max_steps.value)
        resume_plan = resolve_resume(choice.checkpoint, planned)
    else:
        planned, resume_plan = job.with_data(prepared.facts(), find_result(job, prepared)), None
    changes = recipe_changes(run, job.recipe) if resumes else []
    notes = [*other_unfinished(run), missing, *choice.lines()]
    if unfinished is not None and unfinished != run:
        notes.insert(0, f"Another process is training {unfinished.path}: this is a run beside it.")
    if resumes:
        if not choice.step:
            notes.append("This run was not finished and has no checkpoint: it starts again.")
        versions = installed_versions()
        updated = differences(run.record.get("versions", versions), versions, "versions")
        updated += differences(run.record.get("code", {}), code_hashes(job.recipe), "code")
        notes += [f"changed since the last session: {change}" for change in [*changes, *updated]]
        run.recipe_file.write_bytes(job.recipe_path.read_bytes())
        copy_code(job.recipe, run.path)
    notes.append(resume_plan.words if resume_plan else None)
    forget_failure(run.path)
    checkpoint = choice.checkpoint.name if choice.checkpoint else None
    seconds = {"prepare_seconds": prepared.summary["seconds"]}
    record_start(run, job, seconds, prepared.fingerprint, checkpoint, choice.skipped, changes)
    write_json(run.ledger_file, prepared.ledger | {"findings": prepared.findings})
    return OpenedRun(run, prepared, planned, choice, resume_plan, tuple(filter(None, notes)))


def _intact_data(job: Job) -> Prepared:
    """The prepared data, prepared again if a file of it has changed."""
    prepared = prepared_data(job.recipe, job.model, command_of(job))
    altered = prepared.altered()
    if altered is None:
        return prepared
    print(f"{prepared.folder / altered} has changed since it was written; the data is prepared again.", flush=True)
    prepared.forget()
    return prepared_data(job.recipe, job.model, command_of(job))


def _check_unchanged(run: Run, job: Job, prepared: Prepared) -> None:
    """Refuse to resume on other data, or adapters on other base weights."""
    if run.record.get("data_fingerprint") not in (None, prepared.fingerprint):
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot resume. Put it back, or "
            f"{_NEW_RUN}."
        )
    frozen = job.recipe.model.lora is not None or bool(job.recipe.model.freeze)
    changes = base_changes(run) if frozen else None
    if changes:  # a checkpoint of adapters holds no weights of the base, and one of ZeRO no frozen ones
        raise RunError(
            f"The base model {changes}. What was trained beside its frozen weights fits the old ones, so the run cannot resume. Put the "
            f"base back, or {_NEW_RUN}."
        )


def _check_steps_left(run: Run, step: int, max_steps: int | None) -> None:
    if max_steps is not None and step > max_steps:
        raise RunError(
            f"{run.path} has been trained for {step} steps, and the recipe now requests {max_steps}. Set train.max_steps to at least "
            f"{step}, or {_NEW_RUN}."
        )
