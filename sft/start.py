"""What training starts from: the prepared data, and the run's folder opened around it by the first rank for all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from subprocess import Popen
from threading import Thread

from sft import distributed, interruption
from sft.errors import RunError
from sft.interruption import EXITS
from sft.job import Job
from sft.prepare import begin_preparation, prepared_data
from sft.prepared import Prepared
from sft.rank_logs import forget_ending
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
        if interruption.asked() is None:
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
    run = open_run(job)
    forget_ending(run.path)
    earlier = run.record.get("data_fingerprint") if (run.path / "run.json").exists() else None
    if earlier not in (None, prepared.fingerprint) and run.last_checkpoint():
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot go on. Start anew with "
            "train.resume=never."
        )
    interruption.is_of(run)
    record_start(run, job, {"prepare_seconds": prepared.summary["seconds"]}, prepared.fingerprint)
    write_json(run.ledger_file, prepared.ledger | {"findings": prepared.findings})
    return Start(run, prepared, find_answer(job, prepared))
