"""What training starts from: the prepared data, and the run's folder opened around it by the first rank for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from subprocess import Popen
from threading import Thread
from typing import Any

from sft import signals
from sft.checkpoint.resume import Choice, ResumePlan, choose_checkpoint, lost_lines, resolve_resume
from sft.data.prepared import Prepared
from sft.errors import RunError
from sft.files import write_json
from sft.launch.opening import (
    check_start,
    decisions_of,
    keep_recipe,
    lost_latest,
    open_run,
    other_unfinished,
    recipe_changes,
    unfinished_run,
)
from sft.launch.prepare import begin_preparation, prepared_data
from sft.launch.rerun import check_same_data, original_run
from sft.launch.tuning_result import find_answer
from sft.parallel import process_group as distributed
from sft.plan.decision import TuningResult
from sft.plan.job import Job, keep_decisions
from sft.recipe.changes import Change, differences
from sft.run.directory import Run
from sft.run.record import InterruptibleRun, installed_versions, record_start
from sft.run.trust import base_changes
from sft.signals import EXITS
from sft.terminal import forget_failure


@dataclass(frozen=True)
class Start:
    """A run and its data."""

    run: Run
    prepared: Prepared
    searched: TuningResult | None
    """What a search on this machine has found for the job."""

    choice: Choice
    """The checkpoint that it goes on from."""

    earlier: dict[str, Any]
    """The decisions of the plan that it was trained with, by name; none where it starts at the first step."""

    continuation: ResumePlan | None = None
    """How it goes on from the checkpoint."""

    notes: tuple[str, ...] = ()
    """Lines to tell the user."""

    def planned(self, job: Job) -> Job:
        """The job with its data counted."""
        if self.earlier:
            return keep_decisions(job, self.prepared.facts(), self.earlier)
        return job.with_data(self.prepared.facts(), self.searched)


def begin_data(job: Job) -> Popen[bytes] | None:
    """Have the data prepared beside the import of the frameworks, which takes as long; None where it is prepared.

    A mistake in the data ends this process as soon as it is told. Ranks that a launcher started are not asked: they must meet
    within the group's timeout, whatever the data takes.

    Raises:
        RunError: The run cannot be started.
    """
    if "WORLD_SIZE" in os.environ:
        return None
    check_start(job)
    process = begin_preparation(job.recipe, job.model, _command(job))
    if process is not None:
        Thread(target=_end_as_it_ends, args=(process,), daemon=True).start()
    return process


def _end_as_it_ends(process: Popen[bytes]) -> None:
    status = process.wait()
    if status in EXITS:  # somebody has stopped it alone, or this process too
        if signals.asked() is None:
            os.kill(os.getpid(), status - 128)
    elif status > 0:  # it has said why; an import cannot be interrupted otherwise
        os._exit(status)


def wait_for_data(job: Job, begun: Popen[bytes] | None) -> None:
    """Return when the data that begin_data has begun is prepared.

    Raises:
        UserError: The data cannot be used.
    """
    if begun is not None:
        prepared_data(job.recipe, job.model, _command(job), begun=begun)


def _command(job: Job) -> list[str]:
    return [str(job.recipe_path), *job.overrides]


def start_run(job: Job) -> Start:
    """Find or prepare the data, then make the run's folder: a mistake in the data leaves none behind.

    Raises:
        UserError: The data or the run's folder cannot be used.
    """
    return distributed.from_first_rank(lambda: _start(job))


def _start(job: Job) -> Start:
    check_start(job)
    prepared = prepared_data(job.recipe, job.model, _command(job))
    altered = prepared.altered()
    if altered is not None:
        print(f"{prepared.folder / altered} has changed since it was written; the data is prepared again.", flush=True)
        prepared.forget()
        prepared = prepared_data(job.recipe, job.model, _command(job))
    original = original_run(job.recipe_path)
    if original is not None:
        check_same_data(original, job, prepared.fingerprint)
    unfinished, lost = unfinished_run(job), lost_latest(job)
    run = open_run(job)
    signals.interrupts(InterruptibleRun(run))
    beside = (
        [f"Another process is training {unfinished.path}: this is a run beside it."]
        if unfinished not in (None, run)
        else []
    )
    beside += [*filter(None, [lost]), *other_unfinished(run)]
    goes_on = (run.path / "run.json").exists()
    choice = choose_checkpoint(run) if goes_on else Choice(None, {})
    searched, earlier = find_answer(job, prepared), {}
    if choice.checkpoint is not None:
        _check_same_data(run, prepared.fingerprint)
        _check_same_base(run, job)
        earlier = decisions_of(run)
        missing = lost_lines(run, choice.checkpoint)
        run.warn("metrics", missing)
        beside += [missing] if missing else []
    start = Start(run, prepared, searched, choice, earlier)
    planned = start.planned(job)
    _check_steps_left(start, planned.plan.max_steps.value)
    continuation = resolve_resume(choice.checkpoint, planned) if choice.checkpoint else None
    changes = recipe_changes(run, job.recipe) if goes_on else []
    versions = installed_versions()
    updated = differences(run.record.get("versions", versions), versions, "versions") if goes_on else []
    forget_failure(run.path)
    if goes_on:
        keep_recipe(run, job)
    checkpoint = choice.checkpoint.name if choice.checkpoint else None
    seconds = {"prepare_seconds": prepared.summary["seconds"]}
    record_start(run, job, seconds, prepared.fingerprint, checkpoint, choice.passed_over, changes)
    write_json(run.ledger_file, prepared.ledger | {"findings": prepared.findings})
    words = [continuation.words] if continuation and continuation.words else []
    return replace(
        start, continuation=continuation, notes=(*beside, *_notes(choice, [*changes, *updated], goes_on), *words)
    )


def _notes(choice: Choice, changes: Sequence[Change], goes_on: bool) -> list[str]:
    again = ["This run was not finished and has no checkpoint: it starts again."] if goes_on and not choice.step else []
    return [*choice.lines(), *again, *(f"changed since the last session: {change}" for change in changes)]


def _check_same_data(run: Run, fingerprint: str) -> None:
    if run.record.get("data_fingerprint") not in (None, fingerprint):
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot go on. Start anew with "
            "train.resume=never."
        )


def _check_same_base(run: Run, job: Job) -> None:
    """A checkpoint of adapters holds no weights of the base."""
    changes = base_changes(run) if job.recipe.model.lora is not None else None
    if changes:
        raise RunError(
            f"The base model {changes}. Its adapters fit the old weights, so the run cannot resume. Put the base back, or start anew with "
            "train.resume=never."
        )


def _check_steps_left(start: Start, max_steps: int | None) -> None:
    if max_steps is not None and start.choice.step > max_steps:
        raise RunError(
            f"{start.run.path} has been trained for {start.choice.step} steps, and the recipe now asks for {max_steps}. Set "
            f"train.max_steps to at least {start.choice.step}, or start anew with train.resume=never."
        )
