"""Checks the tasks of the evaluation after a training before it starts: lm_eval loads them in a process beside data preparation.

What a training needs hours for must not end in a task file that cannot be loaded. A network that is down stops no training.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from eval.sandbox.runner import check_isolation
from eval.tasks.suites import check_tasks, describe_suite
from sft.errors import EvaluationError
from sft.program import end_with_parent, run_main
from sft.recipe.schema import Evaluation, Recipe


class TaskCheck:
    """A process that loads the tasks; `wait` reports what it found."""

    def __init__(self, evaluation: Evaluation, output_dir: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eval.tasks.preflight", str(os.getpid()), output_dir, evaluation.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait(self) -> None:
        """Wait for it, and print which datasets are out of reach.

        Raises:
            EvaluationError: A task cannot be loaded or measured.
        """
        output, _ = self.process.communicate()
        try:
            found = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):  # killed, or out of memory: the evaluation itself will say more
            print("The tasks of the evaluation could not be checked before the training.", file=sys.stderr)
            return
        if found["refused"] is not None:
            raise EvaluationError(f"Nothing is trained yet. {found['refused']}")
        lines = [f"The documents of {task} are out of reach: {reason}" for task, reason in found["missing"].items()]
        if lines:
            lines.append("Training continues; without them the evaluation after it will be incomplete.")
            print("\n".join(lines), file=sys.stderr, flush=True)


def check_before_training(recipe: Recipe) -> TaskCheck | None:
    """Start to load the tasks that the recipe measures after its training; None where there is nothing to load but the demo's own task.

    Raises:
        EvaluationError: A task is unknown or lacks consent, or runs generated code, which this machine cannot isolate.
    """
    selection = check_tasks(recipe.eval, Path(recipe.output_dir))
    if selection.runs_code:
        check_isolation()
    if (suite := describe_suite(recipe.eval)) is not None:
        print(suite, flush=True)
    if not {*recipe.eval.tasks} - {"builtin:demo"} and recipe.eval.suite is None:
        return None
    return TaskCheck(recipe.eval, recipe.output_dir)


def main(arguments: list[str]) -> None:
    """Load the tasks, and print what is wrong with them as one line of JSON."""
    end_with_parent(int(arguments[0]), signal.SIGKILL)
    from eval.tasks.load import read_tasks

    evaluation = Evaluation.model_validate_json(arguments[2])
    selection = check_tasks(evaluation, Path(arguments[1]))
    refused, missing, run_code = None, dict[str, str](), evaluation.confirm_run_unsafe_code
    try:
        missing = read_tasks(selection, evaluation.num_fewshot, run_code, Path(os.devnull)).missing
    except EvaluationError as error:
        refused = str(error)
    print(json.dumps({"refused": refused, "missing": missing}), flush=True)


if __name__ == "__main__":
    run_main(main)
