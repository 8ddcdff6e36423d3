"""Writes a line of metrics.jsonl each logging step, and shows it on the terminal. docs/metrics.md"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from tqdm import tqdm
from transformers.trainer_callback import TrainerCallback

from sft.files import write_text
from sft.model.live import is_untrained, relative_change, sample_trained
from sft.plan.hardware import Hardware
from sft.run.directory import Run, read_lines
from sft.run.training_warnings import first_loss, weights_moved
from sft.train.speed import peak_flops, speed
from sft.train.trainer import RecipeTrainer

_FASTEST = 1.0
"""Seconds between lines on the terminal. Faster logging steps are only in metrics.jsonl."""


class Metrics(TrainerCallback):  # type: ignore[misc]
    """Writes on rank 0. Lines of metrics.jsonl after the step that training starts from are removed.

    `measured`: further callbacks by the key of their figure, which must be called before this one.
    """

    def __init__(self, trainer: RecipeTrainer, run: Run, hardware: Hardware, measured: Mapping[str, Any]) -> None:
        self.trainer, self.run, self.peak = trainer, run, peak_flops(hardware)
        self.measured = {key: callback for key, callback in measured.items() if callback is not None}
        self.bar: tqdm[Any] | None = None
        self.start: list[torch.Tensor] | None = None
        self.vocabulary, self.untrained = 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from."""
        self.started = self.shown_at = time.monotonic()
        self.first_step, self.shown_any = state.global_step, False
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_lines(self.run.metrics_file) if line["step"] <= state.global_step]
        figures = self._figures()
        if kept and kept[-1]["step"] == state.global_step:
            kept[-1] |= figures
        if state.global_step == 0:
            self.vocabulary, self.untrained = model.config.get_text_config().vocab_size, is_untrained(model)
            self.start = sample_trained(model)
        write_text(self.run.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))
        if sys.stderr.isatty():
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", leave=False)

    def _figures(self) -> dict[str, Any]:
        return {key: callback.figure for key, callback in self.measured.items() if callback.figure is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the line and show it."""
        work = self.trainer.work.line
        if not state.is_world_process_zero or logs is None or "loss" not in logs or work is None:
            return
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": _number(logs["loss"]),
            "grad_norm": _number(logs.get("grad_norm")),
            "learning_rate": logs.get("learning_rate"),
            "batch": work.fingerprint,
            "tokens_seen": state.num_input_tokens_seen,
            **speed(work, *self.trainer.clock.take(), self.peak),
            **dict(zip(("peak_memory_gib", "peak_reserved_gib"), work.peaks, strict=True)),
            "seconds": time.monotonic() - self.started,
            **self.trainer.of_engine(),
        }
        if "skipped_steps" in logs:
            line["skipped_steps"] = logs["skipped_steps"]
        line |= self._figures()
        with self.run.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._show(line, state)
        if state.global_step == 1 and self.vocabulary:
            self._warn("first_loss", first_loss(line["loss"], self.vocabulary, self.untrained))

    def _show(self, line: dict[str, Any], state: Any) -> None:
        notable = {*self.measured, "skipped_steps"} & line.keys() or line["loss"] is None
        last = state.global_step >= state.max_steps
        if self.shown_any and not notable and not last and time.monotonic() - self.shown_at < _FASTEST:
            return
        self.shown_any, self.shown_at = True, time.monotonic()
        eval_loss = f"eval loss {line['held_out_loss']:.4f}  " if "held_out_loss" in line else ""
        loss = f"{line['loss']:.4f}" if line["loss"] is not None else "none"
        mfu = f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        # At the pace of this session.
        left = line["seconds"] / (state.global_step - self.first_step) * (state.max_steps - state.global_step)
        self._say(
            f"step {line['step']:>{len(str(state.max_steps))}}/{state.max_steps}  loss {loss}  {eval_loss}"
            f"lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s{mfu}  ETA {timedelta(seconds=int(left))}"
        )

    def _warn(self, key: str, warning: str | None) -> None:
        self.run.warn(key, warning)
        if warning is not None:
            self._say(f"Warning: {warning}")

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Remove the bar, and compare the weights with the start where this session trained all steps.

        The last steps alone may move too little: the schedule ends near 0.
        """
        if self.start is not None and state.global_step >= state.max_steps:
            change = relative_change(self.start, sample_trained(model))
            self._warn("weights", weights_moved(change) if change is not None else None)
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _number(value: float | None) -> float | None:
    """None for what JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
