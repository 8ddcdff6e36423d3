"""sft as a library: the functions that `import sft` offers. Each returns a value; none ends or replaces the caller's process.

Training and evaluation run in processes of their own, one for each GPU, whose output appears here.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sft.data.prepared import Prepared, entry_folder, find_prepared
from sft.errors import EXIT_USER_ERROR, DataError, UserError
from sft.launch.job import open_recipe
from sft.launch.main import planned_job
from sft.plan.plan import Plan
from sft.program import RESULT_FILE
from sft.recipe import load
from sft.recipe.schema import Recipe
from sft.run import diff
from sft.run.directory import Run, find_run

Overrides = Mapping[str, object] | Sequence[str]
"""Changed keys of a recipe: {"train.learning_rate": 1e-3}, or ["train.learning_rate=1e-3"] as on the command line."""

_LAST_LINES = 50


class CommandFailed(Exception):
    """Training or evaluation failed, was interrupted (status 130 or 143), or the gate did not pass (3); with what it printed last."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def load_recipe(recipe: str | Path, overrides: Overrides = ()) -> Recipe:
    """Read and validate a recipe. Raises RecipeError with all that is wrong, in one message."""
    return load.load_recipe(load.find_recipe(str(recipe)), _words(overrides))


def plan(recipe: str | Path, overrides: Overrides = (), on: str | None = None) -> Plan:
    """Decide everything the recipe left open, each decision with its reason; starts nothing. Raises UserError if it cannot run here.

    Args:
        recipe: The YAML.
        overrides: Changed keys.
        on: GPUs that are not here, such as `8x80GB`; None: this machine.
    """
    job, _ = planned_job(Path(recipe), _words(overrides), on)
    return job.plan


def prepare(recipe: str | Path, overrides: Overrides = ()) -> Prepared:
    """Prepare a recipe's data, or find it prepared; its `ledger` accounts for every token. Raises UserError if something is wrong."""
    words = _words(overrides)
    opened, path, model = open_recipe(Path(recipe), words)
    _run("sft.launch.prepare", [str(path), *words])
    prepared = find_prepared(entry_folder(opened, model))
    if prepared is None:
        raise DataError("The data changed while it was prepared. Start again when nobody writes to it.")
    return prepared


def train(recipe: str | Path, overrides: Overrides = (), processes: int | None = None) -> Run:
    """Train a recipe, evaluate base and tuned model, and write the report.

    Args:
        recipe: The YAML, or the folder of a run to resume or train again.
        overrides: Changed keys.
        processes: On this machine; None: one for each GPU.

    Returns:
        The run's folder: `final` is the model, `record` its run.json, `comparison_file` and `report_file` the evaluation.

    Raises:
        UserError: The user can fix it.
        CommandFailed: Anything else. The run resumes with the same call.
    """
    environment = {} if processes is None else {"NPROC": str(processes)}
    return Run(Path(_run("sft.launch", [str(recipe), *_words(overrides)], **environment)))


def evaluate(target: str | Path, overrides: Overrides = ()) -> dict[str, Any]:
    """Measure a run's base and tuned model and compare them, or measure any one model.

    Args:
        target: A run's folder; or a model's folder, or its name on the hub.
        overrides: Keys of a recipe's `eval` section, such as {"tasks": ["gsm8k"], "limit": 100}.

    Returns:
        comparison.json of a run; lm_eval's results of a model.

    Raises:
        UserError: The user can fix it.
        CommandFailed: Anything else; status 3: the gate did not pass.
    """
    found: dict[str, Any] = json.loads(Path(_run("eval.run", [str(target), *_words(overrides)])).read_text())
    return found


def compare(run_a: str | Path, run_b: str | Path) -> list[diff.Finding]:
    """Say what differs between two runs, section by section. Raises RunError if one of them is no run."""
    return diff.compare(find_run(Path(run_a)), find_run(Path(run_b)))


def _words(overrides: Overrides) -> list[str]:
    """Overrides as on the command line; values as JSON, which is YAML.

    >>> _words({"train.learning_rate": 1e-3, "data.train": ["a.jsonl"]})
    ['train.learning_rate=0.001', 'data.train=["a.jsonl"]']
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    return list(overrides)


def _run(module: str, words: Sequence[str], **environment: str) -> str:
    """Run a program of ours and show its output here; returns the path that it reports."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            env=os.environ | {RESULT_FILE: str(result), "PYTHONUNBUFFERED": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        with process, io.TextIOWrapper(process.stdout, errors="replace", newline="") as output:
            for line in output:
                sys.stdout.write(line)
                last.append(line)
        if process.returncode:
            message = "".join(last).strip().rpartition("\n\n")[2]
            if process.returncode == EXIT_USER_ERROR:
                raise UserError(message)
            raise CommandFailed(message, process.returncode)
        return result.read_text() if result.exists() else ""
