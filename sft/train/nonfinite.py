"""A loss or a gradient that is NaN or infinite: found before the optimizer steps, written down, and answered as the recipe says.

Found by the norm of the gradients over all ranks, which is taken for clipping anyway: a loss that is not finite makes its gradients
NaN (sft/train/offending_samples.py), and NaN stays NaN through every reduction. So all ranks find it at the same step, and it
costs no collective; what it costs is that the norm is read from the device at each step. docs/faults.md
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from sft.errors import NonfiniteError
from sft.files import write_json
from sft.run.directory import Run
from sft.train.offending_samples import StepRows


class Rewind(Exception):
    """Go back to the last checkpoint; the step to leave out is written down."""


class Nonfinite:
    """Watches the steps of one run.

    Args:
        run: Where faults are written.
        rows: Of the steps.
        policy: `stop`, `skip` or `rewind`.
        limit: Steps that may be skipped, or rewound from, over the whole run.
        scaled: fp16: the loss scaler passes over steps whose gradients overflow, as it should.
    """

    def __init__(
        self, run: Run, rows: StepRows, policy: Literal["stop", "skip", "rewind"], limit: int, scaled: bool
    ) -> None:
        self.run, self.rows, self.policy, self.limit, self.scaled = run, rows, policy, limit, scaled
        self.skipped = 0
        """Steps since the last line whose update was left out."""
        self._batches: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None

    def begin(self, trainer: Any, batches: list[dict[str, Any]]) -> None:
        """A step begins."""
        self._batches, self._losses, self._sum = batches, [], trainer._tr_loss.clone()
        if trainer.is_deepspeed_enabled and self._left_out(trainer):
            _have_discarded(trainer.model_wrapped.optimizer)

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch."""
        self._losses.append(loss.detach())

    def _left_out(self, trainer: Any) -> bool:
        return trainer.state.global_step + 1 in trainer.step_order.left_out

    def check(self, trainer: Any, norm: Any) -> Any:
        """Called before the optimizer steps; under DeepSpeed right after, which by itself discards gradients that are not finite.

        Returns:
            The norm.

        Raises:
            NonfiniteError: The run stops here.
            Rewind: It goes back.
        """
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if self._left_out(trainer):
            self._leave_out(trainer)
            return 0.0
        if math.isfinite(value):
            return norm
        self._answer(trainer, value)
        return norm

    def take(self) -> int:
        """Steps left out since the last call."""
        skipped, self.skipped = self.skipped, 0
        return skipped

    def _leave_out(self, trainer: Any) -> None:
        """The step counts, moves the schedule, and changes nothing else."""
        if trainer.is_deepspeed_enabled:
            # It has discarded the step; the trainer, told so, would hold back the schedule too.
            trainer.model_wrapped.optimizer.overflow = False
        else:
            # AdamW passes over what has no gradient.
            trainer.optimizer.zero_grad(set_to_none=True)
        trainer._tr_loss.copy_(self._sum)
        self.skipped += 1

    def _answer(self, trainer: Any, norm: float) -> None:
        step = trainer.state.global_step + 1
        told = _gathered(self._account(trainer, step))
        if self.scaled and all(math.isfinite(loss) for one in told for loss in one["losses"]):
            return
        touched = trainer.is_deepspeed_enabled and not getattr(trainer.model_wrapped.optimizer, "overflow", False)
        before = told[0].pop("faults_before")
        stops = self.policy == "stop" or touched or len(before) >= self.limit
        answer = "stop" if stops else self.policy
        file = self.run.path / "nonfinite" / f"step-{step}.json"
        if trainer.is_world_process_zero():
            self._write(file, step, norm, told, answer, before)
        if stops:
            raise NonfiniteError(self._message(file, step, norm, told, len(before), touched))
        if self.policy == "rewind":
            _gathered(None)  # what was written is there for every rank
            raise Rewind(f"step {step}: {_what(norm, told)}. It is left out from now on: {file}")
        if trainer.is_world_process_zero():
            print(f"step {step}: {_what(norm, told)}. Its update was left out: {file}", flush=True)
        self._leave_out(trainer)

    def _account(self, trainer: Any, step: int) -> dict[str, Any]:
        """What this rank knows of the step."""
        losses = [float(loss) for loss in self._losses]
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        rows = {number: self.rows.given(self._batches[number], step) for number in bad}
        faults = {fault["step"] for fault in self.run.record.get("nonfinite", [])} - {step}
        return {
            "rank": int(trainer.accelerator.process_index),
            "losses": losses,
            "rows": rows,
            "faults_before": sorted(faults),
        }

    def _write(
        self, file: Path, step: int, norm: float, told: list[dict[str, Any]], answer: str, before: list[int]
    ) -> None:
        ranks = [
            {
                "rank": one["rank"],
                "losses": [loss if math.isfinite(loss) else str(loss) for loss in one["losses"]],
                "micro_batches": [
                    {"micro_batch": number + 1, "rows": self.rows.told(documents)}
                    for number, documents in one["rows"].items()
                ],
            }
            for one in told
        ]
        file.parent.mkdir(exist_ok=True)
        rows = self.rows.told(self.rows.of_step(step))
        write_json(
            file,
            {"step": step, "grad_norm": str(norm), "answer": answer, "ranks": ranks, "rows_of_the_step": rows},
        )
        record = self.run.record
        faults = [fault for fault in record.get("nonfinite", []) if fault["step"] != step]
        faults.append({"step": step, "answer": answer, "file": f"nonfinite/{file.name}"})
        left_out = sorted({*record.get("left_out_steps", []), *([step] if answer == "rewind" else [])})
        self.run.update(nonfinite=faults, left_out_steps=left_out)

    def _message(
        self, file: Path, step: int, norm: float, told: list[dict[str, Any]], before: int, touched: bool
    ) -> str:
        checkpoint = self.run.last_checkpoint()
        good = f"{checkpoint.name} is good" if checkpoint else "there is no checkpoint yet"
        limit = f" {before} steps have had such a fault before, train.max_nonfinite_steps={self.limit}."
        reached = limit if before >= self.limit and self.policy != "stop" else ""
        remedy = (
            "raise train.max_nonfinite_steps"
            if reached
            else "set train.on_nonfinite to skip (leave the update out) or rewind (go back to the last checkpoint and leave the rows out)"
        )
        applied = (
            "DeepSpeed has applied it all the same, as it does without ZeRO: set zero_optimization.stage to 1 or more"
            if touched
            else "Its update was not applied"
        )
        return (
            f"step {step}: {_what(norm, told)}. {applied}; {good}.{reached} Losses and rows: {file}. "
            f"Look at these rows, lower train.learning_rate, or {remedy}."
        )


def _what(norm: float, told: list[dict[str, Any]]) -> str:
    bad = [
        f"rank {one['rank']}, micro-batch {number + 1}: {loss}"
        for one in told
        for number, loss in enumerate(one["losses"])
        if not math.isfinite(loss)
    ]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        return f"the loss is not finite ({'; '.join(bad[:4])}{more})"
    return f"the norm of the gradients is {norm}, while all losses are finite"


def _gathered(mine: Any) -> list[Any]:
    """Of all ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [mine]
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    return told


def _have_discarded(optimizer: Any) -> None:
    """Have DeepSpeed's next step end as one whose gradients overflowed.

    Only there it discards gradients without a step. The norm that it takes, of ZeRO-1 and 2 by one name and of ZeRO-3 by another, is NaN
    this one time.
    """
    name = "_get_norm_groups" if hasattr(optimizer, "_get_norm_groups") else "scaled_global_norm"

    def not_a_number(*args: Any, **kwargs: Any) -> Any:
        delattr(optimizer, name)
        nan = torch.tensor(float("nan"))
        return [nan] if name == "_get_norm_groups" else nan

    setattr(optimizer, name, not_a_number)
