"""Measures the loss on the eval split: before the first step, at each checkpoint, and after the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sft.data.store import DocumentStore, SequenceIndex
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.run.directory import Run, read_lines
from sft.train.batches import Sequences
from sft.train.stopping import Stopping
from sft.train.trainer import NeedsTrainer


def load_eval_loss(
    job: Job, run: Run, folder: Path, store: DocumentStore, pad_token_id: int, stopping: Stopping
) -> EvalLoss | None:
    """The measurement that the recipe asks for; None where there is no eval split.

    Args:
        job: With its data counted.
        run: Its folder.
        folder: Of the prepared data.
        store: Its documents.
        pad_token_id: The tokenizer's.
        stopping: The training's.
    """
    index, train = SequenceIndex.load(folder / "held_out.npz"), job.recipe.train
    if not len(index):
        return None
    ranks = job.plan.data_parallel_ranks.value
    sequences = Sequences(store, index, ranks, pad_token_id, job.recipe.data.packing)
    return EvalLoss(sequences, train.eval_steps or train.save_steps, run, stopping)


class EvalLoss(NeedsTrainer):
    """Measures, and keeps the figure for the line of metrics.jsonl of the same step, which must be written afterwards.

    Args:
        sequences: Of the eval split; equally many for each rank, dummies among them.
        every: Optimizer steps between measurements; 0 for the first and the last only.
        run: Where the loss before the first step is recorded.
        stopping: A measurement is broken off where the training is to stop.
    """

    def __init__(self, sequences: Sequences, every: int, run: Run, stopping: Stopping) -> None:
        self.sequences, self.every, self.run, self.stopping = sequences, every, run, stopping
        self.latest: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model that training starts from; after a resume, where the measurement was interrupted."""
        if state.global_step == 0:
            before = self.measure()
            if before is not None and state.is_world_process_zero:
                self.run.update(held_out_loss_before=before)
                print(f"Eval loss before the first step: {before:.4f}", flush=True)
        elif self._is_due(state) and self._is_missing(state.global_step):
            self.latest = self.measure()

    def _is_due(self, state: Any) -> bool:
        return state.global_step >= state.max_steps or bool(self.every and state.global_step % self.every == 0)

    def _is_missing(self, step: int) -> bool:
        lines = distributed.from_rank_0(lambda: read_lines(self.run.metrics_file))
        return any(line["step"] == step and "held_out_loss" not in line for line in lines)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where it is due, unless the training is about to stop."""
        if self._is_due(state) and not (control.should_training_stop and self.stopping.agreed):
            self.latest = self.measure()
            control.should_log = True
            self.stopping.act(self.stopping.agreed, control)

    def take(self) -> float | None:
        """The last figure, once."""
        latest, self.latest = self.latest, None
        return latest

    def measure(self) -> float | None:
        """Mean loss per target token of the eval split, over all ranks; None where the training is to stop."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        model = trainer.model_wrapped
        # Ranks that share a batch measure the same sequences, each of them in full.
        groups = trainer.data_parallel_ranks
        group = accelerator.process_index // (accelerator.num_processes // groups)
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        training = model.training
        model.eval()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for number in range(group, len(self.sequences), groups):
                if self.stopping.stops():
                    break
                # One at a time: no padding, and every rank runs equally many passes, as ZeRO-3 needs.
                inputs = trainer._prepare_inputs(trainer.data_collator([self.sequences[number]]))
                count = (inputs["labels"] != -100).sum()
                sums += torch.stack([trainer.compute_loss(model, inputs).double() * count, count])
        model.train(training)
        if self.stopping.agreed:
            return None
        total = accelerator.reduce(sums, reduction="sum")
        return float(total[0] / total[1])
