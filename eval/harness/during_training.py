"""Evaluation during training: a small suite every so many steps, on the live model, on any engine.

eval/during.jsonl has a line a measurement; metrics.jsonl and the trackers have the same figures. What is trained does not depend on it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import redirect_stderr
from dataclasses import replace
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from eval.models.live_model import LeftOff, Live, language_model, undisturbed
from eval.quiet import chatter_to, summary
from eval.reference import load_reference
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.hub.pins import pinned
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.run.directory import Run

BATCH_SIZE = 8
"""Documents per forward pass on a GPU, where the recipe names no number: what is free beside a training is not searched for."""

Scores = dict[str, dict[str, float]]


def scores(results: dict[str, Any]) -> Scores:
    """Of lm_eval's results the figures, by task and by metric with its filter.

    >>> scores({"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.1, "sample_len": 3}})
    {'arc': {'acc,none': 0.25}}
    """
    found = {
        task: {
            key: float(value)
            for key, value in figures.items()
            if "," in key and "_stderr," not in key and isinstance(value, Real)  # NumPy's too
        }
        for task, figures in results.items()
    }
    return {task: figures for task, figures in found.items() if figures}


def flat(found: Scores, prefix: str = "", between: str = "/") -> dict[str, float]:
    """As single figures for a tracker; lm_eval's filter `none` is left out.

    >>> flat({"arc": {"acc,none": 0.25, "acc,strict": 0.5}}, prefix="eval_")
    {'eval_arc/acc': 0.25, 'eval_arc/acc,strict': 0.5}
    """
    return {
        f"{prefix}{task}{between}{metric.removesuffix(',none')}": value
        for task, figures in found.items()
        for metric, value in figures.items()
    }


class During(TrainerCallback):  # type: ignore[misc]
    """Measures, and hands the figures to the line of metrics.jsonl that is written at the same step.

    Must be called before the callback that writes the line. Every rank takes part.

    Args:
        tasks: With their documents.
        settings: The same for each measurement.
        tokenizer: The run's.
        every: Optimizer steps between measurements; one comes before the first step.
        file: during.jsonl.
        log: Where the libraries' words go; of the first rank.

    Raises:
        EvaluationError: In the measurement before the first step: a task fails. Later the training goes on without it.
    """

    def __init__(
        self, tasks: LoadedTasks, settings: Settings, tokenizer: Any, every: int, file: Path, log: Path
    ) -> None:
        self.tasks, self.settings, self.tokenizer, self.every = tasks, settings, tokenizer, every
        self.file, self.log = file, log
        self.trainer: Any = None
        self.latest: Scores | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from, and measure where one is missing."""
        steps = distributed.from_first_rank(lambda: self._keep(state.global_step))
        if state.global_step % self.every == 0 and state.global_step not in steps:
            self._measure(state, control)

    def _keep(self, step: int) -> list[int]:
        """Remove the lines of later steps, which come again; returns the steps of the others."""
        kept = []
        for text in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:  # the last may have been cut off
                continue
            kept += [line] if line["step"] <= step else []
        self.file.parent.mkdir(exist_ok=True)
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.file)
        return [line["step"] for line in kept]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where it is time, and where it is not to stop."""
        stopping = self.trainer.stopping
        if (control.should_training_stop and stopping.agreed) or state.global_step % self.every:
            return
        self._measure(state, control)
        control.should_log = True
        stopping.act(stopping.agreed, control)

    def take(self) -> dict[str, float] | None:
        """The last figures, once."""
        latest, self.latest = self.latest, None
        return flat(latest) if latest is not None else None

    def _measure(self, state: Any, control: Any) -> None:
        started = time.monotonic()
        measured = self.measure()
        if measured is None:
            return
        found, failed = measured
        if failed and not state.global_step:
            raise EvaluationError(_told_before_training(failed, self.log))
        self.latest = found or None
        # The trackers alone: without a loss it is no line of metrics.jsonl, and the trainer's own log goes into checkpoints.
        self.trainer.callback_handler.on_log(self.trainer.args, state, control, flat(found, "eval_"))
        if not state.is_world_process_zero:
            return
        finite = {  # JSON has no infinity
            task: {metric: value if isfinite(value) else None for metric, value in figures.items()}
            for task, figures in found.items()
        }
        line = {"step": state.global_step, "seconds": time.monotonic() - started, "results": finite}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | ({"failed": failed} if failed else {})) + "\n")
        if found:
            figures = ", ".join(f"{name} {value:.3f}" for name, value in flat(found, between=" ").items())
            self._say(f"step {state.global_step}: {figures} ({line['seconds']:.0f} s)")
        for name, reason in failed.items():
            self._say(
                f"step {state.global_step}: {name} was not measured ({reason}). The training goes on; {self.log} says more."
            )

    def _say(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text)  # above the bar, where there is one

    def measure(self) -> tuple[Scores, dict[str, str]] | None:
        """The figures, and why which task failed, alike on all ranks; None where the training is to stop."""
        found: Scores = {}
        failed: dict[str, str] = {}
        # Also its bars: the training has one.
        with undisturbed(self.trainer.model), chatter_to(self.log), redirect_stderr(sys.stdout):
            live = Live(self.trainer, self.settings, self.tokenizer.pad_token_id)
            model = language_model(live, self.tokenizer, self.settings)
            for name in self.tasks.by_name:
                try:
                    measured, failure = self._measure_task(live, model, name)
                except LeftOff:
                    return None
                failures = [one for one in distributed.gather(failure) if one is not None]
                if failures:
                    failed[name] = failures[0]
                else:
                    found |= measured
        return found, failed

    def _measure_task(self, live: Live, model: Any, name: str) -> tuple[Scores, str | None]:
        """A task's figures; or why its code failed, which must not cost the hours of training. An error of the model is raised."""
        import torch

        try:
            return scores(_ask(model, self.tasks, name, self.settings)["results"]), None
        except LeftOff:
            raise
        except Exception as error:
            # It may be this rank's alone, which is then no longer in step.
            if live.answering or isinstance(error, torch.OutOfMemoryError):
                raise
            traceback.print_exc()  # to the log
            return {}, summary(error)


def _told_before_training(failed: dict[str, str], log: Path) -> str:
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
    return (
        f"eval.every_steps: these cannot be measured; nothing is trained yet.{reasons}\nMend them, or leave them out of eval.every_tasks. "
        f"{log} says more."
    )


def _ask(model: Any, tasks: LoadedTasks, name: str, settings: Settings) -> dict[str, Any]:
    """lm_eval's results of a task: as its simple_evaluate makes them, without the seconds that it takes to describe the machine."""
    import random

    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    loaded = TaskManager(include_defaults=False).load(tasks.by_name[name])
    for task in loaded["tasks"].values():
        few = task.get_config("num_fewshot")
        if settings.num_fewshot is not None and few != 0:
            task.set_config("num_fewshot", settings.num_fewshot)
        elif few is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed=settings.seed)
    results: dict[str, Any] = evaluate(
        lm=model,
        task_dict=loaded,
        limit=settings.limit,
        bootstrap_iters=0,
        log_samples=False,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        confirm_run_unsafe_code=tasks.run_code,
    )
    return results


def evaluation_during(job: Job, run: Run, tokenizer: Any) -> During | None:
    """What measures during the training, its documents loaded; None where the recipe asks for none.

    Raises:
        EvaluationError: A task cannot be measured.
    """
    evaluation, model = job.recipe.eval.during, job.recipe.model
    if evaluation is None:
        return None
    folder = run.comparison_file.parent
    log = folder / "during.log" if distributed.is_first_rank() else Path(os.devnull)
    if distributed.is_first_rank():
        folder.mkdir(exist_ok=True)
    reference = replace(
        load_reference(job.model.path, pinned(job.recipe, job.model).model.revision, model.trust_remote_code),
        tokenizer=tokenizer,
    )
    selection = check_tasks(evaluation, Path(job.recipe.output_dir))
    settings = resolve_settings(evaluation, selection, reference, on_gpu=job.hardware.gpu is not None)
    if not isinstance(settings.batch_size, int):
        settings = replace(settings, batch_size=BATCH_SIZE)
    tasks = load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, log)
    if tasks.missing:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in tasks.missing.items())
        raise EvaluationError(f"eval.every_steps: the documents cannot be reached, and they are needed now:{reasons}")
    every = job.recipe.eval.every_steps
    assert every is not None
    return During(tasks, settings, tokenizer, every, folder / "during.jsonl", log)
