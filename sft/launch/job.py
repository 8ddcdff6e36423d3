"""Opens a job: checks the recipe, its model, data and tasks on this machine, and plans, before anything heavy is imported.

The launcher opens it to report a mistake within a second or two, and each rank opens it again, since it may have been started by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from eval.models.backends import check_backend
from eval.tasks.suites import check_tasks
from sft.data.facts import inspect_data
from sft.data.tokenizer import find_chat_template
from sft.errors import EvaluationError, ModelError, RecipeError, RunError
from sft.hub.data_facts import DataFacts
from sft.hub.model_facts import ModelFacts, inspect_model
from sft.hub.names import model_path
from sft.plan.batch import check_batch
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.plan.resolve import planned
from sft.recipe.load import find_recipe, load_recipe
from sft.recipe.local_code import check_code
from sft.recipe.schema import Recipe
from sft.run.directory import check_names
from sft.train.tracking import check_trackers


def parse_command_line(argv: Sequence[str], module: str) -> tuple[Path, list[str]]:
    """The recipe's path and the overrides. Raises RecipeError if the first word is no path."""
    # The deepspeed launcher adds --local_rank=N; the environment says the same.
    words = [word for word in argv if not word.startswith("--local_rank")]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise RecipeError(f"usage: python -m {module} RECIPE [key=value ...]")
    return Path(words[0]), words[1:]


def command_of(job: Job) -> list[str]:
    """The recipe's path and the overrides, as on a command line."""
    return [str(job.recipe_path), *job.overrides]


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe that has passed every check that needs no torch."""

    recipe: Recipe
    path: Path
    overrides: tuple[str, ...]
    hardware: Hardware
    data: DataFacts | None


def check_recipe(recipe_path: Path, overrides: Sequence[str], hardware: Hardware) -> CheckedRecipe:
    """Check recipe, batch, data and tasks within a second; imports no torch. Raises UserError."""
    recipe, path = _checked_recipe(recipe_path, overrides)
    check_batch(recipe, hardware)
    data = inspect_data(recipe, model_path(recipe))
    check_backend(recipe.eval, after_training=True)
    check_tasks(recipe.eval, Path(recipe.output_dir))
    check_tasks_during(recipe)
    check_trackers(recipe.tracking)
    return CheckedRecipe(recipe, path, tuple(overrides), hardware, data)


def plan_job(checked: CheckedRecipe, to_run: bool = True) -> Job:
    """Check the model and plan, which imports torch to count its parameters. Raises UserError.

    With to_run=False, for a plan alone, no model needs to be at hand.
    """
    case = planned(checked.recipe, checked.hardware, checked_model(checked.recipe, to_run), checked.data)
    return Job(**vars(case), recipe_path=checked.path, overrides=checked.overrides)


def open_job(recipe_path: Path, overrides: Sequence[str], hardware: Hardware, to_run: bool = True) -> Job:
    """Check everything that can be checked before the data is prepared, and plan. Raises UserError."""
    return plan_job(check_recipe(recipe_path, overrides, hardware), to_run)


def open_recipe(recipe_path: Path, overrides: Sequence[str], for_data: bool = False) -> tuple[Recipe, Path, ModelFacts]:
    """A recipe, the file it is in, and its model, on whatever machine; for_data as inspect_model has it. Raises UserError."""
    recipe, path = _checked_recipe(recipe_path, overrides)
    return recipe, path, checked_model(recipe, for_data=for_data)


def _checked_recipe(recipe_path: Path, overrides: Sequence[str]) -> tuple[Recipe, Path]:
    path = find_recipe(str(recipe_path))
    recipe = load_recipe(path, overrides)
    check_names(path, recipe.tracking.run_name)
    check_code(recipe)
    _check_output_dir(recipe.output_dir)
    if recipe.model.chat_template is not None:
        find_chat_template(recipe.model.chat_template)
    return recipe, path


def checked_model(recipe: Recipe, to_run: bool = True, for_data: bool = False) -> ModelFacts:
    """What inspect_model finds of the recipe's model, which must be at hand to run. Raises ModelError."""
    model = inspect_model(recipe, to_run, for_data)
    if to_run and model.model_type is None:
        raise ModelError(
            f"model.name_or_path={recipe.model.name_or_path}: there is no such folder here, it is not in the hub's cache, and the "
            "hub does not answer. Download it where there is a network (hf download), or give a local folder."
        )
    return model


def _check_output_dir(output_dir: str) -> None:
    if re.search(r"\$\{?\w", output_dir):
        raise RunError(
            f"output_dir={output_dir}: variables are not expanded in a recipe. Write the path, or give it on the command line, "
            'where the shell expands it: output_dir="$SCRATCH/runs".'
        )
    folder = Path(output_dir)
    try:
        folder = folder.expanduser().resolve()
        while not folder.exists():
            folder = folder.parent
        # Permissions do not tell of /proc, a quota, or a server that gives root no rights: make something.
        Path(mkdtemp(prefix=".writable-", dir=folder)).rmdir()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(
            f"output_dir={output_dir}: {folder} cannot be written ({why}). Set output_dir to a place that can be written."
        ) from None


def check_tasks_during(recipe: Recipe) -> None:
    """Find the tasks that are measured during the training. Raises EvaluationError if one is missing, or runs generated code."""
    if recipe.eval.during is None:
        return
    try:
        check_tasks(recipe.eval.during, Path(recipe.output_dir))
    except EvaluationError as error:
        raise EvaluationError(
            f"eval.every_steps (it measures eval.every_tasks, none of which may run generated code): {error}"
        ) from None
