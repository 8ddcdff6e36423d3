"""Measure one model through lm_eval, one task a call, so that a task that fails costs only itself."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import ranks
from eval.harness.doubts import doubts
from eval.models.backends import load_model
from eval.models.placement import BatchSizes, Found, Placement, check_placement, give_memory_back
from eval.models.target import Target
from eval.quiet import chatter_to, describe_environment_once, summary
from eval.sandbox.metric import code_metric
from eval.tasks.load import LoadedTasks, leaves
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, LostRank

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerBase

Results = dict[str, Any]
# What lm_eval logs when a prompt is longer than the context and loses its beginning.
PROMPT_CUT = (
    "Left truncation applied",
    "exceeds model's maximum length",
    "Truncating context",
    "Left truncating context",
)


def scores_of(results: Results, name: str) -> str:
    """A task's scores in a few words.

    >>> scores_of({"results": {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.1}}}, "arc")
    'acc 0.250'
    """
    scores = {
        key.split(",")[0]: value
        for key, value in results["results"].get(name, {}).items()
        if "," in key and "_stderr," not in key and isinstance(value, (int, float))
    }
    if not scores:
        return f"{len(results['results'])} results"
    return ", ".join(f"{metric} {value:.3f}" for metric, value in scores.items())


def _measure_task(model: HFLM, name: str, tasks: LoadedTasks, settings: Settings) -> Results | None:
    """lm_eval's results; None where another process has them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    describe_environment_once()
    if "langdetect" in sys.modules:  # IFEval's; it would judge one answer now so and now otherwise
        sys.modules["langdetect"].DetectorFactory.seed = settings.seed
    results: Results | None = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks.by_name[name],
        task_manager=TaskManager(include_defaults=False),  # it would index its 14,000 files for tasks that are loaded
        num_fewshot=settings.num_fewshot,
        batch_size=settings.batch_size,
        limit=settings.limit,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        random_seed=settings.seed,
        numpy_random_seed=settings.seed,
        torch_random_seed=settings.seed,
        fewshot_random_seed=settings.seed,
        confirm_run_unsafe_code=tasks.run_code,
        log_samples=True,
    )
    return results


def _measure_documents(model: HFLM, name: str, tasks: LoadedTasks, settings: Settings) -> Results | None:
    """Measure this process's documents; results on rank 0, None elsewhere."""
    number = ranks.launched()
    if number == 1:
        return _measure_task(model, name, tasks, settings)
    from eval.models.hf import fewest_documents, share_documents

    parts = leaves(tasks.by_name[name])
    # lm_eval takes a process without a document for an error.
    shared = fewest_documents(parts, settings.limit) >= number
    model.share(shared)
    if not shared:
        return _measure_task(model, name, tasks, settings) if ranks.is_first() else None
    for task in parts:
        share_documents(task)
    return _measure_task(model, name, tasks, settings)


def _measure_or_fail(
    model: HFLM, name: str, tasks: LoadedTasks, settings: Settings, log: Path
) -> tuple[Results | None, bool]:
    """A task's results, on rank 0; and whether prompts were cut on any process.

    Raises:
        TaskFailed: It failed, on this process or on another.
        LostRank: Another process is gone.
    """
    logged = log.stat().st_size
    try:
        with chatter_to(log):
            measured = _measure_documents(model, name, tasks, settings)
        cut = any(words.encode() in log.read_bytes()[logged:] for words in PROMPT_CUT)
        return measured, any(ranks.exchange(cut))
    except (ranks.TaskFailed, LostRank):
        raise
    except Exception as error:  # one task's code must not cost the hours that the others took
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        ranks.exchange(False, failure=summary(error))
        raise  # not reached


def _merge(results: Results, more: Results) -> Results:
    """The results of two calls as those of one."""
    merged = dict(results)
    for key, value in more.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) and key != "config" else value
    return merged


def _measure_all(
    model: HFLM,
    tokenizer: PreTrainedTokenizerBase,
    label: str,
    tasks: LoadedTasks,
    settings: Settings,
    log: Path,
    given: Found,
    strict: bool,
) -> Results:
    """All tasks' results, on the first process."""
    results: Results = {"failed": dict(tasks.missing), "prompts_cut": [], "batch_sizes_found": {}, "doubts": []}
    for name in tasks.by_name:
        started = time.monotonic()
        model.sizes = searches = BatchSizes(given.get(name, ()), strict)
        try:
            measured, cut = _measure_or_fail(model, name, tasks, settings, log)
        except ranks.TaskFailed as failure:
            results["failed"][name] = str(failure)
            print(f"{label}: {name} failed: {failure}", flush=True)
            continue
        if measured is None:
            continue
        documents = sum(count["effective"] for count in measured["n-samples"].values())
        seconds = time.monotonic() - started
        print(f"{label}: {documents} documents of {name} ... {scores_of(measured, name)} ({seconds:.0f} s)", flush=True)
        if cut:
            results["prompts_cut"].append(name)
            print(f"{label}: prompts of {name} that are longer than {settings.max_length} tokens lost their beginning.")
        if searches.found:
            results["batch_sizes_found"][name] = searches.found
        for doubt in _doubts(label, name, tasks, measured["samples"], tokenizer, log):
            results["doubts"].append(doubt)
            print(f"Warning: {doubt}", flush=True)
        results = _merge(results, measured)
    if len(results["failed"]) == len({*tasks.by_name, *tasks.missing}):
        raise EvaluationError(f"The {label} model could not be measured on any task; {log} says more.")
    return results


def _doubts(
    label: str, name: str, tasks: LoadedTasks, samples: dict[str, Any], tokenizer: PreTrainedTokenizerBase, log: Path
) -> list[str]:
    """What can hardly be meant in a task that was measured."""
    try:
        return doubts(leaves(tasks.by_name[name]), samples, tokenizer, label, name)
    except Exception:  # a task's own code may return anything, and the scores are there
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return []


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the other's place when all is written."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(results: Results, target: Target, settings: Settings, chat_template: str | None, folder: Path) -> None:
    """Write results.json and samples_<task>.jsonl: as lm_eval writes them, but for the time in their names."""
    from lm_eval.loggers import EvaluationTracker

    samples = results.pop("samples", {})
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    tracker.general_config_tracker.start_time -= results["seconds"]
    tracker.general_config_tracker.log_experiment_args(
        model_source=settings.backend,
        model_args={"pretrained": target.model},
        system_instruction=settings.system_instruction,
        chat_template=chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
    )
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, documents in samples.items():
        tracker.save_results_samples(task_name=name, samples=documents)
    written = list(folder.glob(f"*_{tracker.date_id}.json*"))
    if len(written) != 1 + len(samples):  # lm_eval only logs what went wrong
        raise EvaluationError(f"The results of the {target.label} model cannot be written to {folder.parent}.")
    for path in written:
        path.rename(path.with_name(path.name.replace(f"_{tracker.date_id}", "")))


def _measured_with(target: Target, settings: Settings, placement: Placement, modules: dict[str, int]) -> Results:
    """What results.json says of the model and of how it was asked."""
    measured: Results = {"model": target.model, "revision": target.revision}
    if target.served is not None:
        measured["served"] = asdict(target.served)
    return {
        "settings": asdict(settings),
        "settings_hash": settings.hash,
        "placement": asdict(placement) | {"modules": modules},
        "measured_model": measured,
    }


def evaluate_model(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    settings: Settings,
    output: Path,
    log: Path,
    placement: Placement,
    more: dict[str, Any] | None = None,
    given: Found | None = None,
    strict: bool = False,
) -> None:
    """Measure one model on every task, and put lm_eval's output in a folder: complete, or not there.

    Where several processes share the documents each of them calls this, and the first one writes.

    Args:
        target: The model.
        tokenizer: The one that every model to be compared is asked with.
        tasks: From `load_tasks`.
        settings: The same for every model to be compared.
        output: The folder; replaced where it exists. results.json has `settings`, `settings_hash`, `measured_model`,
            `failed`, `prompts_cut`, `batch_sizes_found`, `doubts` and `placement` beside lm_eval's own keys.
        log: Where the libraries' words go.
        placement: The same for every model to be compared.
        more: Further keys of results.json.
        given: Batch sizes that were found for the model to be compared with, where they are searched for.
        strict: Whether a task fails that has no memory for them.

    Raises:
        EvaluationError: The model cannot be loaded, no task can be measured, or the results cannot be written.
    """
    started = time.monotonic()
    with chatter_to(log):
        model = load_model(target, tokenizer, settings, placement)
    # lm_eval's vLLM has no model of its own where ray starts several.
    modules = check_placement(getattr(model, "model", None), placement)
    results = _measure_all(model, tokenizer, target.label, tasks, settings, log, given or {}, strict)
    # Each process has run the programs of its own documents.
    endings = ranks.collect(code_metric().take_endings() if tasks.generated_code else {})
    if not ranks.is_first():
        del model
        give_memory_back()
        return
    results |= _measured_with(target, settings, placement, modules) | {"seconds": time.monotonic() - started}
    if tasks.generated_code:
        results["generated_code"] = tasks.generated_code | {"endings": dict(sum(map(Counter, endings), Counter()))}
    results |= more or {}
    template = model.chat_template(True) if settings.apply_chat_template else None
    if settings.backend == "vllm":
        from eval.models.vllm import release

        release(model)
    del model
    give_memory_back()  # the next model needs it
    with chatter_to(log), _complete_or_absent(output) as work:
        _write(results, target, settings, template, work)
