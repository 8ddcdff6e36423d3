"""Open a run: its data, its directory, and the checkpoint it resumes from. Rank 0 does it for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft import signals
from sft.checkpoint.resume import Choice, ResumePlan, choose_checkpoint, lost_lines, resolve_resume
from sft.data.prepared import Prepared
from sft.errors import RunError
from sft.files import write_json
from sft.launch.prepare import command_of, prepared_data
from sft.launch.rerun import check_same_data, original_run
from sft.launch.run_directory import (
    broken_latest,
    check_start,
    claim_directory,
    decisions_of,
    keep_recipe,
    other_unfinished,
    recipe_changes,
    unfinished_run,
)
from sft.launch.tuning_result import find_answer
from sft.parallel import process_group as distributed
from sft.plan.job import Job, keep_decisions
from sft.plan.plan import TuningResult
from sft.recipe.changes import Change, differences
from sft.run.directory import Run
from sft.run.record import InterruptibleRun, installed_versions, record_start
from sft.run.trust import base_changes
from sft.terminal import forget_failure

_ANEW = "start anew with train.resume=never."


@dataclass(frozen=True)
class OpenedRun:
    """A run, its data, and how it resumes."""

    run: Run
    prepared: Prepared
    tuned: TuningResult | None
    """What auto-tuning on this machine has found for the job."""

    choice: Choice
    """The checkpoint to resume from, if any."""

    earlier: dict[str, Any]
    """The decisions of the plan it was trained with, by name; empty if it starts at the first step."""

    resume_plan: ResumePlan | None = None
    """How it resumes from the checkpoint."""

    notes: tuple[str, ...] = ()
    """Lines for the user."""

    def planned(self, job: Job) -> Job:
        """The job with its data counted."""
        if self.earlier:
            return keep_decisions(job, self.prepared.facts(), self.earlier)
        return job.with_data(self.prepared.facts(), self.tuned)


def open_run(job: Job) -> OpenedRun:
    """Find or prepare the data, then make the run's directory: a mistake in the data leaves none behind.

    Raises:
        UserError: The data or the run's directory cannot be used.
    """
    return distributed.from_rank_0(lambda: _open(job))


def _open(job: Job) -> OpenedRun:
    check_start(job)
    prepared = _intact_data(job)
    original = original_run(job.recipe_path)
    if original is not None:
        check_same_data(original, job, prepared.fingerprint)
    unfinished, broken = unfinished_run(job), broken_latest(job)
    run = claim_directory(job)
    signals.interrupts(InterruptibleRun(run))
    resumes = (run.path / "run.json").exists()
    choice = choose_checkpoint(run) if resumes else Choice(None, {})
    missing = None
    if choice.checkpoint is not None:
        _check_unchanged(run, job, prepared)
        missing = lost_lines(run, choice.checkpoint)
        run.warn("metrics", missing)
    opened = OpenedRun(
        run, prepared, find_answer(job, prepared), choice, decisions_of(run) if choice.checkpoint else {}
    )
    planned = opened.planned(job)
    _check_steps_left(opened, planned.plan.max_steps.value)
    resume_plan = resolve_resume(choice.checkpoint, planned) if choice.checkpoint else None
    changes = recipe_changes(run, job.recipe) if resumes else []
    versions = installed_versions()
    updated = differences(run.record.get("versions", versions), versions, "versions") if resumes else []
    forget_failure(run.path)
    if resumes:
        keep_recipe(run, job)
    checkpoint = choice.checkpoint.name if choice.checkpoint else None
    seconds = {"prepare_seconds": prepared.summary["seconds"]}
    record_start(run, job, seconds, prepared.fingerprint, checkpoint, choice.passed_over, changes)
    write_json(run.ledger_file, prepared.ledger | {"findings": prepared.findings})
    busy = None
    if unfinished is not None and unfinished != run:
        busy = f"Another process is training {unfinished.path}: this is a run beside it."
    notes = [busy, broken, *other_unfinished(run), missing, *_notes(choice, [*changes, *updated], resumes)]
    notes.append(resume_plan.words if resume_plan else None)
    return replace(opened, resume_plan=resume_plan, notes=tuple(filter(None, notes)))


def _intact_data(job: Job) -> Prepared:
    """The prepared data, prepared again if a file of it has changed."""
    prepared = prepared_data(job.recipe, job.model, command_of(job))
    altered = prepared.altered()
    if altered is None:
        return prepared
    print(f"{prepared.folder / altered} has changed since it was written; the data is prepared again.", flush=True)
    prepared.forget()
    return prepared_data(job.recipe, job.model, command_of(job))


def _notes(choice: Choice, changes: Sequence[Change], resumes: bool) -> list[str]:
    again = ["This run was not finished and has no checkpoint: it starts again."] if resumes and not choice.step else []
    return [*choice.lines(), *again, *(f"changed since the last session: {change}" for change in changes)]


def _check_unchanged(run: Run, job: Job, prepared: Prepared) -> None:
    """Refuse to resume on other data, or adapters on other base weights."""
    if run.record.get("data_fingerprint") not in (None, prepared.fingerprint):
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot resume. Put it back, or {_ANEW}"
        )
    changes = base_changes(run) if job.recipe.model.lora is not None else None
    if changes:  # a checkpoint of adapters holds no weights of the base
        raise RunError(
            f"The base model {changes}. Its adapters fit the old weights, so the run cannot resume. Put the base back, or {_ANEW}"
        )


def _check_steps_left(opened: OpenedRun, max_steps: int | None) -> None:
    if max_steps is not None and opened.choice.step > max_steps:
        raise RunError(
            f"{opened.run.path} has been trained for {opened.choice.step} steps, and the recipe now asks for {max_steps}. Set "
            f"train.max_steps to at least {opened.choice.step}, or {_ANEW}"
        )
