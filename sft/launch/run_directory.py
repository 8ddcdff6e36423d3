"""Making a run's folder, or finding the one to go on in. Imports no torch.

A start goes on with the latest run of its recipe, or the one that tracking.run_name names, where that is unfinished. A recipe that
has changed meanwhile goes on only where that is allowed (sft/recipe/changes.py); a finished run is never written over.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from shlex import join
from typing import Any

from sft.checkpoint.manifest import read_manifest
from sft.checkpoint.resume import resolve_resume
from sft.errors import RecipeError, RunError
from sft.files import read_json, remove
from sft.plan.job import Job
from sft.recipe.changes import Change, check_allowed_changes, not_allowed, recipe_differences
from sft.recipe.schema import Recipe
from sft.run.directory import EVALUATION_LEFT, INCOMPLETE, Run, check_beside_latest
from sft.run.trust import OWN_RUN

_TAKEN = "exists already and is not written over. Choose another tracking.run_name, or remove the folder."
_SHOWN = 5
"""Other unfinished runs that are listed."""

_ANEW = "start anew with train.resume=never"


def folder_of(job: Job) -> Path:
    """Where the runs of a recipe are: <output_dir>/<recipe>."""
    return Path(job.recipe.output_dir).expanduser().resolve() / job.name


def unfinished_run(job: Job) -> Run | None:
    """The run that a start goes on with, where there is one.

    Raises:
        RunError: It has checkpoints, and the recipe differs from the one that it was started with.
    """
    own = _own_run()
    run = own or Run(folder_of(job) / (job.recipe.tracking.run_name or "latest"))
    if not (own or _may_resume(job.recipe)) or not (run.path / "run.json").is_file():
        return None
    run = Run(run.path.resolve())
    trained = run.record.get("evaluation") in EVALUATION_LEFT
    if run.record["status"] == "finished" and not trained:
        return None
    check_beside_latest(run.path, folder_of(job))
    changes = recipe_changes(run, job.recipe)
    # Where only the evaluation is left, nothing else that changes could take effect.
    refused = not_allowed(changes, () if trained else job.recipe.train.resume_allow_changes)
    if not refused:
        return run
    if not (trained or run.all_checkpoints()) or (_is_claimed(run) and job.recipe.tracking.run_name is None):
        return None
    raise RunError(_explain(run, changes, refused, trained))


def broken_latest(job: Job) -> str | None:
    """A warning where `latest` points nowhere, so that a start resumes no run; None where it points to a run."""
    link = folder_of(job) / "latest"
    if job.recipe.tracking.run_name or not _may_resume(job.recipe) or not link.is_symlink() or link.exists():
        return None
    return f"{link} leads to {link.readlink()}, which is not there: it was moved, renamed or removed. Bring it back to resume it."


def _may_resume(recipe: Recipe) -> bool:
    # `never` is for the first start: what a launcher starts again after a failure goes on, and what Slurm has requeued.
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return recipe.train.resume != "never" or any(os.environ.get(name, "0") != "0" for name in counts)


def _own_run() -> Run | None:
    """The run that this same job has opened before: it went back to a checkpoint, or its launcher has started it again.

    Not the latest of the recipe: another start may have made a newer one meanwhile.
    """
    folder = os.environ.get(OWN_RUN)
    return Run(Path(folder)) if folder and (Path(folder) / "run.json").is_file() else None


def recipe_changes(run: Run, recipe: Recipe) -> list[Change]:
    """What differs between the recipe that a run was last trained with and this one.

    Raises:
        RunError: This program cannot read the run's.
    """
    try:
        values = _recipe_of_newest(run) or run.record.get("recipe_values")
        then = Recipe.model_validate(values, strict=False) if values else run.recipe()
    except (RecipeError, ValueError) as error:
        raise RunError(
            f"{run.path} is unfinished, and was started by another version of this program, whose recipe this one does not read: {error}. "
            f"Go on with that version, or {_ANEW}."
        ) from None
    commit = run.record.get("base_model", {}).get("revision")
    # To name the commit that it was started with changes nothing.
    return [
        change
        for change in recipe_differences(then, recipe)
        if change.key != "model.revision" or change.new is None or change.new != commit
    ]


def _recipe_of_newest(run: Run) -> dict[str, Any] | None:
    """What the newest checkpoint was trained with. A session may have ended before it had one."""
    for checkpoint in run.all_checkpoints():
        with suppress(ValueError):
            found: dict[str, Any] | None = read_manifest(checkpoint).get("recipe")
            return found
    return None


def _explain(run: Run, changes: list[Change], refused: list[Change], trained: bool) -> str:
    if trained:
        lines = [f"{run.path} is trained, its evaluation is not complete, and this start differs from it:"]
        lines += [f"  {change}" for change in refused]
        return "\n".join([*lines, f"Change it back to go on with the evaluation, or {_ANEW}."])
    fixed = [change for change in refused if change.kind == "fixed"]
    other = [change for change in changes if change not in refused]
    newest = run.all_checkpoints()[0].name
    lines = [f"{run.path} is unfinished ({newest}), and this start differs from it:"]
    lines += [f"  {change}" + (" (no run can go on with that)" if change in fixed else "") for change in refused]
    lines += [f"  {change} (may differ)" for change in other]
    remedies = ["Change it back to go on" if len(refused) == 1 else "Change them back to go on"]
    if not fixed:
        keys = [change.key for change in changes if change.kind == "named"]
        remedies.append(f"allow it: 'train.resume_allow_changes=[{','.join(keys)}]'")
    return "\n".join([*lines, f"{', or '.join([*remedies, _ANEW])}. See docs/resume.md."])


def _is_claimed(run: Run) -> bool:
    """Whether another process is training it now."""
    descriptor = claim(run)
    if descriptor is not None:
        _claims.discard(descriptor)
        os.close(descriptor)
    return descriptor is None


_claims: set[int] = set()


def _let_go() -> None:
    # A lock is held as long as any process has it open, and the workers that load data may outlive this one by seconds.
    while _claims:
        with suppress(OSError):
            os.close(_claims.pop())


os.register_at_fork(after_in_child=_let_go)


def claim(run: Run) -> int | None:
    """Claim a run's folder until this process ends, however it ends, or the descriptor is closed. None: another process has it.

    Raises:
        RunError: The folder cannot be written.
    """
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


def other_unfinished(run: Run) -> list[str]:
    """The recipe's other runs that ended with a checkpoint and are not finished, newest first, each with the command that resumes it."""
    lines = []
    for folder in sorted(run.path.parent.iterdir(), reverse=True):
        other = Run(folder)
        if folder.is_symlink() or folder == run.path or not (folder / "run.json").is_file():
            continue
        with suppress(RunError, OSError):
            checkpoint = other.last_checkpoint()
            if other.record["status"] != "finished" and checkpoint is not None and not _is_claimed(other):
                lines.append(f"Also unfinished, at {checkpoint.name}: {join(['bash', 'scripts/sft.sh', str(folder)])}")
    hidden = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {hidden} older ones in {run.path.parent}"] if hidden > 0 else [])


def _point_latest_at(run: Run) -> None:
    link = run.path.parent / "latest"
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.path.name)
    temporary.replace(link)


def _make(folder: Path, name: str | None) -> Run:
    """A new run's folder, empty but for checkpoints/."""
    started = time.strftime("%Y%m%d-%H%M%S")
    # Two jobs may start in one second.
    names = [name] if name else [started, *(f"{started}-{number}" for number in range(2, 100))]
    for candidate in names:
        run = Run(folder / candidate)
        try:
            run.checkpoints.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(
                f"The run's folder cannot be made: {error}. Set output_dir to a place that can be written."
            ) from None
        return run
    raise RunError(f"{folder / names[0]} {_TAKEN}")


def check_start(job: Job) -> None:
    """Refuse, before the data is prepared, what could not be started after it. Reads no checkpoint.

    Raises:
        RecipeError: train.resume_allow_changes names what is no key, or cannot change.
        RunError: The name is taken, there is nothing to resume, or the unfinished run cannot go on like this.
    """
    check_allowed_changes(job.recipe.train.resume_allow_changes)
    run, name, must = unfinished_run(job), job.recipe.tracking.run_name, job.recipe.train.resume == "must"
    if run is None:
        if must:
            lost = f" {where}" if (where := broken_latest(job)) else ""
            raise RunError(f"train.resume=must, and {folder_of(job)} has no unfinished run of this recipe.{lost}")
        if name is not None and (folder_of(job) / name).exists():
            raise RunError(f"{folder_of(job) / name} {_TAKEN}{_after_the_end(Run(folder_of(job) / name))}")
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


def _after_the_end(run: Run) -> str:
    """What can be done with a finished run, for a message; empty where it is none."""
    if not (run.path / "run.json").is_file() or run.record["status"] != "finished":
        return ""
    return (
        f"\nIt is finished. Evaluate it: {join(['bash', 'scripts/eval.sh', str(run.path)])}; repeat it under another name: "
        f"{join(['bash', 'scripts/sft.sh', str(run.path)])}; train its model further: model.name_or_path={run.final} with another "
        "tracking.run_name."
    )


def _check_same_model(run: Run, job: Job) -> None:
    then = run.record.get("base_model", {}).get("revision")
    now = job.model.commit or job.recipe.model.revision
    if then and now and then != now:
        raise RunError(
            f"{run.path} is unfinished and was started with commit {then} of {job.recipe.model.name_or_path}; the hub's name now stands "
            f"for {now}. Set model.revision={then} to go on, or {_ANEW}."
        )


def decisions_of(run: Run) -> dict[str, Any]:
    """The values of the plan that a run was last trained with, by name."""
    return {row["name"]: row["value"] for row in read_json(run.plan_file).get("decisions", [])}


def claim_directory(job: Job) -> Run:
    """Make the folder of a new run, or find the one to go on with, and claim it.

    An unfinished run goes on from its newest checkpoint, or from the start where it has none. A finished run is never written
    over, nor one that another process is training.

    Raises:
        RunError: The name is taken, the folder cannot be written, or there is nothing to resume where the recipe says
            it must be.
    """
    run = unfinished_run(job)
    if run is not None and claim(run) is not None:
        remove(run.checkpoints / INCOMPLETE)  # no process writes one now: it was left by an end in the middle of it
        return run
    if job.recipe.train.resume == "must":
        raise RunError(f"train.resume=must, and another process has begun to train {run.path if run else 'the run'}.")
    run = _make(folder_of(job), job.recipe.tracking.run_name)
    claim(run)
    run.recipe_file.write_bytes(job.recipe_path.read_bytes())
    _point_latest_at(run)
    return run


def keep_recipe(run: Run, job: Job) -> None:
    """Write the recipe of this session beside those of the sessions before it, where its text differs."""
    text = job.recipe_path.read_bytes()
    with suppress(FileNotFoundError):
        if run.recipe_file.read_bytes() == text:
            return
        sessions = len(run.record.get("sessions", [])) or 1
        run.recipe_file.replace(run.path / f"recipe.session-{sessions}.yaml")
    run.recipe_file.write_bytes(text)
