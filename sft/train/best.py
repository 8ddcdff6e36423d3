"""Finds the best checkpoint by the eval loss or a task's score, stops early, and gives the model that checkpoint's weights at the end.

It keeps no state: the measurements are in metrics.jsonl, which a resumed run continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.checkpoint.resume import checkpoint_fault
from sft.errors import RecipeError, did_you_mean
from sft.parallel import process_group as distributed
from sft.recipe.train import EVAL_LOSS
from sft.run.directory import Run, read_lines
from sft.train.trainer import RecipeTrainer


def best_step(scores: Mapping[int, float], larger: bool) -> int | None:
    """The step of the best score, of equal ones the first; None without a finite score.

    >>> best_step({10: 0.9, 20: 0.7, 30: float("nan"), 40: 0.7}, larger=False)
    20
    """
    finite = {step: score for step, score in scores.items() if isfinite(score)}
    return (max if larger else min)(finite, key=lambda step: finite[step], default=None)


def measurements_without_gain(scores: Mapping[int, float], larger: bool, threshold: float) -> int:
    """Measurements since the last one that was better than the best before it by more than the threshold.

    >>> measurements_without_gain({10: 0.9, 20: 0.7, 30: 0.69, 40: float("nan")}, larger=False, threshold=0.05)
    2
    """
    count, best = 0, None
    for score in scores.values():
        gains = isfinite(score) and (best is None or (score - best if larger else best - score) > threshold)
        count, best = (0, score) if gains else (count + 1, best)
    return count


class BestCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Compares each measurement with those before, on every rank alike.

    Must be called after the callbacks that measure and before the one that writes metrics.jsonl.

    Args:
        trainer: Its checkpoint of the best step is never removed.
        run: Holds metrics.jsonl.
        measured: The callbacks that measure, by their key in metrics.jsonl.
    """

    def __init__(self, trainer: RecipeTrainer, run: Run, measured: Mapping[str, Any]) -> None:
        train = trainer.job.recipe.train
        self.trainer, self.run, self.measured = trainer, run, measured
        self.metric, self.larger = train.metric_for_best_model, train.larger_is_better
        self.patience, self.threshold = train.early_stopping_patience, train.early_stopping_threshold
        self.scores: dict[int, float] = {}
        """Measurements by step, in their order."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read what was measured up to the step that training starts from, which may have been the last one already.

        Raises:
            RecipeError: No task has such a metric; found before step 1, where the tasks are measured for the first time.
        """
        lines = distributed.from_rank_0(lambda: read_lines(self.run.metrics_file))
        for line in lines:
            if 0 < line["step"] <= state.global_step:
                self._add(line["step"], {"held_out_loss": line.get("held_out_loss"), "eval": line.get("eval")})
        figures = self._figures()
        if state.global_step:
            self._add(state.global_step, figures)
        elif self.metric != EVAL_LOSS and figures["eval"] is not None and self.metric not in figures["eval"]:
            known = sorted(figures["eval"])
            raise RecipeError(
                f"train.metric_for_best_model={self.metric}: the evaluation during training measures no such metric"
                f"{did_you_mean(self.metric, known, '.')} It measures {', '.join(known)}."
            )
        self._compare(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare a new measurement."""
        if self._add(state.global_step, self._figures()):
            self._compare(state, control)

    def _figures(self) -> dict[str, Any]:
        return {key: callback.figure if callback else None for key, callback in self.measured.items()}

    def _add(self, step: int, figures: Mapping[str, Any]) -> bool:
        value = figures["held_out_loss"] if self.metric == EVAL_LOSS else (figures["eval"] or {}).get(self.metric)
        if value is not None:
            self.scores[step] = value
        return value is not None

    def _compare(self, state: Any, control: Any) -> None:
        best = best_step(self.scores, self.larger)
        self.trainer.checkpoints.protected = f"checkpoint-{best}"
        if self.patience is None or measurements_without_gain(self.scores, self.larger, self.threshold) < self.patience:
            return
        if state.is_world_process_zero and not control.should_training_stop:
            print(
                f"No better {self.name} in {self.patience} measurements (train.early_stopping_patience): the training ends after step "
                f"{state.global_step}.",
                flush=True,
            )
        control.should_training_stop = control.should_save = control.should_log = True

    @property
    def name(self) -> str:
        """The metric in words."""
        return "eval loss" if self.metric == EVAL_LOSS else self.metric

    def load(self) -> None:
        """Give the live model the weights of the best checkpoint, and record which it is. Every rank takes part."""
        last = self.trainer.state.global_step
        best = best_step(self.scores, self.larger)
        folder = self.run.checkpoints / f"checkpoint-{best}"
        lost = None
        if best is None:
            lost = f"There is no {self.name} of a checkpoint to choose by: final/ is the last step."
        elif best != last and (why := distributed.from_rank_0(lambda: _fault(folder))):
            lost = f"{folder.name} has the best {self.name}, {self.scores[best]:.4f}, and cannot be used: {why}. final/ is the last step."
        step = last if best is None or lost else best
        value = self.scores.get(step)
        if step != last:
            self.trainer.load_weights_of(folder)
        if distributed.is_rank_0():
            self.run.warn("best", lost)
            self.run.update(best={"metric": self.metric, "step": step, "value": value, "last_step": last})
            print(
                f"Warning: {lost}"
                if lost
                else f"Best {self.name}: {value:.4f} at step {step} of {last}, as final/ is.",
                flush=True,
            )


def _fault(checkpoint: Path) -> str | None:
    return checkpoint_fault(checkpoint) if checkpoint.is_dir() else "it is not there"
