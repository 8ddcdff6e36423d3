"""Opens a job: checks the recipe, its model, data and tasks on this machine, and plans, before anything heavy is imported.

The launcher opens it to answer a mistake in a second or two, and each rank opens it again, since it may have been started by
hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from eval.models.backends import check_backend
from eval.tasks.suites import check_tasks
from sft.data.facts import inspect_data
from sft.data.tokenizer import check_tokenizer_choice
from sft.errors import EvaluationError, ModelError, RunError
from sft.hub.model_facts import ModelFacts, inspect_model
from sft.hub.names import model_path
from sft.plan.batch import check_batch
from sft.plan.engine import open_deepspeed
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.plan.resolve import resolve_plan
from sft.recipe.load import find_file, load_recipe
from sft.recipe.schema import Recipe
from sft.run.directory import check_names


def check_output_dir(recipe: Recipe) -> None:
    """Refuse a place for the run that cannot be written.

    Raises:
        RunError: It is a file, or belongs to somebody else.
    """
    if re.search(r"\$\{?\w", recipe.output_dir):
        raise RunError(
            f"output_dir={recipe.output_dir}: variables are not expanded in a recipe. Write the path, or give it on the command line, "
            'where the shell expands it: output_dir="$SCRATCH/runs".'
        )
    folder = Path(recipe.output_dir)
    try:
        folder = folder.expanduser().resolve()
        while not folder.exists():
            folder = folder.parent
        # By making something: permissions do not tell of /proc, a quota, or a server that gives root no rights.
        Path(mkdtemp(prefix=".writable-", dir=folder)).rmdir()
    except (OSError, RuntimeError, ValueError) as error:
        why = "is not a folder" if isinstance(error, NotADirectoryError) else f"cannot be written ({_reason(error)})"
        raise RunError(
            f"output_dir={recipe.output_dir}: {folder} {why}. Set output_dir to a place that can be written."
        ) from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def open_recipe(recipe_path: Path, overrides: Sequence[str], to_run: bool = True) -> tuple[Recipe, Path, ModelFacts]:
    """A recipe, the file it is in, and its model: what the preparation of the data needs, on whatever machine.

    Raises:
        UserError: The recipe, its output_dir, chat template or model is wrong.
    """
    recipe, path = _checked_recipe(recipe_path, overrides)
    return recipe, path, _checked_model(recipe, to_run)


def _checked_recipe(recipe_path: Path, overrides: Sequence[str]) -> tuple[Recipe, Path]:
    path = find_file(str(recipe_path))
    recipe = load_recipe(path, overrides)
    check_names(path, recipe.tracking.run_name)
    check_output_dir(recipe)
    check_tokenizer_choice(recipe)
    return recipe, path


def _checked_model(recipe: Recipe, to_run: bool) -> ModelFacts:
    model = inspect_model(recipe, download=to_run)
    if to_run and model.model_type is None:
        raise ModelError(
            f"model.name_or_path={recipe.model.name_or_path}: there is no such folder here, it is not in the hub's cache, and the "
            "hub does not answer. Download it where there is a network (hf download), or give a local folder."
        )
    return model


def check_tasks_during(recipe: Recipe) -> None:
    """Find the tasks that are measured during the training.

    Raises:
        EvaluationError: One is missing, or runs generated code.
    """
    if recipe.eval.during is None:
        return
    try:
        check_tasks(recipe.eval.during, Path(recipe.output_dir))
    except EvaluationError as error:
        raise EvaluationError(
            "eval.every_steps: during the training no generated code is run, whatever eval.confirm_run_unsafe_code says. eval.every_tasks "
            f"names what is measured then.\n{error}"
            if "Python code" in str(error)
            else f"eval.every_steps: {error}"
        ) from None


def open_job(recipe_path: Path, overrides: Sequence[str], hardware: Hardware, to_run: bool = True) -> Job:
    """Check everything that can be checked before the data is prepared, and plan.

    What needs no import of torch comes first, so that most mistakes cost a second.

    Args:
        recipe_path: The YAML.
        overrides: `key=value` with dots.
        hardware: The machine to plan for.
        to_run: False for a plan alone, which needs no model at hand.

    Raises:
        UserError: The first mistake found, or all of the recipe's.
    """
    recipe, path = _checked_recipe(recipe_path, overrides)
    check_batch(recipe, hardware)
    data = inspect_data(recipe, model_path(recipe))
    if to_run:
        check_backend(recipe.eval, after_training=True)
    check_tasks(recipe.eval, Path(recipe.output_dir))
    check_tasks_during(recipe)
    model = _checked_model(recipe, to_run)
    deepspeed = open_deepspeed(recipe, hardware, model)
    plan = resolve_plan(recipe, hardware, model, data, deepspeed)
    return Job(recipe, path, tuple(overrides), hardware, model, deepspeed, plan)
