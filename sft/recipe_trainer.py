"""SFTTrainer, changed where the recipe means something else: the order of the data, the loss's waits, clipping, checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

from sft.agreement import Agreement
from sft.batches import StepOrder
from sft.loss import Tally, is_plain, plain_loss
from sft.optimizer import MasterAdamW, check_optimizer
from sft.plan import Plan
from sft.progress import CHECKPOINT, Progress
from sft.step_clock import StepClock


class RecipeTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with the recipe's order of the data and checkpoints that are complete or absent."""

    step_order: StepOrder
    plan: Plan
    step_clock: StepClock
    agreement: Agreement | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tally, self.progress = Tally(), Progress()
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one optimizer step, which begins here."""
        self.step_clock.start()
        self.progress.begin(self.state.global_step + 1)
        asked = self.step_clock.timed(self.progress.watched(epoch_iterator))
        batches, tokens = super().get_batch_samples(asked, num_batches, device)
        if self.agreement is not None:
            self.agreement.batches(batches, tokens)
        return batches, tokens

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward pass of a micro-batch."""
        self.progress.forward()
        if self.agreement is not None:
            self.agreement.micro_batch()
        loss = super().training_step(*args, **kwargs)
        self.progress.passed()
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> StepOrder:
        return self.step_order

    def _get_output_dir(self, trial: Any) -> str:
        # Where a checkpoint is written until it is whole.
        return str(Path(self.args.output_dir) / ".incomplete")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        complete = Path(self.args.output_dir)
        incomplete = Path(self._get_output_dir(trial))
        self.progress.at(CHECKPOINT)
        if self.is_world_process_zero():
            shutil.rmtree(incomplete, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            name = f"checkpoint-{self.state.global_step}"
            shutil.rmtree(complete / name, ignore_errors=True)
            (incomplete / name).rename(complete / name)
            incomplete.rmdir()
            rotate_checkpoints(str(complete), self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW as planned."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        check_optimizer(optimizer, self.optimizer_cls_and_kwargs is not None, self.plan.gradients.value)
        return optimizer

    # Gradients in bf16 would be scaled, and their norm taken, in bf16.
    def _clip_grad_norm(self, model: Any) -> Any:
        masters = getattr(self.optimizer, "optimizer", None)
        if isinstance(masters, MasterAdamW):
            return masters.clip_grad_norm(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        masters = getattr(self.optimizer, "optimizer", None)
        if grad_norm is None and isinstance(masters, MasterAdamW):
            return masters.clip_grad_norm(float("inf"))
        return super()._get_grad_norm(model, grad_norm)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss without its collectives and reads, wherever nothing but the plain loss was asked for."""
        if return_outputs or not is_plain(self):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self.progress.loss_known(self.model.training)
            return result
        loss, outputs = plain_loss(self, model, inputs, num_items_in_batch)
        if self.model.training:
            self.tally.add(outputs)
        self.progress.loss_known(self.model.training)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the share of trained tokens that the model would have said, and how sure it was."""
        self._metrics["train"].update(self.tally.take(self.accelerator))
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run directory says what a model card would."""
