"""What is measured while training: metrics.jsonl, the line on the terminal, and the bar.

Tokens are counted as the trainer feeds them, padding left out, over all ranks.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.trainer_callback import TrainerCallback

from sft.hardware import Hardware
from sft.held_out import HeldOutLoss

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


def model_flops_utilization(
    parameters: int, tokens_per_second: float, hardware: Hardware, all_trained: bool
) -> float | None:
    """Share of the GPUs' bf16 peak that the model's own arithmetic used.

    6 FLOPs a parameter and token (4 where the weights are frozen). Attention's share is left out, so long documents are
    understated; recomputation does not count as work.

    Args:
        parameters: Of the model, the embedding included once.
        tokens_per_second: Over all GPUs.
        hardware: Names the GPU.
        all_trained: False under LoRA.

    Returns:
        0 to 1, or None where the GPU's peak is not known.
    """
    name = hardware.gpu.name if hardware.gpu else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    if peak is None:
        return None
    return (6 if all_trained else 4) * parameters * tokens_per_second / (peak * hardware.ranks)


def peak_memory_gib() -> float:
    """The most memory this rank has used: on its GPU, or of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kibibytes / 2**20


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class Metrics(TrainerCallback):  # type: ignore[misc]
    """Writes a line each logging step; on the first rank only.

    Args:
        file: metrics.jsonl; lines after the step that training starts from are removed.
        hardware: For the share of the peak.
        all_trained: False under LoRA.
        held_out: Measures the held-out loss, where rows are held out.
    """

    def __init__(self, file: Path, hardware: Hardware, all_trained: bool, held_out: HeldOutLoss | None = None) -> None:
        self.file, self.hardware, self.all_trained, self.held_out = file, hardware, all_trained, held_out
        self.bar: tqdm[Any] | None = None
        self.tokens_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from, and start the clock."""
        self.started = self.last_time = time.monotonic()
        self.first_step, self.last_tokens = state.global_step, 0
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) if model is not None else 0
        if not state.is_world_process_zero:
            return
        kept = [line for line in self._lines() if line["step"] <= state.global_step]
        self.tokens_before = kept[-1]["tokens_seen"] if kept else 0
        self.file.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if sys.stderr.isatty():
            form = "{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt} [{elapsed} < {remaining}, {rate_fmt}]"
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", bar_format=form, leave=False)

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for text in self.file.read_text().splitlines() if self.file.exists() else []:
            with suppress(ValueError):  # the last may have been cut off
                lines.append(json.loads(text))
        return lines

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar. The last step is logged wherever it falls, and so is each that is saved.

        A run that goes on from a checkpoint begins to average there; it must not matter whether one did.
        """
        if state.global_step >= state.max_steps or (state.save_steps and state.global_step % state.save_steps == 0):
            control.should_log = True
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the line and show it."""
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        now = time.monotonic()
        tokens = int(logs.get("num_tokens", 0))
        rate = (tokens - self.last_tokens) / max(now - self.last_time, 1e-9)
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens_seen": self.tokens_before + tokens,
            "tokens_per_second": rate,
            "mfu": model_flops_utilization(self.parameters, rate, self.hardware, self.all_trained),
            "peak_memory_gib": peak_memory_gib(),
            "seconds": now - self.started,
        }
        held_out_loss = self.held_out.take() if self.held_out else None
        if held_out_loss is not None:
            line["held_out_loss"] = held_out_loss
        self.last_time, self.last_tokens = now, tokens
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._show(line, state)

    def _show(self, line: dict[str, Any], state: Any) -> None:
        done = max(1, state.global_step - self.first_step)
        left = line["seconds"] / done * (state.max_steps - state.global_step)
        held_out = f"held out {line['held_out_loss']:.4f}  " if "held_out_loss" in line else ""
        utilization = f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        text = (
            f"step {line['step']:>{len(str(state.max_steps))}}/{state.max_steps}  loss {line['loss']:.4f}  {held_out}"
            f"lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s{utilization}  ETA {_clock(left)}"
        )
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
