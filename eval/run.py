"""Measure a run's base and tuned model alike and compare them, or measure any one model.

    python -m eval.run outputs/tiny/latest                       # as the run's recipe says
    python -m eval.run outputs/tiny/latest tasks=gsm8k limit=100
    python -m eval.run Qwen/Qwen2.5-0.5B-Instruct tasks=arc_easy,gsm8k limit=10

The keys are those of the recipe's `eval` section.
"""

from __future__ import annotations

import os
import signal

from sft.program import end_with_parent

if __name__ == "__main__" and "SFT_PARENT" in os.environ:  # before the imports, during which the parent may end
    end_with_parent(int(os.environ["SFT_PARENT"]), signal.SIGTERM)

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.harness.evaluate import evaluate_one, evaluate_run
from eval.models.backends import check_backend
from eval.models.target import check_folder
from sft import terminal
from sft.errors import EvaluationError, RecipeError
from sft.parallel.environment import LAUNCHED
from sft.program import run_main
from sft.recipe.load import parse_recipe
from sft.recipe.schema import Evaluation
from sft.run.directory import Run, find_run
from sft.run.trust import ACCEPT, TRUST, check_model_code, is_own

EXIT_INCOMPLETE = 1
SENDS = ("base_url", "base_url_of_base", "api_key_env")
"""Keys of eval.server that decide where requests go and which key they carry."""
CONSENTS = ("confirm_run_unsafe_code", "confirm_run_task_code")
# What a recipe needs beside its `eval` section, for a model that has no recipe.
NO_RECIPE = json.dumps(
    {"schema_version": 1, "version": 1, "model": {"name_or_path": "-"}, "data": {"train": "-"}}
    | {"train": {"global_batch_size": 1}}
)


def _as_override(argument: str) -> str:
    """An argument as an override of the recipe.

    >>> _as_override("tasks=arc_easy,gsm8k"), _as_override("limit=10")
    ('eval.tasks=["arc_easy", "gsm8k"]', 'eval.limit=10')
    """
    key, equals, value = argument.removeprefix("eval.").partition("=")
    if not equals or not key:
        raise EvaluationError(f"'{argument}' is no setting. Write key=value, for example limit=100.")
    if key == "tasks" and not value.strip().startswith("["):
        value = json.dumps([name.strip() for name in value.split(",") if name.strip()])
    return f"eval.{key}={value}"


def parse_evaluation(arguments: Sequence[str], run: Run | None = None) -> Evaluation:
    """The `eval` section: a run's own, or the defaults, changed by `key=value`; all mistakes in one message."""
    overrides = [_as_override(argument) for argument in arguments if argument not in (TRUST, ACCEPT)]
    text, recorded = NO_RECIPE, list[str]()
    if run is not None:
        text, recorded = run.recipe_file.read_text(encoding="utf-8"), run.record["overrides"]
    try:
        evaluation = parse_recipe(text, [*recorded, *overrides], origin="The evaluation").eval
    except RecipeError as error:
        raise EvaluationError(str(error).replace("is not a valid recipe", "cannot be done as asked")) from None
    if run is not None and not is_own(run.path):
        evaluation = _without_consents(run, evaluation, {word.partition("=")[0] for word in overrides})
    check_backend(evaluation)
    return evaluation


def _without_consents(run: Run, evaluation: Evaluation, given: set[str]) -> Evaluation:
    """The section without the consents that the run's folder alone gives; it must not decide where requests go either."""
    values = {f"eval.server.{key}": getattr(evaluation.server, key) for key in SENDS}
    alone = [f"{key}={value}" for key, value in values.items() if value is not None and key not in given]
    if evaluation.backend == "server" and alone:
        raise EvaluationError(
            f"{run.path}: only its recipe says {' and '.join(alone)}, and a run's folder may be somebody else's. Nothing was sent. To "
            f"send the tasks' documents and that key there, add to this command: {' '.join(alone).replace('eval.', '')}"
        )
    return evaluation.model_copy(update={key: False for key in CONSENTS if f"eval.{key}" not in given})


def _leave_launcher() -> None:
    """Refuse several processes of a launcher, and forget one."""
    if terminal.is_rank():
        raise EvaluationError(
            "The evaluation starts its own processes. Start it once, without a launcher: processes=N sets how many."
        )
    for name in LAUNCHED:
        os.environ.pop(name, None)


def _evaluate(arguments: list[str]) -> dict[str, str]:
    path = Path(arguments[0]).expanduser()
    # A folder that is neither a model nor a run is reported as a missing run.
    if path.is_dir() and not (path / "config.json").is_file():
        run = find_run(path)
        check_model_code(run.path, run.recipe().model.trust_remote_code, TRUST in arguments)
        return evaluate_run(run, parse_evaluation(arguments[1:], run), ACCEPT in arguments)
    for flag in (ACCEPT, TRUST):
        if flag in arguments:
            raise EvaluationError(f"{flag} is for a run's folder, and {arguments[0]} is a model. Leave it out.")
    check_folder(arguments[0])
    return evaluate_one(arguments[0], parse_evaluation(arguments[1:]))


def main(arguments: list[str]) -> None:
    """Measure what the first argument names."""
    if not arguments or "=" in arguments[0]:
        raise EvaluationError(f"Name a run's folder or a model first.\n\n{__doc__}")
    _leave_launcher()
    not_measured = _evaluate(arguments)
    if not_measured:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in not_measured.items())
        terminal.show_message(f"The evaluation is incomplete. Not measured:{reasons}")
        sys.exit(EXIT_INCOMPLETE)


if __name__ == "__main__":
    run_main(main)
