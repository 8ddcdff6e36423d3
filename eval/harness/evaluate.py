"""Evaluates a run (base and tuned model, compared and reported) or any one model."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from eval.compare.comparison import write_comparison
from eval.compare.tables import score_lines
from eval.harness.base_cache import measure_base
from eval.harness.measure import Results, evaluate_model
from eval.harness.prompting import own_template, prompt_base
from eval.models.backends import check_requests, find_backend
from eval.models.placement import Placement, on_gpu, place_model
from eval.models.target import Target, base_target, check_trained
from eval.tasks.facts import task_facts
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.output import LOG
from eval.tasks.reference import Reference, check_vocabulary, load_reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import TaskSelection, check_tasks, describe_suite
from sft.errors import EvaluationError, GateFailed
from sft.files import read_json
from sft.program import report_result
from sft.recipe.changes import differences
from sft.recipe.schema import Evaluation
from sft.run.directory import Run
from sft.run.trust import base_changes, check_final
from sft.terminal import visible_line

MOVES_NO_SCORE = {
    *("gate", "chat", "contamination", "base_cache", "processes", "parallelize", "every_steps", "every_tasks"),
    *("every_limit", "confirm_run_unsafe_code", "confirm_run_task_code"),
}
"""Keys of the `eval` section in which an evaluation may differ from the recipe's and still replace its results."""


def evaluate_run(run: Run, evaluation: Evaluation, accept_edits: bool = False) -> dict[str, str]:
    """Measure a run's base and tuned model, and write the comparison and the report.

    Returns:
        Tasks that could not be measured, and why: empty where the comparison is complete.

    Raises:
        EvaluationError: Whatever the user can fix.
        RunError: final/ is not what the training wrote, and `accept_edits` is not set.
        GateFailed: The tuned model does not pass eval.gate.
    """
    model_code = run.recipe().model.trust_remote_code
    selection = _check_tasks(evaluation, run.output_dir)
    check_trained(run)
    reference = load_reference(str(run.final), None, model_code)
    base, tuned = base_target(run, reference), Target("tuned", str(run.final), None, model_code)
    settings = resolve_settings(evaluation, selection, reference, on_gpu())
    prompting = prompt_base(settings, reference, own_template(base, settings.base_template == "own"))
    placement = _place(evaluation, reference, settings, model_code)
    _check_models(run, accept_edits)
    of_base, of_tuned = (prompting.settings, prompting.tokenizer), (settings, reference.tokenizer)
    base, tuned = find_backend(evaluation, reference.path, (base, *of_base), (tuned, *of_tuned))
    folder = _results_folder(run, evaluation, settings)
    log = _log_in(folder)
    tasks = _load_tasks(evaluation, selection, settings, log)
    check_requests(tasks, (base, *of_base), (tuned, *of_tuned))
    loaded = task_facts(settings, tasks)
    settings = replace(settings, loaded=loaded)
    prompting = replace(prompting, settings=replace(prompting.settings, loaded=loaded))
    if prompting.note:
        print(prompting.note, flush=True)
    # What a server has under a name may be another model tomorrow.
    keeps = evaluation.base_cache and settings.backend != "server"
    measure_base(base, prompting, tasks, folder / "base", log, placement, run.output_dir if keeps else None)
    sizes = read_json(folder / "base" / "results.json").get("batch_sizes_found", {})
    output = folder / "tuned"
    evaluate_model(tuned, reference.tokenizer, tasks, settings, output, log, placement, batch_sizes=sizes)
    return _compare_and_report(run, folder, evaluation, reference)


def _check_tasks(evaluation: Evaluation, output_dir: Path) -> TaskSelection:
    selection = check_tasks(evaluation, output_dir)
    if not selection.tasks:
        raise EvaluationError("There is nothing to measure: eval.tasks is empty. Name tasks: tasks=gsm8k,arc_easy")
    return selection


def _load_tasks(evaluation: Evaluation, selection: TaskSelection, settings: Settings, log: Path) -> LoadedTasks:
    if (suite := describe_suite(evaluation)) is not None:
        print(suite, flush=True)
    return load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, log)


def _place(evaluation: Evaluation, reference: Reference, settings: Settings, trust_remote_code: bool) -> Placement:
    if evaluation.backend == "server":
        return Placement(0)
    placement = place_model(
        evaluation.parallelize, evaluation.processes, reference.config, settings.dtype, trust_remote_code
    )
    if placement.spread or placement.processes > 1:
        print(f"Placement: {placement}", flush=True)
    return placement


def _check_models(run: Run, accept_edits: bool) -> None:
    """Refuse another final/ than the run's, and warn of another base model."""
    check_final(run, accept_edits)
    changes = base_changes(run)
    warning = changes and f"The base model {changes}. The comparison is with another model than training started from."
    run.warn("base", warning)
    if warning:
        print(f"Warning: {visible_line(warning)}", flush=True)


def _results_folder(run: Run, evaluation: Evaluation, settings: Settings) -> Path:
    """eval/ for the recipe's own evaluation; a folder in it for any other, which must not replace those results."""
    folder = run.comparison_file.parent
    others = other_than(run.recipe().eval, evaluation)
    if others is None:
        return folder
    other = folder / settings.hash[:12]
    print(visible_line(f"This evaluation {others}. Its results go to {other}"), flush=True)
    return other


def other_than(recipe: Evaluation, asked: Evaluation) -> str | None:
    """How an evaluation differs from the recipe's in what can move a score; None where it does not.

    >>> other_than(Evaluation(tasks=("a",)), Evaluation(tasks=("a",), limit=5, processes=2))
    'differs from the recipe in limit: null -> 5'
    """
    values = [one.model_dump(mode="json", exclude=MOVES_NO_SCORE) for one in (recipe, asked)]
    changes = differences(values[0], values[1]) if recipe.tasks or recipe.suite else []
    return f"differs from the recipe in {', '.join(map(str, changes))}" if changes else None


def _log_in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"Results cannot be written: {error}.") from None
    return folder / LOG


def _compare_and_report(run: Run, folder: Path, evaluation: Evaluation, reference: Reference) -> dict[str, str]:
    from eval.report.main import write_report

    comparison = write_comparison(run, folder, evaluation, reference.tokenizer)
    not_measured: dict[str, str] = comparison["not_measured"]
    gate = comparison["gate"]
    report_result(folder / "comparison.json")
    if folder == run.comparison_file.parent:
        measured = [read_json(folder / kind / "results.json") for kind in ("base", "tuned")]
        run.warn("tasks", *dict.fromkeys(doubt for results in measured for doubt in results.get("doubts", [])))
        passed = None if gate is None else "passed" if gate["passed"] else "failed"
        run.update(evaluation="failed" if not_measured else "finished", gate=passed)
        write_report(run)
        if "SFT_PARENT" not in os.environ:  # after a training, sft/launch/evaluation.py prints it at its end
            print(f"Report: {run.page_file}")
    else:
        print(f"Results: {folder} (the report keeps those of the recipe's own evaluation)")
    if gate is not None and not gate["passed"] and not not_measured:
        raise GateFailed(gate["failures"])
    return not_measured


def evaluate_one(model: str, evaluation: Evaluation) -> dict[str, str]:
    """Measure one model and write lm_eval's output to outputs/eval/<model>/<time>/; returns the tasks that were not measured, and why."""
    outputs = Path("outputs")
    selection = _check_tasks(evaluation, outputs)
    if model == "builtin:demo":
        from sft.hub.demo import make_demo

        model = str(make_demo(outputs).model)
    folder = Path(model).expanduser()
    target = Target(folder.resolve().name, str(folder)) if folder.is_dir() else Target(model, model)
    reference = load_reference(target.model, None, False)
    tokenizer = reference.tokenizer
    check_vocabulary(reference, reference.config, target.model)
    settings = resolve_settings(evaluation, selection, reference, on_gpu())
    placement = _place(evaluation, reference, settings, False)
    (target,) = find_backend(evaluation, reference.path, (target, settings, tokenizer))
    # Two evaluations may start within a second, and the second would replace the first one's results.
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
    output = outputs.resolve() / "eval" / target.label.replace("/", "__") / name
    log = _log_in(output.parent)
    tasks = _load_tasks(evaluation, selection, settings, log)
    check_requests(tasks, (target, settings, tokenizer))
    settings = replace(settings, loaded=task_facts(settings, tasks))
    evaluate_model(target, tokenizer, tasks, settings, output, log, placement)
    results: Results = read_json(output / "results.json")
    for line in score_lines(results):
        print(visible_line(line))
    print(f"Results: {output}")
    report_result(output / "results.json")
    failed: dict[str, str] = results["failed"]
    return failed
