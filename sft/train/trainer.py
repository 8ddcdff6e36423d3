"""SFTTrainer with the recipe's order of the data, a loss that waits for nothing, and checkpoints that are complete or absent."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import SFTTrainer

from sft.checkpoint.patches import plain_data_only
from sft.checkpoint.reshard import reshard, start_random_streams, with_parameters
from sft.checkpoint.resume import ResumePlan, Writer
from sft.checkpoint.write import CheckpointWriter
from sft.parallel.fsdp import units_as_planned
from sft.parallel.full_tensors import full_optimizer_state, full_state, load_optimizer_state, load_weights
from sft.parallel.optimizer import MasterAdamW, check_optimizer
from sft.parallel.patches import cpu_ranks_may_shard
from sft.parallel.progress import CHECKPOINT, Progress
from sft.parallel.sequence import PartOfSequences, labels_of_all, share_batches
from sft.parallel.tensor import is_tensor_parallel
from sft.plan.plan import Plan
from sft.recipe.schema import Fsdp
from sft.run.directory import INCOMPLETE
from sft.train.batches import Fingerprint, Fingerprinted, Sequences, StepOrder
from sft.train.faults import Faults, finite
from sft.train.metrics import StepClock
from sft.train.stopping import Stopping


def is_plain(trainer: SFTTrainer) -> bool:
    """Whether the loss is the mean negative log-likelihood and nothing else, so that plain_loss is TRL's."""
    return (
        trainer.args.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and not trainer.aux_loss_enabled
        and not getattr(trainer.accelerator.parallelism_config, "cp_enabled", False)
    )


def plain_loss(trainer: RecipeTrainer, model: Any, inputs: dict[str, Any], tokens_in_step: Any) -> tuple[Any, Any]:
    """Negative log-likelihood of the micro-batch's labels, over the labels of the whole step.

    TRL's own loss gathers four figures from all ranks at each micro-batch and reads them at once, so that no rank can launch its backward
    pass while its GPU still computes the forward pass. Here they add up on the device (Tally) and are read when a line is logged. One wait
    remains on a GPU: the fused head takes the labelled tokens only, and must know how many there are.

    Args:
        trainer: Its arguments and the number of ranks.
        model: The engine, or the model itself.
        inputs: From the collator, on the device.
        tokens_in_step: Labels of all micro-batches of all ranks; None for those of these inputs.

    Returns:
        The loss, scaled so that the engine's average of the ranks' gradients is that of the step; and the fused head's output.
    """
    # With a cache, transformers would not keep the documents of a pack apart.
    outputs = model(**inputs, use_cache=False, fused_lm_head=True)
    tokens = outputs.label_mask.sum() if tokens_in_step is None else torch.as_tensor(tokens_in_step)
    loss = -outputs.log_probs.sum() / tokens.clamp(min=1)
    if tokens_in_step is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.gradients_divided_by
    return loss, outputs


class Tally:
    """Labels, entropy and correct first guesses since the last line, on the device."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, outputs: Any) -> None:
        """Count a micro-batch."""
        parts = [outputs.label_mask, outputs.entropy.detach(), outputs.is_top1]
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, accelerator: Any) -> dict[str, list[float]]:
        """The means over all ranks since the last call, under TRL's names; nothing where nothing was counted."""
        if self._sums is None:
            return {}
        labels, entropy, correct = accelerator.reduce(self._sums, reduction="sum").tolist()
        self._sums = None
        return {"entropy": [entropy / max(labels, 1)], "mean_token_accuracy": [correct / max(labels, 1)]}


class NeedsTrainer(TrainerCallback):  # type: ignore[misc]
    """A callback that works on the live trainer, which sets itself here when it is built."""

    trainer: RecipeTrainer


class RecipeTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer, changed where the recipe means something else.

    Args are those of build_trainer in sft/train/arguments.py; `trl` is what SFTTrainer itself takes, except for the dataset.
    """

    data_collator: Any

    def __init__(
        self,
        *,
        sequences: Sequences,
        order: StepOrder,
        plan: Plan,
        fsdp: Fsdp | None,
        writer: Writer,
        checkpoints: CheckpointWriter,
        clock: StepClock,
        progress: Progress,
        fingerprint: Fingerprint,
        stopping: Stopping | None,
        faults: Faults | None,
        resume_plan: ResumePlan | None,
        **trl: Any,
    ) -> None:
        self.order, self.plan, self.fsdp, self.writer, self.checkpoints = order, plan, fsdp, writer, checkpoints
        self.clock, self.progress, self.fingerprint = clock, progress, fingerprint
        self.stopping, self.faults, self.resume_plan = stopping, faults, resume_plan
        self.tally = Tally()
        super().__init__(**trl)
        self.train_dataset = sequences
        # Only for transformers' check of a model whose layers are sharded (arguments.py); our checkpoints have an optimizer.
        self.args.save_only_model = False
        self.remove_callback(PrinterCallback)
        for callback in trl["callbacks"]:
            if isinstance(callback, NeedsTrainer) or hasattr(callback, "trainer"):
                callback.trainer = self
        if self.sequence_parallel_size > 1:
            # The loss is ours, over the labels of the whole step, and so are the batches.
            self.model_accepts_loss_kwargs = True
            self.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks, or groups of ranks, that have a batch of their own."""
        groups = self.accelerator.parallelism_config
        return int(self.accelerator.num_processes) // (groups.non_data_parallel_size if groups else 1)

    @property
    def gradients_divided_by(self) -> int:
        """What the engine divides the sum of the ranks' gradients by."""
        if self.sequence_parallel_size > 1 and self.model_wrapped.zero_optimization_stage() == 3:
            # ZeRO-3's reduce-scatter ignores that the ranks of a group share a batch; ZeRO-2 does not.
            return int(self.accelerator.num_processes)
        return self.data_parallel_ranks

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share the tokens of a sequence."""
        groups = self.accelerator.parallelism_config
        return int(groups.sp_size) if groups else 1

    def get_sp_size(self) -> int:
        """1: transformers multiplies the batches of an epoch by it, for DeepSpeed's adapter, which is not used."""
        return 1

    def get_train_dataloader(self) -> Any:
        """One batch for each group of ranks that share sequences, with its hash."""
        size, rank, ranks = self.sequence_parallel_size, self.accelerator.process_index, self.accelerator.num_processes
        collator, sharing = self.data_collator, ranks // self.data_parallel_ranks
        self.data_collator = Fingerprinted(collator, counts=rank % sharing == 0)
        if size > 1:
            collator.pad_to_multiple_of = size
            self.data_collator = PartOfSequences(self.data_collator, rank % size, size)
        try:
            loader = super().get_train_dataloader()
        finally:
            # The eval loss gives each rank full sequences.
            self.data_collator = collator
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
        self.clock.start()
        self.progress.begin(self.state.global_step + 1)
        if self.stopping is not None:
            self.stopping.begin(self.state.global_step + 1)
        watched = self.clock.timed(self.progress.watched(epoch_iterator))
        batches, tokens = super().get_batch_samples(watched, num_batches, device)
        self.fingerprint.add(batches)
        if self.faults is not None:
            self.faults.begin(batches, self._tr_loss)
        return batches, tokens

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward pass of a micro-batch; its loss, for the mean over ranks that is logged."""
        self.progress.forward()
        if self.stopping is not None and self.progress.passes == self.progress.batches:
            self.stopping.reduce()
        loss = super().training_step(*args, **kwargs)
        self.progress.passed()
        if self.sequence_parallel_size == 1:
            return loss
        return loss * (self.accelerator.num_processes // self.gradients_divided_by)

    def _get_train_sampler(self, train_dataset: Any = None) -> StepOrder:
        return self.order

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        by_tensor = self.resume_plan if self.resume_plan is not None and self.resume_plan.reshards else None
        checkpoint = None if by_tensor else resume_from_checkpoint
        units = units_as_planned(self, self.fsdp) if self.fsdp else nullcontext()
        # The engines load their checkpoints here.
        with units, plain_data_only(self.is_deepspeed_enabled):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, checkpoint)
        if by_tensor:
            reshard(self, by_tensor)
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.resume_plan is None or self.resume_plan.random_state:
            super()._load_rng_state(checkpoint)
            return
        start_random_streams(self.args.seed, self.state.global_step, self.args.process_index)

    def _run_epoch(self, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            # The run was stopped between its last step and final/; transformers would train another step.
            self.control.should_training_stop = True
            return
        self._logged_at = self._globalstep_last_logged
        # A resumed epoch wraps the loader once more to skip batches, and behind it the trainer does not find the sampler.
        self.order.set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # A resumed run starts new means and sums: the steps before must have their line.
        self.control.should_log |= self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        # Where a checkpoint is written until it is complete.
        return str(Path(self.args.output_dir) / INCOMPLETE)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.progress.at(CHECKPOINT)
        save, stopping = super()._save_checkpoint, self.stopping
        goes_on = stopping is None or not stopping.agreed
        self.checkpoints.facts["writer"] = asdict(with_parameters(self.writer, self.model, self.optimizer))
        self.checkpoints.save(self.state.global_step, lambda: save(model, trial), goes_on)
        if stopping is not None:
            stopping.shortage = self.checkpoints.shortage

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank takes part where the layers are sharded, for which transformers has no checkpoints."""
        self.checkpoints.part(lambda: self._save_model(output_dir, _internal_call))

    def _save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        if not is_tensor_parallel(self.model):
            super().save_model(output_dir, _internal_call)
            # A pickle of rank 0's that nothing reads.
            Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)
            return
        self.model.save_pretrained(output_dir, state_dict=full_state(self.model), is_main_process=self.args.should_save)
        if self.args.should_save:
            self.processing_class.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.checkpoints.part(lambda: self._save_optimizer(output_dir))

    def _save_optimizer(self, output_dir: str) -> None:
        if not is_tensor_parallel(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = full_optimizer_state(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.resume_plan is not None and self.resume_plan.reshards:
            return  # reshard loads them, once the optimizer exists
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

    def _clip_grad_norm(self, model: Any) -> Any:
        # transformers would scale bf16 gradients, and take their norm, in bf16.
        masters = getattr(self.optimizer, "optimizer", None)
        if isinstance(masters, MasterAdamW):
            return masters.clip_grad_norm(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        masters = getattr(self.optimizer, "optimizer", None)
        if grad_norm is None and isinstance(masters, MasterAdamW):
            grad_norm = masters.clip_grad_norm(float("inf"))
        norm = super()._get_grad_norm(model, grad_norm)
        if self.faults is not None:
            self.faults.check(self, norm)
        return norm

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """plain_loss wherever TRL would compute the same, else TRL's."""
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
        if self.faults is None or not self.model.training:
            return loss
        self.faults.add(loss)
        return finite(loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the entropy and accuracy of the target tokens, and without skipped steps in the mean loss."""
        self._metrics["train"].update(self.tally.take(self.accelerator))
        self.fingerprint.gather(self.accelerator)
        if self.faults is not None and "loss" in logs:
            self._leave_skipped_out(logs, self.faults.take())
        super().log(logs, start_time)

    def _leave_skipped_out(self, logs: dict[str, float], skipped: int) -> None:
        """Make the mean loss that of the steps that trained; NaN where none did."""
        steps = self.state.global_step - self._logged_at
        self._logged_at = self.state.global_step
        if skipped:
            logs["loss"] = logs["loss"] * steps / (steps - skipped) if steps > skipped else float("nan")
            logs["skipped_steps"] = skipped

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: the run directory says what a model card would."""
