"""Measures the training: metrics.jsonl, the line on the terminal and the progress bar. docs/metrics.md

The tokens and FLOPs of a step are known from the prepared data (sft/train/batches.py), over all ranks; only its time is measured.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm
from transformers.trainer_callback import TrainerCallback

from sft.model.flops import ModelFlops, model_flops
from sft.plan.hardware import Hardware
from sft.run.directory import Run, read_lines
from sft.run.training_warnings import first_loss, weights_moved
from sft.train.batches import Fingerprint, StepWork

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

_FASTEST, _SLOWEST = 1.0, 60.0
"""Seconds between lines on the terminal. Faster logging steps are only in metrics.jsonl; a slower step gets a line without a loss, which
would have to be read from all ranks."""

_SAMPLE = 1000
"""Elements of each parameter that are compared with the start."""


def peak_flops(hardware: Hardware) -> float | None:
    """Dense bf16 peak of all GPUs of the job, FLOP/s; None where unknown."""
    name = hardware.gpu.name if hardware.gpu else ""
    of_one = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return of_one * hardware.ranks if of_one is not None else None


def peak_memory_gib() -> float:
    """The most memory this rank has used: of its GPU, or of the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kibibytes / 2**20


@dataclass(frozen=True)
class StepTimes:
    """The steps since the last line."""

    seconds: list[float] = field(default_factory=list)
    """Of each step."""

    data_seconds: float = 0.0
    """Of all of them, inside the data loader's `next`."""


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Times the steps of rank 0; does nothing on other ranks.

    A step lasts from the request for its first batch until its update is done. What happens between steps does not count: eval loss,
    checkpoints, logging. On a GPU the CPU's clock would time the launching of kernels. There an event is recorded in the stream at both
    ends of a step, without waiting, and read when a line is logged: the trainer has then read the loss, so all events have happened.

    Args:
        on_gpu: Whether the steps run on a GPU.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.running = on_gpu, False
        self._began: Any = None
        self._steps: list[tuple[Any, Any]] = []
        self._data_seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start with nothing measured."""
        self.running = state.is_world_process_zero
        self._began, self._steps, self._data_seconds = None, [], 0.0

    def start(self) -> None:
        """A step begins."""
        self._began = self._mark() if self.running else None

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with the wait for each counted. The iterator can be continued afterwards."""
        return self._timed(batches) if self.running else batches

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Not `yield from`: it would close the epoch's batches together with this generator, after one step.
        while True:
            asked = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._data_seconds += time.monotonic() - asked
            yield batch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        if self._began is not None:
            self._steps.append((self._began, self._mark()))
            self._began = None

    def take(self) -> StepTimes:
        """The steps since the last call."""
        if self.on_gpu and self._steps:
            self._steps[-1][1].synchronize()
        seconds = [
            begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin  # an event counts in milliseconds
            for begin, end in self._steps
        ]
        times = StepTimes(seconds, self._data_seconds)
        self._steps, self._data_seconds = [], 0.0
        return times

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.monotonic()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _local(parameter: Any) -> Any:
    """This rank's shard of a parameter."""
    local = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3's
    return local.to_local() if hasattr(local, "to_local") else local  # FSDP2's


def sample_trained(model: Any) -> list[torch.Tensor]:
    """A few elements of each trained parameter, from this rank's shard."""
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


class Measures(Protocol):
    """A callback that measures at some steps, before the line of the step is written."""

    def take(self) -> Any:
        """The last figure, once; None where nothing was measured since."""


class Metrics(TrainerCallback):  # type: ignore[misc]
    """Writes a line each logging step, on rank 0.

    Args:
        run: Lines of metrics.jsonl after the step that training starts from are removed.
        hardware: For MFU.
        work: What each step holds.
        clock: Times the steps; must be called before this callback.
        fingerprint: The trainer's.
        measured: Further callbacks by the key of their figure, which must be called before this one; None where there is none.
    """

    def __init__(
        self,
        run: Run,
        hardware: Hardware,
        work: StepWork,
        clock: StepClock,
        fingerprint: Fingerprint,
        measured: Mapping[str, Measures | None],
    ) -> None:
        self.run, self.work, self.clock, self.fingerprint = run, work, clock, fingerprint
        self.measured = {key: callback for key, callback in measured.items() if callback is not None}
        self.peak = peak_flops(hardware)
        self.flops: ModelFlops | None = None
        self.bar: tqdm[Any] | None = None
        self.start: list[torch.Tensor] | None = None
        self.vocabulary, self.untrained = 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from, and start the clock."""
        self.started = time.monotonic()
        self.first_step = self.last_step = state.global_step
        self.shown_at, self.shown_any = self.started, False
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_lines(self.run.metrics_file) if line["step"] <= state.global_step]
        figures = self._figures()
        if kept and kept[-1]["step"] == state.global_step:
            kept[-1] |= figures
        # Of the steps between the last line and a checkpoint, only the process that trained them knew the fingerprint.
        self.knows_batches = state.global_step == (kept[-1]["step"] if kept else 0)
        self.tokens_seen = self.work.tokens_before(state.global_step)
        self.flops = model_flops(model) if self.peak is not None else None
        if state.global_step == 0:
            self.vocabulary, self.untrained = model.config.get_text_config().vocab_size, is_untrained(model)
            self.start = sample_trained(model)
        self._rewrite(kept)
        if sys.stderr.isatty():
            form = "{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt} [{elapsed} < {remaining}, {rate_fmt}]"
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", bar_format=form, leave=False)

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        """A kill in between leaves the old lines, never a part of them."""
        file = self.run.metrics_file
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        temporary.replace(file)

    def _figures(self) -> dict[str, Any]:
        taken = {key: callback.take() for key, callback in self.measured.items()}
        return {key: figure for key, figure in taken.items() if figure is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar. The last step is always logged, and so is each that is saved.

        A resumed run begins to average at its checkpoint; its lines must be those of a run that was never interrupted.
        """
        if state.global_step >= state.max_steps or (state.save_steps and state.global_step % state.save_steps == 0):
            control.should_log = True
        if self.bar is not None:
            self.bar.update(1)
        elif state.is_world_process_zero and not control.should_log and time.monotonic() - self.shown_at >= _SLOWEST:
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
            "batch": self.fingerprint.line if self.knows_batches else None,
            **self._speed(state.global_step),
            "peak_memory_gib": peak_memory_gib(),
            "seconds": time.monotonic() - self.started,
        }
        self.knows_batches = True
        if "skipped_steps" in logs:
            line["skipped_steps"] = logs["skipped_steps"]
        line |= self._figures()
        with self.run.metrics_file.open("a") as file:
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
        mfu = None
        if self.flops is not None and self.peak is not None:
            mfu = self.flops.of(work.lengths, work.target_tokens) / seconds / self.peak
        p50, p90 = np.percentile(times.seconds, [50, 90]).tolist()
        return {
            "tokens_seen": self.tokens_seen,
            "tokens_per_second": work.tokens / seconds,
            "labelled_tokens_per_second": work.target_tokens / seconds,
            "mfu": mfu,
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
        notable = {*self.measured, "skipped_steps"} & line.keys() or line["loss"] is None
        last = state.global_step >= state.max_steps
        if self.shown_any and not notable and not last and time.monotonic() - self.shown_at < _FASTEST:
            return
        self.shown_any = True
        eval_loss = f"eval loss {line['held_out_loss']:.4f}  " if "held_out_loss" in line else ""
        loss = f"{line['loss']:.4f}" if line["loss"] is not None else "none"
        mfu = f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        self._say(
            f"step {line['step']:>{len(str(state.max_steps))}}/{state.max_steps}  loss {loss}  {eval_loss}"
            f"lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s{mfu}  "
            f"ETA {_clock(self._left(line['seconds'], state))}"
        )

    def _warn(self, key: str, warning: str | None) -> None:
        self.run.warn(key, warning)
        if warning is not None:
            self._say(f"Warning: {warning}")

    def _say(self, text: str) -> None:
        self.shown_at = time.monotonic()
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


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
