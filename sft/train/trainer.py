"""SFTTrainer, changed where the recipe means something else: the order of the data, the loss's waits, clipping, checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from trl import SFTTrainer

from sft.checkpoint.patches import plain_data_only
from sft.checkpoint.reshard import reshard, start_random_streams, with_parameters
from sft.checkpoint.resume import ResumePlan, Writer, write_writer
from sft.checkpoint.write import CheckpointWriter
from sft.parallel.agreement import Agreement
from sft.parallel.fsdp import units_as_planned
from sft.parallel.optimizer import MasterAdamW, check_optimizer
from sft.parallel.patches import cpu_ranks_may_shard
from sft.parallel.progress import CHECKPOINT, Progress
from sft.parallel.sequence import PartOfSequences, labels_of_all, share_batches
from sft.parallel.tensor import (
    full_optimizer_state,
    full_weights,
    is_tensor_parallel,
    load_optimizer_state,
    load_weights,
)
from sft.plan.plan import Plan
from sft.recipe.schema import Fsdp
from sft.run.directory import INCOMPLETE
from sft.train.batches import StepOrder
from sft.train.fingerprint import Fingerprint, Fingerprinted
from sft.train.loss import Tally, is_plain, plain_loss
from sft.train.nonfinite import Nonfinite
from sft.train.offending_samples import finite
from sft.train.step_clock import StepClock
from sft.train.stopping import Stopping


class RecipeTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with the recipe's order of the data and checkpoints that are complete or absent."""

    step_order: StepOrder
    plan: Plan
    step_clock: StepClock
    data_collator: Any
    fingerprint: Fingerprint
    checkpoints: CheckpointWriter
    fsdp: Fsdp | None = None
    writer: Writer
    continuation: ResumePlan | None = None
    agreement: Agreement | None = None
    canary: Any = None
    nonfinite: Nonfinite | None = None
    stopping: Stopping | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tally, self.progress, self.fingerprint = Tally(), Progress(), Fingerprint()
        super().__init__(*args, **kwargs)
        if self.sequence_parallel_size > 1:
            # The loss is ours, over the labels of the whole step, and so are the batches.
            self.model_accepts_loss_kwargs = True
            self.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks, or groups of ranks, with a batch of their own."""
        groups = self.accelerator.parallelism_config
        return int(self.accelerator.num_processes) // (groups.non_data_parallel_size if groups else 1)

    @property
    def gradients_divided_by(self) -> int:
        """What the engine divides the sum of the ranks' gradients by."""
        if self.sequence_parallel_size > 1 and self.model_wrapped.zero_optimization_stage() == 3:
            # Reducing by scattering, ZeRO-3 forgets that ranks of a group have one batch; ZeRO-2 does not.
            return int(self.accelerator.num_processes)
        return self.data_parallel_ranks

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share the tokens of a sequence."""
        groups = self.accelerator.parallelism_config
        return int(groups.sp_size) if groups else 1

    def get_sp_size(self) -> int:
        """One: transformers multiplies the batches of an epoch by it, which DeepSpeed's adapter would make so many."""
        return 1

    def get_train_dataloader(self) -> Any:
        """One batch for each group of ranks that share sequences, with its fingerprint."""
        size, rank, ranks = self.sequence_parallel_size, self.accelerator.process_index, self.accelerator.num_processes
        whole, shared_by = self.data_collator, ranks // self.data_parallel_ranks
        self.data_collator = Fingerprinted(whole, counts=rank % shared_by == 0)
        if size > 1:
            whole.pad_to_multiple_of = size
            self.data_collator = PartOfSequences(self.data_collator, rank % size, size)
        try:
            loader = super().get_train_dataloader()
        finally:
            # What measures without training gives each rank whole sequences.
            self.data_collator = whole
        if size > 1:
            share_batches(loader, size, rank, ranks)
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if self.sequence_parallel_size > 1:
            return labels_of_all(batch_samples, self.accelerator)
        return super()._get_num_items_in_batch(batch_samples, device)

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate's state, with CPU ranks that may share a model."""
        shards_on_cpu = self.args.fsdp and self.args.use_cpu
        with cpu_ranks_may_shard() if shards_on_cpu else nullcontext():
            super().create_accelerator_and_postprocess()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one optimizer step, which begins here."""
        self.step_clock.start()
        self.progress.begin(self.state.global_step + 1)
        if self.stopping is not None:
            self.stopping.begin(self.state.global_step + 1)
        asked = self.step_clock.timed(self.progress.watched(epoch_iterator))
        batches, tokens = super().get_batch_samples(asked, num_batches, device)
        self.fingerprint.add(batches)
        if self.nonfinite is not None:
            self.nonfinite.begin(self, batches)
        if self.agreement is not None:
            self.agreement.batches(batches, tokens)
        return batches, tokens

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward pass of a micro-batch; its loss, for the mean over ranks that is logged."""
        self.progress.forward()
        if self.agreement is not None:
            self.agreement.micro_batch()
        if self.stopping is not None and self.progress.passes == self.progress.batches:
            self.stopping.ask()
        loss = super().training_step(*args, **kwargs)
        self.progress.passed()
        if self.sequence_parallel_size == 1:
            return loss
        return loss * (self.accelerator.num_processes // self.gradients_divided_by)

    def _get_train_sampler(self, train_dataset: Any = None) -> StepOrder:
        return self.step_order

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        goes_on = self.continuation if self.continuation is not None and self.continuation.reshards else None
        checkpoint = None if goes_on else resume_from_checkpoint
        units = units_as_planned(self, self.fsdp) if self.fsdp else nullcontext()
        # The engines load their checkpoints here.
        with units, plain_data_only(self.is_deepspeed_enabled):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, checkpoint)
        if goes_on:
            reshard(self, goes_on)
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.continuation is None or self.continuation.random_state:
            super()._load_rng_state(checkpoint)
            return
        start_random_streams(self.args.seed, self.state.global_step, self.args.process_index)

    def _run_epoch(self, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            # Stopped after its last step and before final/ was there; transformers would train another one.
            self.control.should_training_stop = True
            return
        self._logged_at = self._globalstep_last_logged
        # A resumed epoch skips batches by one wrapper more, behind which the trainer does not find the order of several ranks.
        self.step_order.set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # A run that goes on begins to average and to add up there: the steps before must have their line.
        self.control.should_log |= self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        # Where a checkpoint is written until it is whole.
        return str(Path(self.args.output_dir) / INCOMPLETE)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.progress.at(CHECKPOINT)
        save, stopping = super()._save_checkpoint, self.stopping
        goes_on = stopping is None or not stopping.wish
        self.checkpoints.save(self.state.global_step, lambda: save(model, trial), goes_on)
        if stopping is not None:
            stopping.shortage = self.checkpoints.shortage

    # A model whose layers are spread over ranks: transformers has no checkpoints for it.
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank takes part where the layers are spread."""
        self.checkpoints.part(lambda: self._save_model(output_dir, _internal_call))

    def _save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        if not is_tensor_parallel(self.model):
            super().save_model(output_dir, _internal_call)
            # A pickle that nothing reads; the first rank's.
            Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)
            return
        self.model.save_pretrained(
            output_dir, state_dict=full_weights(self.model), is_main_process=self.args.should_save
        )
        if self.args.should_save:
            self.processing_class.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # By itself: what fails on one rank must not leave the others in an engine's exchange.
        self.checkpoints.part(lambda: self._save_writer(output_dir))
        self.checkpoints.part(lambda: self._save_optimizer(output_dir))

    def _save_writer(self, output_dir: str) -> None:
        if self.args.should_save:
            write_writer(Path(output_dir), with_parameters(self.writer, self.model, self.optimizer))

    def _save_optimizer(self, output_dir: str) -> None:
        if not is_tensor_parallel(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = full_optimizer_state(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.continuation is not None and self.continuation.reshards:
            return  # when the optimizer is there too
        if not is_tensor_parallel(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load_weights(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_tensor_parallel(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer_state(self.optimizer, Path(checkpoint, OPTIMIZER_NAME))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

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
            grad_norm = masters.clip_grad_norm(float("inf"))
        norm = super()._get_grad_norm(model, grad_norm)
        return norm if self.nonfinite is None else self.nonfinite.check(self, norm)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss without its collectives and reads, wherever nothing but the plain loss was asked for."""
        if return_outputs or not is_plain(self):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self.progress.loss_known(self.model.training)
            return result if return_outputs else self._watched(result)
        loss, outputs = plain_loss(self, model, inputs, num_items_in_batch)
        if self.model.training:
            self.tally.add(outputs)
        self.progress.loss_known(self.model.training)
        return self._watched(loss)

    def _watched(self, loss: torch.Tensor) -> torch.Tensor:
        if self.nonfinite is None or not self.model.training:
            return loss
        self.nonfinite.loss(loss)
        return finite(loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the share of trained tokens that the model would have said, and how sure it was."""
        self._metrics["train"].update(self.tally.take(self.accelerator))
        self.fingerprint.gather(self.accelerator)
        if self.nonfinite is not None and "loss" in logs:
            self._leave_skipped_out(logs, self.nonfinite.take())
        super().log(logs, start_time)

    def _leave_skipped_out(self, logs: dict[str, float], skipped: int) -> None:
        """The mean loss is of the steps that trained; NaN where none did."""
        steps = self.state.global_step - self._logged_at
        self._logged_at = self.state.global_step
        if skipped:
            logs["loss"] = logs["loss"] * steps / (steps - skipped) if steps > skipped else float("nan")
            logs["skipped_steps"] = skipped

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run directory says what a model card would."""
