"""What training starts from: the prepared data, and the run's folder opened around it by the first rank for all."""

from __future__ import annotations

from dataclasses import dataclass

from sft import distributed
from sft.errors import RunError
from sft.job import Job
from sft.prepare import prepared_data
from sft.prepared import Prepared
from sft.resolved import Searched
from sft.run_directory import Run, check_start, open_run, record_start, write_json
from sft.search_cache import find_answer


@dataclass(frozen=True)
class Start:
    """A run and its data."""

    run: Run
    prepared: Prepared
    searched: Searched | None
    """What a search on this machine has found for the job."""


def start_run(job: Job) -> Start:
    """Find or prepare the data, then make the run's folder: a mistake in the data leaves none behind.

    Raises:
        UserError: The data or the run's folder cannot be used.
    """
    started = _start(job) if distributed.is_first_rank() else None
    shared: Start | None = distributed.from_first_rank(started)
    assert shared is not None
    return shared


def _start(job: Job) -> Start:
    check_start(job)
    prepared = prepared_data(job.recipe, job.model, [str(job.recipe_path), *job.overrides])
    run = open_run(job)
    earlier = run.record.get("data_fingerprint") if (run.path / "run.json").exists() else None
    if earlier not in (None, prepared.fingerprint) and run.last_checkpoint():
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot go on. Start anew with "
            "train.resume=never."
        )
    record_start(run, job, {"prepare_seconds": prepared.summary["seconds"]}, prepared.fingerprint)
    write_json(run.ledger_file, prepared.ledger | {"findings": prepared.findings})
    return Start(run, prepared, find_answer(job, prepared))
