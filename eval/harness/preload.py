"""What an evaluation will need, said before the training that it comes after.

The hub is asked by a process beside the start, which does not wait for the answer: a network that is down for a moment stops no training.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eval.tasks.named_suites import SUITES, describe_suite, tasks_of
from eval.tasks.suites import TaskSelection, check_tasks
from sft.processes import end_with_parent
from sft.program import run_main
from sft.recipe.schema import Evaluation, Recipe

TRUE = {"1", "ON", "YES", "TRUE"}


def _offline() -> bool:
    """Whether the user has said that the hub is not to be asked, as the libraries read it."""
    return any(
        os.environ.get(name, "").upper() in TRUE
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _is_cached(dataset: str) -> bool:
    """Whether something of a dataset is on this machine: in the hub's cache, or prepared by `datasets`."""
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    ).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    name = dataset.replace("/", "___")
    return (
        (hub / f"datasets--{dataset.replace('/', '--')}").is_dir()
        or (prepared / name).is_dir()
        or (prepared / name.lower()).is_dir()
    )


def _reachable(dataset: str) -> str | None:
    """Ask the hub for leave to read a dataset; what it says where there is none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().auth_check(dataset, repo_type="dataset")
    except GatedRepoError:
        return f"it is gated: accept its terms on https://huggingface.co/datasets/{dataset}, and log in (`hf auth login`, or HF_TOKEN)"
    except RepositoryNotFoundError:
        return "the hub has no such dataset, or shows it to others only (`hf auth login`, or HF_TOKEN)"
    except Exception as error:  # each version of the library has another for a network that is down
        return f"the hub cannot be asked now ({type(error).__name__})"
    return None


def _not_here(selection: TaskSelection) -> dict[str, list[str]]:
    """The datasets of which nothing is on this machine, with the tasks that need each."""
    tasks: dict[str, list[str]] = {}
    for task, datasets in selection.datasets:
        for dataset in datasets:
            tasks.setdefault(dataset, []).append(task)
    return {dataset: needed for dataset, needed in tasks.items() if not _is_cached(dataset)}


def _told(dataset: str, tasks: list[str], reason: str) -> str:
    return f"The dataset {dataset} of {', '.join(tasks)} is out of reach: {reason}."


def _tell(lines: list[str]) -> None:
    if lines:
        more = "The training goes on; without them the evaluation after it will be incomplete."
        print("\n".join([*lines, more]), file=sys.stderr, flush=True)


def ask_hub(wanted: dict[str, list[str]]) -> list[str]:
    """A line for each dataset that the hub would not give now.

    Args:
        wanted: Per dataset, the tasks that need it.
    """
    with ThreadPoolExecutor(max_workers=8) as pool:
        reasons = list(pool.map(_reachable, wanted))
    return [_told(dataset, wanted[dataset], reason) for dataset, reason in zip(wanted, reasons, strict=True) if reason]


def look_for_datasets(selection: TaskSelection) -> subprocess.Popen[bytes] | None:
    """Have each dataset told that is not within reach: at once where the hub is not to be asked, else when it has answered.

    Returns:
        The process that asks.
    """
    wanted = _not_here(selection)
    if not wanted:
        return None
    if _offline():
        reason = "it is not on this machine, and the hub is not asked (HF_HUB_OFFLINE)"
        _tell([_told(dataset, tasks, reason) for dataset, tasks in wanted.items()])
        return None
    command = [sys.executable, "-m", "eval.harness.preload", str(os.getpid()), json.dumps(wanted)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def describe(evaluation: Evaluation) -> list[str]:
    """What is to be known of an evaluation before it: of its suite, and of code that it runs."""
    if evaluation.suite is None:
        return []
    tasks = tasks_of(evaluation.suite, evaluation.apply_chat_template)
    limit = SUITES[evaluation.suite].limit if evaluation.limit is None else evaluation.limit
    return [describe_suite(evaluation.suite, tasks, limit)]


def foresee(recipe: Recipe) -> None:
    """Say what the evaluation after a training will measure and need.

    Raises:
        EvaluationError: It would run generated code, which this machine cannot hold.
    """
    selection = check_tasks(recipe.eval, Path(recipe.output_dir))
    if selection.runs_code:
        from eval.sandbox.runner import check_isolation

        check_isolation()
    for line in describe(recipe.eval):
        print(line, flush=True)
    _asking.append(look_for_datasets(selection))


_asking: list[subprocess.Popen[bytes] | None] = []
"""Kept: a process that nobody holds is told of as forgotten."""


def main(arguments: list[str]) -> None:
    """Ask the hub for a process that has other things to do."""
    end_with_parent(int(arguments[0]), signal.SIGKILL)
    _tell(ask_hub(json.loads(arguments[1])))


if __name__ == "__main__":
    run_main(main)
