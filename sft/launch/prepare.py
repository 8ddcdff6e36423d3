"""Prepare a recipe's data in a process of its own: `python -m sft.launch.prepare RECIPE [key=value ...]`.

The process loads no weights and joins no process group, so that it can fork a worker for each core. A second one for the same
data waits until the first is done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from sft.data.findings import check_findings
from sft.data.ledger import check_limits
from sft.data.prepare import prepare
from sft.data.prepared import Prepared, entry_folder, find_prepared
from sft.errors import DataError, Interrupted, RecipeError, RunError
from sft.hub.model_facts import ModelFacts
from sft.launch.job import open_recipe
from sft.launch.run_directory import check_start
from sft.plan.hardware import cpu_cores, cpu_memory_gib
from sft.plan.job import Job
from sft.processes import end_with_parent
from sft.program import exit_process, run_main
from sft.recipe.schema import Recipe
from sft.signals import EXITS, SIGNALS, asked, exit_status, held_back

_MAIN_GIB, _WORKER_GIB = 1.0, 0.5
"""Memory of the process that reads, and of each worker: about twice what was measured on long rows with a large vocabulary."""


def main(argv: Sequence[str]) -> None:
    """Prepare one recipe's data, or find it prepared."""
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise RecipeError("usage: python -m sft.launch.prepare RECIPE [key=value ...]")
    if os.environ.get("SFT_PARENT"):
        end_with_parent(int(os.environ["SFT_PARENT"]), signal.SIGTERM)
    recipe, _, model = open_recipe(Path(argv[0]), argv[1:])
    prepare(recipe, model, worker_count())


def worker_count() -> int:
    """Processes that prepare: one for each core, and no more than there is memory for."""
    return max(1, min(cpu_cores(), int((cpu_memory_gib() - _MAIN_GIB) / _WORKER_GIB)))


def begin_preparation(recipe: Recipe, model: ModelFacts, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Start the process that prepares the recipe's data; None where it is prepared already.

    Args:
        recipe: What is prepared.
        model: From inspect_model.
        command: The recipe's path and the overrides.
    """
    if find_prepared(entry_folder(recipe, model)) is not None:
        return None
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment["SFT_PARENT"] = str(os.getpid())
    with held_back():
        return subprocess.Popen([sys.executable, "-m", "sft.launch.prepare", *command], env=environment)


def command_of(job: Job) -> list[str]:
    """The recipe's path and the overrides, as on a command line."""
    return [str(job.recipe_path), *job.overrides]


def begin_data(job: Job) -> subprocess.Popen[bytes] | None:
    """Prepare the data while the frameworks are imported, which takes as long; None where it is prepared.

    A mistake in the data ends this process as soon as it is reported. Ranks of a launcher do not: they must meet within the process
    group's timeout, whatever the data takes.

    Raises:
        RunError: The run cannot start.
    """
    if "WORLD_SIZE" in os.environ:
        return None
    check_start(job)
    process = begin_preparation(job.recipe, job.model, command_of(job))
    if process is not None:
        Thread(target=_end_as_it_ends, args=(process,), daemon=True).start()
    return process


def _end_as_it_ends(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status in EXITS:  # it was stopped alone, or this process too
        if asked() is None:
            os.kill(os.getpid(), status - 128)
    elif status > 0:  # it has reported why; an import cannot be interrupted otherwise
        os._exit(status)


def wait_for_data(job: Job, begun: subprocess.Popen[bytes] | None) -> None:
    """Return when the data that begin_data has begun is prepared.

    Raises:
        UserError: The data cannot be used.
    """
    if begun is not None:
        prepared_data(job.recipe, job.model, command_of(job), begun=begun)


def prepared_data(
    recipe: Recipe,
    model: ModelFacts,
    command: Sequence[str],
    judge: bool = True,
    begun: subprocess.Popen[bytes] | None = None,
) -> Prepared:
    """The recipe's prepared data; where there is none yet, a process of its own makes it.

    Args:
        recipe: What is prepared.
        model: From inspect_model.
        command: The recipe's path and the overrides.
        judge: Hold the ledger against the recipe's limits.
        begun: From begin_preparation, where it was called before.

    Raises:
        DataError: The ledger passes one of them.
    """
    process = begun or begin_preparation(recipe, model, command)
    status = _ended(process) if process else 0
    if -status in SIGNALS or status in EXITS:
        number = -status if status < 0 else status - 128
        raise Interrupted(signal.Signals(number).name, exit_status(number), " while the data was prepared")
    if status < 0:
        raise RunError(
            f"The preparation of the data was ended by signal {-status}, which most often means that memory ran out. Give it fewer "
            "cores (taskset -c 0-3 bash scripts/sft.sh ...) or more memory, and start again."
        )
    if status:
        exit_process(status)  # it has said why
    prepared = find_prepared(entry_folder(recipe, model))
    if prepared is None:
        raise DataError("The data has changed while it was prepared. Start again when nobody writes to it.")
    with suppress(OSError):  # may be another user's
        os.utime(prepared.folder / "prepared.json")
    if judge:
        check_limits(prepared.ledger, recipe.data)
        check_findings(prepared.findings, recipe.data)
    return prepared


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit status. Where this process is interrupted the other one is too, and tidies up first."""
    with process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


if __name__ == "__main__":
    run_main(main)
