"""Measures one model through lm_eval, one task a call, so that a task that fails costs only itself."""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from eval.models.backends import load_model
from eval.models.placement import Placement, give_memory_back
from eval.models.target import Target
from eval.tasks.load import LoadedTasks, leaves
from eval.tasks.output import chatter_to, summary
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, LostRank

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

Results = dict[str, Any]
Scores = dict[str, dict[str, float]]
"""By task, then by metric with its filter."""


FEWEST_ANSWERS = 5
"""Answers below which a share of them says little."""

SHORT_ANSWER = 8
"""Tokens of an answer that may be meant to end at its limit, as a letter does."""

# lm_eval logs one of these when a prompt is longer than the context and loses its beginning.
PROMPT_CUT = (
    "Left truncation applied",
    "exceeds model's maximum length",
    "Truncating context",
    "Left truncating context",
)


def scores(results: Results) -> Scores:
    """The scores among lm_eval's results.

    >>> scores({"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.1, "sample_len": 3}})
    {'arc': {'acc,none': 0.25}}
    """
    found = {
        task: {
            key: float(value)
            for key, value in values.items()
            if "," in key and "_stderr," not in key and isinstance(value, Real)  # NumPy's too
        }
        for task, values in results.items()
    }
    return {task: values for task, values in found.items() if values}


def evaluate_model(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    settings: Settings,
    output: Path,
    log: Path,
    placement: Placement,
    more: dict[str, Any] | None = None,
    batch_sizes: Mapping[str, list[int]] | None = None,
) -> None:
    """Measure one model on every task, and write lm_eval's output, with keys of ours, to a folder: complete or absent.

    Args:
        target: The model.
        tokenizer: As all models of the comparison have it, like tasks, settings and placement.
        tasks: Loaded.
        settings: What can move a score.
        output: The folder.
        log: Where lm_eval's own output goes.
        placement: Where the layers go.
        more: Further keys of results.json.
        batch_sizes: Of the base model, which the tuned one follows: `batch_sizes_found` of its results.json.

    Raises:
        EvaluationError: The model cannot be loaded, no task can be measured, or the results cannot be written.
        LostRank: A process that shares the documents is gone.
    """
    started = time.monotonic()
    with chatter_to(log):
        model = load_model(target, tokenizer, settings, placement)
    results: Results = {
        "settings": asdict(settings),
        "settings_hash": settings.hash,
        "placement": asdict(placement),
        "measured_model": {"model": target.model, "revision": target.revision},
        **(more or {}),
    }
    if target.served is not None:
        results["measured_model"]["served"] = asdict(target.served)
    results |= _measure_all(model, target, tokenizer, tasks, settings, log, batch_sizes or {})
    if tasks.generated_code:
        results["generated_code"] = tasks.generated_code
    results["seconds"] = time.monotonic() - started
    template = model.chat_template(True) if settings.apply_chat_template else None
    with chatter_to(log), complete_or_absent(output) as work:
        _write(results, target, settings, template, work)
    if settings.backend == "hf":
        model.close()
    del model
    give_memory_back()  # the next model needs it


def _measure_all(
    model: Any,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    settings: Settings,
    log: Path,
    batch_sizes: Mapping[str, list[int]],
) -> Results:
    """Measure every task; `failed` has those that could not be measured, and why."""
    failed, cut, sizes, doubtful = dict(tasks.missing), list[str](), dict[str, list[int]](), list[str]()
    results: Results = {}
    label, in_batches = target.label, settings.backend == "hf"
    for name in tasks.by_name:
        started, logged = time.monotonic(), log.stat().st_size
        if in_batches:
            model.follow(batch_sizes.get(name, ()))
        try:
            with chatter_to(log):
                measured = ask_lm_eval(model, tasks, name, settings)
        except LostRank:
            raise
        except Exception as error:  # one task's code must not cost the hours that the others took
            _log_traceback(log)
            failed[name] = summary(error)
            print(f"{label}: {name} failed: {failed[name]}", flush=True)
            continue
        documents = sum(count["effective"] for count in measured["n-samples"].values())
        figures = f"{_shown(measured, name)} ({time.monotonic() - started:.0f} s)"
        print(f"{label}: {documents} documents of {name} ... {figures}", flush=True)
        if any(words.encode() in log.read_bytes()[logged:] for words in PROMPT_CUT):
            cut.append(name)
            print(
                f"{label}: prompts of {name} longer than {settings.max_length} tokens lost their beginning.", flush=True
            )
        if in_batches and (found := model.sizes_found()):
            sizes[name] = found
        if label != "base":  # which seldom stops: that is what training teaches
            try:
                doubt = _cut_off(leaves(tasks.by_name[name]), measured["samples"], tokenizer, name)
                doubtful += [f"{label}: {doubt}"] if doubt else []
            except Exception:  # a task's own code may return anything, and the scores are there
                _log_traceback(log)
        for key, value in measured.items():  # the results of two calls as those of one
            merges = isinstance(value, dict) and key != "config"
            results[key] = {**results.get(key, {}), **value} if merges else value
    if not results:
        raise EvaluationError(f"The {label} model could not be measured on any task; {log} says more.")
    for doubt in doubtful:
        print(f"Warning: {doubt}", flush=True)
    return results | {"failed": failed, "prompts_cut": cut, "batch_sizes_found": sizes, "doubts": doubtful}


def _cut_off(
    tasks: Sequence[ConfigurableTask],
    samples: dict[str, list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> str | None:
    """A sentence where most answers to a task, group or tag reach max_gen_toks; else None."""
    number = cut = 0
    for task in tasks:
        limit = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
        if task.get_config("output_type") != "generate_until" or limit < SHORT_ANSWER:
            continue
        of_task = samples[str(task.task_name)]
        # lm_eval has one sample for each filter.
        answers = [str(one["resps"][0][0]) for one in of_task if one["filter"] == of_task[0]["filter"]] or [""]
        number += len(answers)
        # An answer's text may have fewer tokens than were generated.
        cut += sum(len(ids) > 0.9 * limit for ids in tokenizer(answers, add_special_tokens=False)["input_ids"])
    if number < FEWEST_ANSWERS or cut <= number / 2:
        return None
    return (
        f"{cut} of {number} answers to {name} are cut off at max_gen_toks. Raise eval.max_gen_toks, or see whether the model stops at "
        "all (docs/chat.md)."
    )


def _log_traceback(log: Path) -> None:
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exc(file=file)


def ask_lm_eval(model: Any, tasks: LoadedTasks, name: str, settings: Settings, scores_only: bool = False) -> Results:
    """Have lm_eval measure one task, group or tag; the results are empty on a rank whose LOCAL_RANK is not 0.

    `scores_only` leaves out the samples, the standard errors and the description of the machine, which takes seconds.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager
    from torch.utils import collect_env

    describe_machine = collect_env.get_pretty_env_info
    if not hasattr(describe_machine, "cache_info"):  # it runs pip, lscpu and others after each task
        collect_env.get_pretty_env_info = cache((lambda: "") if scores_only else describe_machine)
    if "langdetect" in sys.modules:  # IFEval's; it would judge one answer differently from run to run
        sys.modules["langdetect"].DetectorFactory.seed = settings.seed
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    results: Results | None = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks.by_name[name],
        task_manager=TaskManager(include_defaults=False),  # it would index its 14,000 files for loaded tasks
        num_fewshot=settings.num_fewshot,
        batch_size=settings.batch_size,
        limit=settings.limit,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        confirm_run_unsafe_code=tasks.run_code,
        log_samples=not scores_only,
        bootstrap_iters=0 if scores_only else 100_000,
        **dict.fromkeys(seeds, settings.seed),
    )
    return results or {}


def _shown(results: Results, name: str) -> str:
    """A task's scores in a few words."""
    found = scores(results["results"]).get(name, {})
    figures = ", ".join(f"{metric.split(',')[0]} {value:.3f}" for metric, value in found.items())
    return figures or f"{len(results['results'])} results"


@contextmanager
def complete_or_absent(folder: Path, replace: bool = True) -> Iterator[Path]:
    """A folder to write to, which replaces the other when everything is written."""
    # Not named by the process id: containers that share a disk have the same ones.
    work = folder.with_name(f".{folder.name}.{uuid4().hex}")
    work.mkdir(parents=True)
    try:
        yield work
        if replace:
            shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(results: Results, target: Target, settings: Settings, chat_template: str | None, folder: Path) -> None:
    """Write results.json and samples_<task>.jsonl as lm_eval writes them, but for the time in their names."""
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
