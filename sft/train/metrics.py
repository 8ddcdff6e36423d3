"""What is measured while training: metrics.jsonl, the line on the terminal, and the bar. docs/metrics.md explains each figure.

Tokens and FLOPs of a step are known from the prepared data (sft/train/step_work.py), over all ranks; only its time is measured
(sft/train/step_clock.py).
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers.trainer_callback import TrainerCallback

from sft.model.flops import ModelFlops, model_flops
from sft.plan.hardware import Hardware
from sft.run.directory import read_lines
from sft.run.training_warnings import first_loss, weights_moved
from sft.train.eval_loss import HeldOutLoss
from sft.train.fingerprint import Fingerprint
from sft.train.spikes import Spikes
from sft.train.step_clock import StepClock
from sft.train.step_work import StepWork

# Dense bf16 peak of one GPU, FLOP/s, by the first part of its name that fits: NVIDIA's data sheets.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10G": 70e12,
}


FASTEST, SLOWEST = 1.0, 60.0
"""Seconds between lines on the terminal: logging steps that follow faster are only in metrics.jsonl, and a step that ends later than
that after the last line gets one without a loss, which would have to be read from all ranks."""


def peak_flops(hardware: Hardware) -> float | None:
    """Dense bf16 peak of all GPUs of the job, FLOP/s, or None where it is not known."""
    name = hardware.gpu.name if hardware.gpu else ""
    of_one = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return of_one * hardware.ranks if of_one is not None else None


def peak_memory_gib() -> float:
    """The most memory this rank has used: on its GPU, or of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kibibytes / 2**20


def _number(value: float | None) -> float | None:
    """What JSON has a word for."""
    return value if value is not None and math.isfinite(value) else None


def _replace(file: Path, text: str) -> None:
    """A kill in between leaves the old lines, never a part of them."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(file)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


_SAMPLE = 1000
"""Elements of each parameter that are compared with the start."""


def _local(parameter: Any) -> Any:
    """This rank's shard of a parameter."""
    local = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3's
    return local.to_local() if hasattr(local, "to_local") else local  # FSDP2's


def sample_trained(model: Any) -> list[torch.Tensor]:
    """A few elements of each parameter that is trained, of this rank's shard."""
    trained = (_local(parameter).flatten() for parameter in model.parameters() if parameter.requires_grad)
    return [flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float64, copy=True) for flat in trained]


def relative_change(before: list[torch.Tensor], after: list[torch.Tensor]) -> float | None:
    """Norm of the difference over the norm; None where nothing can be compared, as with shards that were swapped out."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old.shape == new.shape and len(old)]
    if not pairs:
        return None
    old, new = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float((new - old).norm() / new.norm()) if new.any() else 0.0


def is_untrained(model: Any) -> bool:
    """Whether the weights are those of a new model: norms and biases of one value each, which training always changes."""
    for parameter in model.parameters():
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 1:
            local = _local(parameter)
            if local.numel() and bool((local != local.flatten()[0]).any()):
                return False
    return True


class Metrics(TrainerCallback):  # type: ignore[misc]
    """Writes a line each logging step; on the first rank only.

    Args:
        file: metrics.jsonl; lines after the step that training starts from are removed.
        hardware: For the share of the peak.
        work: What each step holds.
        clock: What each step takes; a callback too, called before this one.
        fingerprint: Of the batches; the trainer's.
        held_out: Measures the held-out loss, where rows are held out.
        during: Measures tasks, where the recipe asks for that.
        warn: Keeps a warning: Run.warn.
    """

    def __init__(
        self,
        file: Path,
        hardware: Hardware,
        work: StepWork,
        clock: StepClock,
        fingerprint: Fingerprint,
        held_out: HeldOutLoss | None = None,
        during: Any = None,
        warn: Callable[..., None] = lambda key, *messages: None,
    ) -> None:
        self.warn, self.vocabulary, self.untrained = warn, 0, False
        self.file, self.work, self.clock, self.held_out = file, work, clock, held_out
        self.during = during
        self.fingerprint = fingerprint
        self.peak = peak_flops(hardware)
        self.flops: ModelFlops | None = None
        self.bar: tqdm[Any] | None = None
        self.start: list[torch.Tensor] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from, and start the clock."""
        self.started = time.monotonic()
        self.first_step = self.last_step = state.global_step
        self.shown_at, self.shown_any = self.started, False
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_lines(self.file) if line["step"] <= state.global_step]
        held_out_loss = self.held_out.take() if self.held_out else None
        if held_out_loss is not None and kept and kept[-1]["step"] == state.global_step:
            kept[-1]["held_out_loss"] = held_out_loss
        evaluation = self.during.take() if self.during else None
        if evaluation is not None and kept and kept[-1]["step"] == state.global_step:
            kept[-1]["eval"] = evaluation
        self.spikes = Spikes()
        for line in kept:
            self.spikes.sees(line.get("loss"))
        # Of the steps between the last line and a checkpoint, only what the ranks were given knew the fingerprint.
        self.told_all = state.global_step == (kept[-1]["step"] if kept else 0)
        self.tokens_seen = self.work.tokens_before(state.global_step)
        self.flops = model_flops(model) if self.peak is not None else None
        if state.global_step == 0:
            self.vocabulary, self.untrained = model.config.get_text_config().vocab_size, is_untrained(model)
            self.start = sample_trained(model)
        _replace(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        if sys.stderr.isatty():
            form = "{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt} [{elapsed} < {remaining}, {rate_fmt}]"
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", bar_format=form, leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar. The last step is logged wherever it falls, and so is each that is saved.

        A run that goes on from a checkpoint begins to average there; it must not matter whether one did.
        """
        if state.global_step >= state.max_steps or (state.save_steps and state.global_step % state.save_steps == 0):
            control.should_log = True
        if self.bar is not None:
            self.bar.update(1)
        elif state.is_world_process_zero and not control.should_log and time.monotonic() - self.shown_at >= SLOWEST:
            left = self._left(time.monotonic() - self.started, state)
            self._say(f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}  ETA {_clock(left)}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the line and show it."""
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": _number(logs["loss"]),
            "grad_norm": _number(logs.get("grad_norm")),
            "learning_rate": logs.get("learning_rate"),
            "batch": self.fingerprint.line if self.told_all else None,
            **self._speed(state.global_step),
            "peak_memory_gib": peak_memory_gib(),
            "seconds": time.monotonic() - self.started,
        }
        self.told_all = True
        if "skipped_steps" in logs:
            line["skipped_steps"] = logs["skipped_steps"]
        if self.spikes.sees(line["loss"]):
            line["spike"] = True
        held_out_loss = self.held_out.take() if self.held_out else None
        if held_out_loss is not None:
            line["held_out_loss"] = held_out_loss
        evaluation = self.during.take() if self.during else None
        if evaluation is not None:
            line["eval"] = evaluation
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._show(line, state)
        if state.global_step == 1 and self.vocabulary:
            self._warn("first_loss", first_loss(line["loss"], self.vocabulary, self.untrained))

    def _speed(self, step: int) -> dict[str, float | None]:
        """The figures of the steps since the last line."""
        work, times = self.work.between(self.last_step, step), self.clock.take()
        self.last_step = step
        self.tokens_seen += work.tokens
        seconds = sum(times.seconds)
        share = None
        if self.flops is not None and self.peak is not None:
            share = self.flops.of(work.lengths, work.labelled_tokens) / seconds / self.peak
        p50, p90 = np.percentile(times.seconds, [50, 90]).tolist()
        return {
            "tokens_seen": self.tokens_seen,
            "tokens_per_second": work.tokens / seconds,
            "labelled_tokens_per_second": work.labelled_tokens / seconds,
            "mfu": share,
            "step_seconds_p50": p50,
            "step_seconds_p90": p90,
            "data_seconds": times.data_seconds,
        }

    def _left(self, seconds: float, state: Any) -> float:
        """Seconds to the end, at the pace of this session."""
        done: int = max(1, state.global_step - self.first_step)
        left: int = state.max_steps - state.global_step
        return seconds / done * left

    def _show(self, line: dict[str, Any], state: Any) -> None:
        told = {"spike", "held_out_loss", "eval", "skipped_steps"} & line.keys() or line["loss"] is None
        last = state.global_step >= state.max_steps
        if self.shown_any and not told and not last and time.monotonic() - self.shown_at < FASTEST:
            return
        self.shown_any = True
        held_out = f"held out {line['held_out_loss']:.4f}  " if "held_out_loss" in line else ""
        loss = f"{line['loss']:.4f}" if line["loss"] is not None else "none"
        utilization = f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        text = (
            f"step {line['step']:>{len(str(state.max_steps))}}/{state.max_steps}  loss {loss}  {held_out}"
            f"lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s{utilization}  "
            f"ETA {_clock(self._left(line['seconds'], state))}"
        )
        self._say(text)
        if "spike" in line:
            self._say(f"step {line['step']}: a spike, the loss before was {self.spikes.usual:.4f} in the median")

    def _warn(self, key: str, warning: str | None) -> None:
        self.warn(key, warning)
        if warning is not None:
            self._say(f"Warning: {warning}")

    def _say(self, text: str) -> None:
        self.shown_at = time.monotonic()
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the bar away, and compare the weights with the start, where this session has trained all steps.

        The last steps alone may move too little: the schedule ends near 0.
        """
        if self.start is not None and state.global_step >= state.max_steps:
            change = relative_change(self.start, sample_trained(model))
            self._warn("weights", weights_moved(change) if change is not None else None)
        if self.bar is not None:
            self.bar.close()
            self.bar = None
