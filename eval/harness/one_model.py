"""Any one model measured by itself: a folder, or an id on the hub."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from eval.compare.tables import scores_table
from eval.harness import ranks
from eval.harness.measure import Results, evaluate_model
from eval.harness.process_group import load_tasks_together, log_in, place
from eval.harness.reference import check_vocabulary, load_reference
from eval.models.backends import Target, check_requests, find_backend
from eval.models.placement import on_gpu
from eval.tasks.facts import task_facts
from eval.tasks.settings import resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation
from sft.run.directory import read_json


def name_of(folder: Path) -> str:
    """What the results of a model are kept under; each run has a `final`, so the run's name goes before it."""
    folder = folder.resolve()
    for run in folder.parents[:2]:  # final/, checkpoints/checkpoint-N/
        if (run / "run.json").is_file():
            return f"{run.parent.name}-{run.name}-{folder.name}"
    return folder.name


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
        from sft.hub.demo import make_demo

        model = str(make_demo(outputs).model)
    folder = Path(model).expanduser()
    target = Target(name_of(folder), str(folder)) if folder.is_dir() else Target(model, model)
    reference = load_reference(target.model, None, False)
    check_vocabulary(reference, reference.config, target.model)
    settings = resolve_settings(evaluation, selection, reference, on_gpu())
    placement = place(evaluation, reference, settings, False)
    (target,) = find_backend(evaluation, reference.path, (target, settings, reference.tokenizer))
    # Two evaluations may start within a second, and the second would replace the first one's results.
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
    output = outputs.resolve() / "eval" / target.label.replace("/", "__") / name
    log = log_in(output.parent)
    tasks = load_tasks_together(selection, settings, evaluation, log)
    facts = ranks.from_first(lambda: task_facts(settings, tasks))
    check_requests(tasks, (target, settings, reference.tokenizer))
    settings = replace(settings, loaded=facts)
    evaluate_model(target, reference.tokenizer, tasks, settings, output, log, placement)
    if not ranks.is_first():
        return {}
    results: Results = read_json(output / "results.json")
    Console().print(scores_table(results))
    print(f"Results: {output}")
    failed: dict[str, str] = results["failed"]
    return failed
