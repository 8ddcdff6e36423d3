"""Measures the loss on the eval split: before the first step, at each checkpoint, and after the last step."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft.data.formats import IGNORED
from sft.data.prepared import Prepared
from sft.data.store import SequenceIndex
from sft.model.live import evaluating
from sft.parallel import process_group as distributed
from sft.run.directory import Run, read_lines
from sft.train.batches import Sequences
from sft.train.trainer import RecipeTrainer


def eval_loss_of(trainer: RecipeTrainer, run: Run, prepared: Prepared) -> EvalLoss | None:
    """The callback that measures as often as the recipe says; None if there is no eval split."""
    train, data = trainer.job.recipe.train, trainer.train_dataset
    index = SequenceIndex.load(prepared.folder / "held_out.npz")
    if not len(index):
        return None
    sequences = Sequences(data.store, index, trainer.data_parallel_ranks, data.pad_token_id, data.packed)
    return EvalLoss(trainer, sequences, train.eval_steps or trainer.job.save_steps, run)


class EvalLoss(TrainerCallback):  # type: ignore[misc]
    """Measures every so many optimizer steps (0: the first and the last), and keeps the figure for the step's line of metrics.jsonl.

    The line must be written afterwards. `sequences` are equally many for each rank, dummies among them.
    """

    def __init__(self, trainer: RecipeTrainer, sequences: Sequences, every: int, run: Run) -> None:
        self.trainer, self.sequences, self.every, self.run = trainer, sequences, every, run
        assert trainer.stopping is not None
        self.stopping = trainer.stopping
        self.figure: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model that training starts from; after a resume, where the measurement was interrupted."""
        if state.global_step == 0:
            before = self.measure()
            if before is not None and state.is_world_process_zero:
                self.run.update(held_out_loss_before=before)
                print(f"Eval loss before the first step: {before:.4f}", flush=True)
            self._track(before, state, control)
        elif self._is_due(state) and self._is_missing(state.global_step):
            self.figure = self.measure()
            self._track(self.figure, state, control)

    def _track(self, figure: float | None, state: Any, control: Any) -> None:
        """Send it to the trackers alone: without a loss it is no line of metrics.jsonl."""
        if figure is not None:
            self.trainer.callback_handler.on_log(self.trainer.args, state, control, {"eval_loss": figure})

    def _is_due(self, state: Any) -> bool:
        return state.global_step >= state.max_steps or bool(self.every and state.global_step % self.every == 0)

    def _is_missing(self, step: int) -> bool:
        lines = distributed.from_rank_0(lambda: read_lines(self.run.metrics_file))
        return any(line["step"] == step and "held_out_loss" not in line for line in lines)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where it is due, unless the training is about to stop."""
        if self._is_due(state) and not (control.should_training_stop and self.stopping.agreed):
            self.figure = self.measure()
            self._track(self.figure, state, control)
            control.should_log = True
            self.stopping.act(self.stopping.agreed, control)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Forget the figure of the step before."""
        self.figure = None

    def measure(self) -> float | None:
        """Mean loss per target token of the eval split, over all ranks; None where the training is to stop."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        # Ranks that share a batch measure the same sequences, each of them in full.
        groups, group = trainer.data_parallel_ranks, trainer.data_parallel_rank
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        with evaluating(trainer):
            for number in range(group, len(self.sequences), groups):
                if self.stopping.stops():
                    return None
                # One at a time: no padding, and every rank runs equally many passes, as ZeRO-3 needs.
                inputs = trainer._prepare_inputs(trainer.data_collator([self.sequences[number]]))
                count = (inputs["labels"] != IGNORED).sum()
                sums += torch.stack([trainer.compute_loss(trainer.model_wrapped, inputs).double() * count, count])
        loss, tokens = accelerator.reduce(sums, reduction="sum").tolist()
        return float(loss / tokens)
