"""Evaluate during training: a small suite every so many steps, on the live model, on any engine, without effect on what is trained.

eval/during.jsonl has a line per evaluation; metrics.jsonl and the trackers have the same scores.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from eval.compare.results import finite
from eval.harness.measure import Scores, ask_lm_eval, scores
from eval.models.live_model import LeftOff, Live, language_model, undisturbed
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.output import chatter_to, summary
from eval.tasks.reference import load_reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.files import write_text
from sft.hub.pins import pinned
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.run.directory import Run, read_lines

BATCH_SIZE = 8
"""Documents per forward pass on a GPU, unless the recipe sets a number: memory beside a training is not searched."""


def evaluation_during(job: Job, run: Run, tokenizer: Any) -> Callable[[Any], During] | None:
    """Load the documents that are evaluated during training, and return what makes the callback; None where the recipe asks for none.

    Raises:
        EvaluationError: A task cannot be measured, or its documents are out of reach.
    """
    evaluation, model = job.recipe.eval.during, job.recipe.model
    if evaluation is None:
        return None
    folder = run.comparison_file.parent
    log = folder / "during.log" if distributed.is_rank_0() else Path(os.devnull)
    if distributed.is_rank_0():
        folder.mkdir(exist_ok=True)
    revision = pinned(job.recipe, job.model).model.revision
    reference = replace(load_reference(job.model.path, revision, model.trust_remote_code), tokenizer=tokenizer)
    selection = check_tasks(evaluation, Path(job.recipe.output_dir))
    settings = resolve_settings(evaluation, selection, reference, on_gpu=job.hardware.gpu is not None)
    if not isinstance(settings.batch_size, int):
        settings = replace(settings, batch_size=BATCH_SIZE)
    tasks = load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, log)
    if tasks.missing:
        raise EvaluationError(
            f"eval.every_steps: documents are out of reach that are needed now:{_listed(tasks.missing)}"
        )
    every = job.recipe.eval.every_steps
    assert every is not None
    file = folder / "during.jsonl"
    return lambda trainer: During(trainer, tasks, settings, tokenizer, every, file, log)


class During(TrainerCallback):  # type: ignore[misc]
    """Evaluates every so many steps, the first time before the first, and hands the scores to the line of metrics.jsonl of the same step.

    Must be called before the callback that writes the line. Every rank takes part. A task that fails before the first step is an error;
    later, training continues without it.
    """

    def __init__(
        self, trainer: Any, tasks: LoadedTasks, settings: Settings, tokenizer: Any, every: int, file: Path, log: Path
    ) -> None:
        self.trainer, self.tasks, self.settings, self.tokenizer = trainer, tasks, settings, tokenizer
        self.every, self.file, self.log = every, file, log
        self.figure: dict[str, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from, and evaluate where that one is missing."""
        steps = distributed.from_rank_0(lambda: self._keep(state.global_step))
        if state.global_step % self.every == 0 and state.global_step not in steps:
            self._evaluate(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate every so many steps, unless training stops now."""
        stopping = self.trainer.stopping
        if (control.should_training_stop and stopping.agreed) or state.global_step % self.every:
            return
        self._evaluate(state, control)
        control.should_log = True
        stopping.act(stopping.agreed, control)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Forget the scores of the step before."""
        self.figure = None

    def _keep(self, step: int) -> list[int]:
        """Remove the lines of later steps, which come again; returns the steps of the others."""
        kept = [line for line in read_lines(self.file) if line["step"] <= step]
        self.file.parent.mkdir(exist_ok=True)
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        return [line["step"] for line in kept]

    def _evaluate(self, state: Any, control: Any) -> None:
        """Measure all tasks, and record the scores."""
        started = time.monotonic()
        measured = self._measure_all()
        if measured is None:
            return
        found, failed = measured
        if failed and not state.global_step:
            raise EvaluationError(
                f"eval.every_steps: these cannot be measured; nothing is trained yet.{_listed(failed)}\nFix them, or leave them out of "
                f"eval.every_tasks. {self.log} says more."
            )
        self.figure = flat(found) if found else None
        # The trackers alone: without a loss it is no line of metrics.jsonl, and the trainer's own log goes into checkpoints.
        self.trainer.callback_handler.on_log(self.trainer.args, state, control, flat(found, "eval_"))
        if state.is_world_process_zero:
            self._record(state.global_step, time.monotonic() - started, found, failed)

    def _record(self, step: int, seconds: float, found: Scores, failed: dict[str, str]) -> None:
        from tqdm import tqdm

        line = {"step": step, "seconds": seconds, "results": finite(found)} | ({"failed": failed} if failed else {})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in flat(found).items())
        if shown:
            tqdm.write(f"step {step}: {shown} ({seconds:.0f} s)")  # above the bar, where there is one
        for name, reason in failed.items():
            tqdm.write(
                f"step {step}: {name} was not measured ({reason}). The training continues; {self.log} says more."
            )

    def _measure_all(self) -> tuple[Scores, dict[str, str]] | None:
        """The scores, and why which task failed, identical on all ranks; None where training is to stop."""
        found: Scores = {}
        failed: dict[str, str] = {}
        # Progress bars go to the log too: the training has one.
        with undisturbed(self.trainer.model), chatter_to(self.log), redirect_stderr(sys.stdout):
            live = Live(self.trainer, self.settings, self.tokenizer.pad_token_id)
            model = language_model(live, self.tokenizer, self.settings)
            for name in self.tasks.by_name:
                try:
                    measured, failure = self._measure(live, model, name)
                except LeftOff:
                    return None
                failures = [one for one in distributed.gather(failure) if one is not None]
                if failures:
                    failed[name] = failures[0]
                else:
                    found |= measured
        return found, failed

    def _measure(self, live: Live, model: Any, name: str) -> tuple[Scores, str | None]:
        """A task's scores; or why its code failed, which must not cost the hours of training. An error of the model is raised."""
        import torch

        try:
            results = ask_lm_eval(model, self.tasks, name, self.settings, scores_only=True)
            return scores(results.get("results", {})), None
        except LeftOff:
            raise
        except Exception as error:
            # A failed batch may be this rank's alone, which is then out of step.
            if live.answering or isinstance(error, torch.OutOfMemoryError):
                raise
            traceback.print_exc()  # to the log
            return {}, summary(error)


def flat(found: Scores, prefix: str = "") -> dict[str, float]:
    """Scores under one name each, for a tracker; lm_eval's filter `none` is left out.

    >>> flat({"arc": {"acc,none": 0.25, "acc,strict": 0.5}}, prefix="eval_")
    {'eval_arc/acc': 0.25, 'eval_arc/acc,strict': 0.5}
    """
    return {
        f"{prefix}{task}/{metric.removesuffix(',none')}": value
        for task, values in found.items()
        for metric, value in values.items()
    }


def _listed(reasons: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
