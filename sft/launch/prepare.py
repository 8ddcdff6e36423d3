"""Prepare a recipe's data in a process of its own: `python -m sft.launch.prepare RECIPE [key=value ...]`.

The process loads no weights and joins no process group, so that it can fork a worker for each core. A second one for the same data waits
until the first is done.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from sft.data.findings import check_findings
from sft.data.ledger import check_limits
from sft.data.prepare import prepare
from sft.data.prepared import Prepared, entry_folder, find_prepared
from sft.errors import DataError, Interrupted, RunError
from sft.hub.model_facts import ModelFacts
from sft.launch.job import CheckedRecipe, checked_model, open_recipe, parse_command_line, plan_job
from sft.parallel.environment import environment_without_launcher
from sft.plan.hardware import cpu_cores, cpu_memory_gib
from sft.plan.job import Job
from sft.program import end_with_parent, exit_process, run_main, shown_command
from sft.recipe.schema import Recipe
from sft.signals import EXITS, SIGNALS, exit_status, held_back

# Memory of the process that reads, and of each worker: about twice what was measured on long rows with a large vocabulary.
_MAIN_GIB, _WORKER_GIB = 1.0, 0.5


def main(argv: Sequence[str]) -> None:
    """Prepare one recipe's data, or find it prepared."""
    recipe_path, overrides = parse_command_line(argv, "sft.launch.prepare")
    if os.environ.get("SFT_PARENT"):
        end_with_parent(int(os.environ["SFT_PARENT"]), signal.SIGTERM)
    # Whoever starts this checks all of the model.
    recipe, _, model = open_recipe(recipe_path, overrides, for_data=True)
    prepare(recipe, model, worker_count())


def worker_count() -> int:
    """Processes that prepare: one for each core, and no more than there is memory for."""
    return max(1, min(cpu_cores(), int((cpu_memory_gib() - _MAIN_GIB) / _WORKER_GIB)))


def begin_preparation(recipe: Recipe, model: ModelFacts, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Start the process that prepares the recipe's data; None if it is prepared. It ends with this process."""
    if find_prepared(entry_folder(recipe, model)) is not None:
        return None
    environment = environment_without_launcher() | {"SFT_PARENT": str(os.getpid())}
    environment.pop("OMP_NUM_THREADS", None)
    with held_back():
        return subprocess.Popen([sys.executable, "-m", "sft.launch.prepare", *command], env=environment)


def plan_beside_preparation(checked: CheckedRecipe) -> tuple[Job, subprocess.Popen[bytes] | None]:
    """Plan while another process prepares the data (None if it is prepared), since either imports for seconds. Raises UserError."""
    command = [str(checked.path), *checked.overrides]
    process = begin_preparation(checked.recipe, checked_model(checked.recipe, for_data=True), command)
    if process is not None:
        _end_if_it_fails(process)
        # However this process ends: one that outlived it would say that it was interrupted, below the reason.
        atexit.register(end_preparation, process)
    return plan_job(checked), process


def end_preparation(process: subprocess.Popen[bytes] | None) -> None:
    """End it, and wait until it has tidied up."""
    if process is not None:
        process.terminate()
        process.wait()


def _end_if_it_fails(process: subprocess.Popen[bytes]) -> None:
    """End this process as soon as that one has reported a mistake in the data: imports meanwhile cannot be interrupted otherwise."""

    def watch() -> None:
        status = process.wait()
        if status > 0 and status not in EXITS:
            os._exit(status)

    Thread(target=watch, daemon=True).start()


def prepared_data(
    recipe: Recipe,
    model: ModelFacts,
    command: Sequence[str],
    judge: bool = True,
    begun: subprocess.Popen[bytes] | None = None,
) -> Prepared:
    """The recipe's prepared data; if there is none yet, a process of its own makes it.

    Args:
        recipe: What is prepared.
        model: From inspect_model.
        command: The recipe's path and the overrides.
        judge: Compare ledger and findings with the recipe's limits, which raises DataError.
        begun: From plan_beside_preparation.
    """
    process = begun or begin_preparation(recipe, model, command)
    if process is not None:
        _wait_for(process)
    prepared = find_prepared(entry_folder(recipe, model))
    if prepared is None:
        raise DataError("The data has changed while it was prepared. Start again when nobody writes to it.")
    with suppress(OSError):  # may be another user's
        os.utime(prepared.folder / "prepared.json")
    if judge:
        check_limits(prepared.ledger, recipe.data)
        check_findings(prepared.findings, recipe.data)
    return prepared


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    with process:
        try:
            status = process.wait()
        except BaseException:  # it is interrupted too, and tidies up first
            end_preparation(process)
            raise
    if -status in SIGNALS or status in EXITS:
        number = -status if status < 0 else status - 128
        raise Interrupted(signal.Signals(number).name, exit_status(number), " while the data was prepared")
    if status < 0:
        raise RunError(
            f"The preparation of the data was ended by signal {-status}, which most often means that memory ran out. Give it fewer "
            f"cores (taskset -c 0-3 {shown_command('sft')} ...) or more memory, and start again."
        )
    if status:
        exit_process(status)  # it has said why


if __name__ == "__main__":
    run_main(main)
