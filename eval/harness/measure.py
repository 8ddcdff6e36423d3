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
from numbers import Real
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
Scores = dict[str, dict[str, float]]
"""By task, then by metric with its filter."""

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
    given: Found | None = None,
    strict: bool = False,
) -> None:
    """Measure one model on every task, and write lm_eval's output to a folder: complete or absent.

    Where several processes share the documents each of them calls this, and rank 0 writes.

    Args:
        target: The model.
        tokenizer: The one that makes the prompts of every model in the comparison.
        tasks: From `load_tasks`.
        settings: The same for every model in the comparison.
        output: The folder, which is replaced. Its results.json has `settings`, `settings_hash`, `measured_model`,
            `failed`, `prompts_cut`, `batch_sizes_found`, `doubts` and `placement` beside lm_eval's own keys.
        log: Where the libraries' output goes.
        placement: The same for every model in the comparison.
        more: Further keys of results.json.
        given: The batch sizes that were found for the base model.
        strict: Whether a task fails that has no memory for them.

    Raises:
        EvaluationError: The model cannot be loaded, no task can be measured, or the results cannot be written.
    """
    started = time.monotonic()
    with chatter_to(log):
        model = load_model(target, tokenizer, settings, placement)
    # lm_eval's vLLM has no model of its own where ray starts several.
    modules = check_placement(getattr(model, "model", None), placement)
    results = Measurement(model, target.label, tokenizer, tasks, settings, log).run(given or {}, strict)
    # Each process has run the programs of its own documents.
    endings = ranks.collect(code_metric().take_endings() if tasks.generated_code else {})
    if ranks.is_first():
        measured: Results = {"model": target.model, "revision": target.revision}
        if target.served is not None:
            measured["served"] = asdict(target.served)
        results |= {
            "settings": asdict(settings),
            "settings_hash": settings.hash,
            "placement": asdict(placement) | {"modules": modules},
            "measured_model": measured,
            "seconds": time.monotonic() - started,
        }
        if tasks.generated_code:
            results["generated_code"] = tasks.generated_code | {"endings": dict(sum(map(Counter, endings), Counter()))}
        results |= more or {}
        template = model.chat_template(True) if settings.apply_chat_template else None
        if settings.backend == "vllm":
            from eval.models.vllm import release

            release(model)
        with chatter_to(log), _complete_or_absent(output) as work:
            _write(results, target, settings, template, work)
    del model
    give_memory_back()  # the next model needs it


class Measurement:
    """One loaded model, measured on all tasks.

    Args:
        model: lm_eval's.
        label: How lines on the terminal begin: base, tuned.
        tokenizer: What makes the prompts.
        tasks: From `load_tasks`.
        settings: Of the evaluation.
        log: Where the libraries' output goes.
    """

    def __init__(
        self,
        model: HFLM,
        label: str,
        tokenizer: PreTrainedTokenizerBase,
        tasks: LoadedTasks,
        settings: Settings,
        log: Path,
    ) -> None:
        self.model, self.label, self.tokenizer = model, label, tokenizer
        self.tasks, self.settings, self.log = tasks, settings, log

    def run(self, given: Found, strict: bool) -> Results:
        """All tasks' results, on rank 0.

        Args:
            given: The batch sizes to follow, by task.
            strict: Whether a task fails that has no memory for them.

        Raises:
            EvaluationError: No task could be measured.
        """
        missing = self.tasks.missing
        results: Results = {"failed": dict(missing), "prompts_cut": [], "batch_sizes_found": {}, "doubts": []}
        for name in self.tasks.by_name:
            started = time.monotonic()
            self.model.sizes = sizes = BatchSizes(given.get(name, ()), strict)
            try:
                measured, cut = self._measure(name)
            except ranks.TaskFailed as failure:
                results["failed"][name] = str(failure)
                self._say(f"{name} failed: {failure}")
                continue
            if measured is None:
                continue
            documents = sum(count["effective"] for count in measured["n-samples"].values())
            seconds = time.monotonic() - started
            self._say(f"{documents} documents of {name} ... {_shown(measured, name)} ({seconds:.0f} s)")
            if cut:
                results["prompts_cut"].append(name)
                self._say(
                    f"prompts of {name} that are longer than {self.settings.max_length} tokens lost their beginning."
                )
            if sizes.found:
                results["batch_sizes_found"][name] = sizes.found
            for doubt in self._doubts(name, measured["samples"]):
                results["doubts"].append(doubt)
                print(f"Warning: {doubt}", flush=True)
            for key, value in measured.items():  # the results of two calls as those of one
                merges = isinstance(value, dict) and key != "config"
                results[key] = {**results.get(key, {}), **value} if merges else value
        if len(results["failed"]) == len({*self.tasks.by_name, *missing}):
            raise EvaluationError(f"The {self.label} model could not be measured on any task; {self.log} says more.")
        return results

    def _say(self, text: str) -> None:
        print(f"{self.label}: {text}", flush=True)

    def _measure(self, name: str) -> tuple[Results | None, bool]:
        """A task's results, on rank 0; and whether prompts were cut on any process.

        Raises:
            TaskFailed: It failed, on this process or on another.
            LostRank: Another process is gone.
        """
        logged = self.log.stat().st_size
        try:
            with chatter_to(self.log):
                measured = self._measure_documents(name)
            cut = any(words.encode() in self.log.read_bytes()[logged:] for words in PROMPT_CUT)
            return measured, any(ranks.exchange(cut))
        except (ranks.TaskFailed, LostRank):
            raise
        except Exception as error:  # one task's code must not cost the hours that the others took
            self._log_traceback()
            ranks.exchange(False, failure=summary(error))
            raise  # not reached

    def _measure_documents(self, name: str) -> Results | None:
        """Measure this process's documents; results on rank 0, None elsewhere."""
        number = ranks.launched()
        if number > 1:
            from eval.models.hf import fewest_documents, share_documents

            parts = leaves(self.tasks.by_name[name])
            # lm_eval takes a process without a document for an error.
            shared = fewest_documents(parts, self.settings.limit) >= number
            self.model.share(shared)
            if not shared and not ranks.is_first():
                return None
            for task in parts if shared else ():
                share_documents(task)
        return self._ask_lm_eval(name)

    def _ask_lm_eval(self, name: str) -> Results | None:
        import lm_eval
        from lm_eval.tasks import TaskManager

        describe_environment_once()
        settings = self.settings
        if "langdetect" in sys.modules:  # IFEval's; it would judge one answer differently from run to run
            sys.modules["langdetect"].DetectorFactory.seed = settings.seed
        results: Results | None = lm_eval.simple_evaluate(
            model=self.model,
            tasks=self.tasks.by_name[name],
            task_manager=TaskManager(include_defaults=False),  # it would index its 14,000 files for loaded tasks
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
            confirm_run_unsafe_code=self.tasks.run_code,
            log_samples=True,
        )
        return results

    def _doubts(self, name: str, samples: dict[str, Any]) -> list[str]:
        """What can hardly be meant in a task that was measured."""
        try:
            return doubts(leaves(self.tasks.by_name[name]), samples, self.tokenizer, self.label, name)
        except Exception:  # a task's own code may return anything, and the scores are there
            self._log_traceback()
            return []

    def _log_traceback(self) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)


def _shown(results: Results, name: str) -> str:
    """A task's scores in a few words."""
    found = scores(results["results"]).get(name, {})
    figures = ", ".join(f"{metric.split(',')[0]} {value:.3f}" for metric, value in found.items())
    return figures or f"{len(results['results'])} results"


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder to write to, which replaces the other when everything is written."""
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
