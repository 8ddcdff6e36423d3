"""Measure a run's base and tuned model alike and compare them, or measure any one model.

    python -m eval.run outputs/tiny/latest                       # as the run's recipe says
    python -m eval.run outputs/tiny/latest tasks=gsm8k limit=100
    python -m eval.run Qwen/Qwen2.5-0.5B-Instruct tasks=arc_easy,gsm8k limit=10

The keys are those of the recipe's `eval` section.
"""

from __future__ import annotations

import os
import signal

from sft.processes import end_with_parent

if __name__ == "__main__":  # before the imports, during which the parent may end
    if os.environ.get("SFT_LAUNCHER") == str(os.getppid()):
        end_with_parent(os.getppid(), signal.SIGTERM)
    elif "SFT_PARENT" in os.environ and "RANK" not in os.environ:
        end_with_parent(int(os.environ["SFT_PARENT"]), signal.SIGTERM)

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval import ranks
from eval.ahead import describe
from eval.backend_checks import check_backend
from eval.backends import Target, check_requests, find_backend, place_backend
from eval.base_cache import measure_base
from eval.conclude import conclude
from eval.launch import become_launcher, decided_placement
from eval.measure import Results, evaluate_model
from eval.placement import Placement, place_model
from eval.quiet import LOG
from eval.settings import Reference, Settings, check_vocabulary, load_config, load_reference, resolve_settings
from eval.suites import TaskSelection, check_tasks
from eval.tables import scores_table
from eval.task_facts import task_facts
from eval.tasks import LoadedTasks, load_tasks
from eval.treatment import own_template, treat_base
from sft import rank_logs
from sft.errors import EvaluationError, GateFailed, RecipeError, run_main
from sft.recipe import Evaluation
from sft.recipe_file import parse_recipe
from sft.remote_code import code_hash
from sft.run_directory import Run, find_run, read_json

EXIT_INCOMPLETE = 1
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
    """The `eval` section: a run's own, or the defaults, changed by `key=value`.

    Raises:
        EvaluationError: An argument is no key of it, or has a wrong value; all at once.
    """
    overrides = [_as_override(argument) for argument in arguments]
    text, recorded = NO_RECIPE, []
    if run is not None:
        text, recorded = run.recipe_file.read_text(encoding="utf-8"), run.record["overrides"]
    try:
        evaluation = parse_recipe(text, [*recorded, *overrides], origin="The evaluation").eval
    except RecipeError as error:
        raise EvaluationError(str(error).replace("is not a valid recipe", "cannot be done as asked")) from None
    check_backend(evaluation)
    return evaluation


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class _NeedsProcesses(Exception):
    """More than this one are to share the documents."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement


def _place(evaluation: Evaluation, reference: Reference, settings: Settings, trust_remote_code: bool) -> Placement:
    """Where the layers go and how many processes share the documents, said where there is anything to say.

    Raises:
        _NeedsProcesses: They are not there yet.
    """
    number = ranks.launched()

    def decide() -> Placement:
        wanted = evaluation.parallelize, evaluation.processes
        return place_model(*wanted, number, reference.config, settings.dtype, trust_remote_code)

    placement = place_backend(evaluation) or (decided_placement() if number > 1 else None)
    placement = placement or ranks.from_first(decide)
    if placement.processes > number:
        raise _NeedsProcesses(placement)
    if placement.spread or placement.processes > 1:
        print(f"Placement: {placement}", flush=True)
    if placement.processes < number:  # a launcher of the user's has started several, and one spreads the layers
        if not ranks.is_first():
            sys.exit(0)
        ranks.leave()
    return placement


def _load_tasks(selection: TaskSelection, settings: Settings, evaluation: Evaluation, log: Path) -> LoadedTasks:
    """The same tasks on every process."""
    consent = evaluation.confirm_run_unsafe_code
    if ranks.is_first():
        for line in describe(evaluation):
            print(line, flush=True)
    tasks = ranks.first_then_others(lambda: load_tasks(selection, settings, consent, log))
    for missing in ranks.exchange(tasks.missing):
        tasks.missing.update(missing)
    here = [set(names) for names in ranks.exchange(list(tasks.by_name))]
    for name in here[0].union(*here) - here[0].intersection(*here):  # one process got a group, another only its parts
        tasks.missing.setdefault(name, "not every process of the evaluation could load it")
    for name in tasks.missing:
        tasks.by_name.pop(name, None)
    return tasks


def _results(folder: Path) -> Results:
    results: Results = read_json(folder / "results.json")
    return results


def _log_in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"Results cannot be written: {error}.") from None
    return folder / (LOG if ranks.is_first() else LOG.replace(".log", f".rank-{ranks.rank()}.log"))


def _check_same_code(run: Run, record: dict[str, str]) -> None:
    """Refuse to run code that has changed since it was trained with."""
    trained = record.get("code_sha256")
    if trained is not None and code_hash(run.recipe().model, record["path"]) != trained:
        raise EvaluationError(
            f"The Python files of {record['path']} have changed since {run.path} was trained with them. Put them back: the base model must "
            "be the one that the training started from."
        )


def _base_target(run: Run, trust_remote_code: bool, reference: Reference) -> Target:
    """The model that the run started from, checked as far as that goes without its weights."""
    record = run.record["base_model"]
    _check_same_code(run, record)
    path, new_tokens = str(record.get("path") or record["name_or_path"]), run.recipe().model.new_tokens
    target = Target("base", path, record["revision"], trust_remote_code, new_tokens)
    config = load_config(target.model, target.revision, trust_remote_code, called=f"The base model of {run.path},")
    check_vocabulary(reference, config, target.model, new_tokens)
    return target


def evaluate_run(run: Run, evaluation: Evaluation) -> dict[str, str]:
    """Measure a run's base and tuned model, and write the comparison and the report.

    Args:
        run: A run that has its final model.
        evaluation: The recipe's `eval` section, changed on the command line or not.

    Returns:
        Tasks that could not be measured, and why: empty where the comparison is complete.

    Raises:
        EvaluationError: Whatever the user can fix.
        GateFailed: The tuned model does not hold what eval.gate asks for.
    """
    recipe = run.recipe()
    selection = check_tasks(evaluation, Path(recipe.output_dir))
    if not selection.tasks:
        raise EvaluationError("There is nothing to measure: eval.tasks is empty. Name tasks: tasks=gsm8k,arc_easy")
    if not (run.final / "config.json").is_file():
        status = run.record.get("status")
        raise EvaluationError(f"{run.path} has no final model (status: {status}). Finish its training first.")
    reference = load_reference(str(run.final), None, recipe.model.trust_remote_code)
    base = _base_target(run, recipe.model.trust_remote_code, reference)
    tuned = Target("tuned", str(run.final), None, recipe.model.trust_remote_code)
    settings = resolve_settings(evaluation, selection, reference, _on_gpu())
    treatment = treat_base(settings, reference, own_template(base))
    placement = _place(evaluation, reference, settings, recipe.model.trust_remote_code)
    asked_base, asked_tuned = (treatment.settings, treatment.tokenizer), (settings, reference.tokenizer)
    base, tuned = find_backend(evaluation, reference.path, (base, *asked_base), (tuned, *asked_tuned))
    folder = _results_folder(run, settings, reference)
    log = _log_in(folder)
    tasks = _load_tasks(selection, settings, evaluation, log)
    facts = ranks.from_first(lambda: task_facts(settings, tasks))
    check_requests(tasks, (base, *asked_base), (tuned, *asked_tuned))
    settings, treatment = replace(settings, loaded=facts), treatment.with_facts(facts)
    if treatment.told:
        print(treatment.told, flush=True)
    # What a server has under a name may be another model tomorrow.
    keeps = evaluation.base_cache and settings.backend != "server"
    output_dir = Path(recipe.output_dir) if keeps else None
    measure_base(base, treatment, tasks, folder / "base", log, placement, output_dir)
    evaluate_model(tuned, reference.tokenizer, tasks, settings, folder / "tuned", log, placement)
    return _compare_and_report(run, folder, evaluation, reference) if ranks.is_first() else {}


def _results_folder(run: Run, settings: Settings, reference: Reference) -> Path:
    """eval/ for the recipe's own evaluation; a folder in it for another, which must not replace those results."""
    recipe, folder = run.recipe(), run.comparison_file.parent
    selection = check_tasks(recipe.eval, Path(recipe.output_dir))
    if not selection.tasks or resolve_settings(recipe.eval, selection, reference, _on_gpu()).hash == settings.hash:
        return folder
    return folder / settings.hash[:12]


def _compare_and_report(run: Run, folder: Path, evaluation: Evaluation, reference: Reference) -> dict[str, str]:
    from eval.report import write_report

    comparison = conclude(run, folder, evaluation, reference.tokenizer)
    not_measured: dict[str, str] = comparison["not_measured"]
    gate = comparison["gate"]
    if folder == run.comparison_file.parent:
        passed = None if gate is None else "passed" if gate["passed"] else "failed"
        run.update(evaluation="failed" if not_measured else "finished", gate=passed)
        print(f"Report: {write_report(run)}")
    else:
        print(f"Results: {folder} (the report keeps those of the recipe's own evaluation)")
    if gate is not None and not gate["passed"] and not not_measured:
        raise GateFailed(gate["failures"])
    return not_measured


def evaluate_one(model: str, evaluation: Evaluation) -> dict[str, str]:
    """Measure one model and write lm_eval's output to outputs/eval/<model>/<time>/.

    Args:
        model: A folder, an id on the hub, or `builtin:demo`.
        evaluation: What to measure.

    Returns:
        Tasks that could not be measured, and why.

    Raises:
        EvaluationError: Whatever the user can fix.
    """
    from rich.console import Console

    if evaluation.gate is not None:
        raise EvaluationError("eval.gate compares a tuned model with its base: name a run, or leave the gate out.")
    outputs = Path("outputs")
    selection = check_tasks(evaluation, outputs)
    if not selection.tasks:
        raise EvaluationError(f"There is nothing to measure on {model}. Name tasks: tasks=gsm8k,arc_easy")
    if model == "builtin:demo":
        from sft.demo import make_demo

        model = str(make_demo(outputs).model)
    folder = Path(model).expanduser()
    target = Target(folder.resolve().name, str(folder)) if folder.is_dir() else Target(model, model)
    reference = load_reference(target.model, None, False)
    check_vocabulary(reference, reference.config, target.model)
    settings = resolve_settings(evaluation, selection, reference, _on_gpu())
    placement = _place(evaluation, reference, settings, False)
    (target,) = find_backend(evaluation, reference.path, (target, settings, reference.tokenizer))
    output = outputs.resolve() / "eval" / target.label.replace("/", "__") / time.strftime("%Y%m%d-%H%M%S")
    log = _log_in(output.parent)
    tasks = _load_tasks(selection, settings, evaluation, log)
    facts = ranks.from_first(lambda: task_facts(settings, tasks))
    check_requests(tasks, (target, settings, reference.tokenizer))
    settings = replace(settings, loaded=facts)
    evaluate_model(target, reference.tokenizer, tasks, settings, output, log, placement)
    if not ranks.is_first():
        return {}
    results = _results(output)
    Console().print(scores_table(results))
    print(f"Results: {output}")
    failed: dict[str, str] = results["failed"]
    return failed


def _evaluate(arguments: list[str]) -> dict[str, str]:
    path = Path(arguments[0]).expanduser()
    # A folder that is neither a model nor a run is told of as a run that is missing.
    if path.is_dir() and not (path / "config.json").is_file():
        run = find_run(path)
        return evaluate_run(run, parse_evaluation(arguments[1:], run))
    return evaluate_one(arguments[0], parse_evaluation(arguments[1:]))


def main(arguments: list[str]) -> None:
    """Measure what the first argument names."""
    if not arguments or "=" in arguments[0]:
        raise EvaluationError(f"Name a run's folder or a model first.\n\n{__doc__}")
    rank_logs.begin()
    ranks.join()
    try:
        not_measured = _evaluate(arguments)
    except _NeedsProcesses as more:
        become_launcher(more.placement, arguments)
    if not_measured:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in not_measured.items())
        rank_logs.tell_message(f"The evaluation is incomplete. Not measured:{reasons}")
    else:
        rank_logs.end()
    ranks.leave()
    if not_measured:
        sys.exit(EXIT_INCOMPLETE)


if __name__ == "__main__":
    run_main(main)
