"""The loss on the rows that are held out: measured before the first step, at each checkpoint, and after the last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft.train.batches import Sequences


class HeldOutLoss(TrainerCallback):  # type: ignore[misc]
    """Measures, and hands the figure to the line of metrics.jsonl that is written at the same step.

    Must be called before the callback that writes the line.

    Args:
        sequences: The held-out ones; as many for each rank, fillers among them.
        every: Optimizer steps between measurements; 0 for the first and the last only.
        is_missing: Whether the figure of a step is in no line, though the step is trained.
        record: Called on the first rank with the loss before the first step.
    """

    def __init__(
        self,
        sequences: Sequences,
        every: int,
        is_missing: Callable[[int], bool] = lambda step: False,
        record: Callable[[float], None] = lambda loss: None,
    ) -> None:
        self.sequences, self.every, self.is_missing, self.record = sequences, every, is_missing, record
        self.trainer: Any = None
        self.latest: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model that training starts from; one that goes on, where the measurement was broken off."""
        if state.global_step == 0:
            before = self.measure()
            if before is not None and state.is_world_process_zero:
                self.record(before)
                print(f"Loss on the held-out rows before the first step: {before:.4f}", flush=True)

        elif self._is_due(state) and self.is_missing(state.global_step):
            self.latest = self.measure()

    def _is_due(self, state: Any) -> bool:
        return state.global_step >= state.max_steps or bool(self.every and state.global_step % self.every == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where it is time, and where it is not to stop."""
        if control.should_training_stop and self.trainer.stopping.wish:
            return
        if self._is_due(state):
            self.latest = self.measure()
            control.should_log = True
            self.trainer.stopping.act(self.trainer.stopping.wish, control)

    def take(self) -> float | None:
        """The last figure, once."""
        latest, self.latest = self.latest, None
        return latest

    def measure(self) -> float | None:
        """Mean loss of a trained token over all held-out sequences, on all ranks; None where the training is to stop."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        model = trainer.model_wrapped
        # Ranks that share a batch measure the same sequences, each of them whole.
        groups = trainer.data_parallel_ranks
        group = accelerator.process_index // (accelerator.num_processes // groups)
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        training = model.training
        model.eval()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for number in range(group, len(self.sequences), groups):
                if trainer.stopping.stops():
                    break
                # One at a time: no padding, and every rank takes part in as many passes, as ZeRO-3 needs.
                inputs = trainer._prepare_inputs(trainer.data_collator([self.sequences[number]]))
                count = (inputs["labels"] != -100).sum()
                sums += torch.stack([trainer.compute_loss(model, inputs).double() * count, count])
        model.train(training)
        if trainer.stopping.wish:
            return None
        total = accelerator.reduce(sums, reduction="sum")
        return float(total[0] / total[1])
