"""SFTTrainer with the recipe's order of the data and a loss that waits for nothing. sft/checkpoint/trainer.py saves and resumes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import SFTTrainer

from sft.checkpoint.resume import ResumePlan
from sft.checkpoint.trainer import CheckpointingTrainer
from sft.errors import ModelError
from sft.hub.flops import model_flops
from sft.model.attention import NAME as VARLEN
from sft.parallel.optimizer import MasterAdamW
from sft.parallel.patches import cpu_ranks_may_shard, no_masks_of_packs
from sft.parallel.sequence import PartOfSequences, labels_of_all, share_batches
from sft.plan.job import Job
from sft.train.batches import CONTENTS, Accounted, Sequences, StepOrder, WorkSum
from sft.train.faults import Faults, finite
from sft.train.optimizers import build_muon
from sft.train.regularization import NoisyEmbeddings, smoothed
from sft.train.speed import StepClock, peak_memory_gib
from sft.train.stopping import Stopping
from sft.train.watchdog import EVAL_LOSS, OPTIMIZER, Progress


def is_plain(trainer: SFTTrainer) -> bool:
    """Whether the loss is the mean negative log-likelihood and nothing else, so that plain_loss is TRL's."""
    return (
        trainer.args.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and not trainer.aux_loss_enabled
        and not getattr(trainer.accelerator.parallelism_config, "cp_enabled", False)
    )


def plain_loss(trainer: RecipeTrainer, model: Any, inputs: dict[str, Any], tokens_in_step: Any) -> Any:
    """Negative log-likelihood of the micro-batch's target tokens, with smoothed labels where asked for, over those of the whole step.

    TRL's own loss gathers four figures from all ranks at each micro-batch and reads them at once, so that no rank can launch its backward
    pass while its GPU still computes the forward pass.

    `tokens_in_step` are those of all micro-batches of all ranks; None: of these inputs. Returns the loss, scaled so that the engine's
    average of the ranks' gradients is that of the step.
    """
    # With a cache, transformers would not keep the documents of a pack apart.
    with no_masks_of_packs() if trainer.takes_boundaries else nullcontext():
        if trainer.smoothing and trainer.model.training:
            outputs = smoothed(model, inputs, trainer.smoothing)
        else:
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
    tokens = outputs.label_mask.sum() if tokens_in_step is None else torch.as_tensor(tokens_in_step)
    loss = -outputs.log_probs.sum() / tokens.clamp(min=1)
    if tokens_in_step is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.gradients_divided_by
    return loss


class RecipeTrainer(CheckpointingTrainer):
    """SFTTrainer, changed where the recipe means something else. Auto-tuning has neither `stopping` nor `faults`.

    `trl` is what SFTTrainer takes, except for the dataset.
    """

    data_collator: Any

    def __init__(
        self,
        job: Job,
        sequences: Sequences,
        *,
        stopping: Stopping | None,
        faults: Faults | None,
        resume_plan: ResumePlan | None,
        **trl: Any,
    ) -> None:
        self.stopping, self.faults = stopping, faults
        self.order, self.clock = sequences.order(job.recipe.train.seed), StepClock(job.hardware.gpu is not None)
        self.progress, self._skipped = Progress(), 0
        attention = job.plan.attention.value
        self.takes_boundaries = job.recipe.data.packing and attention.startswith((VARLEN, "flash_attention"))
        """Whether the attention function is given where documents end, and needs no mask."""
        self._batches = self._passes = 0
        """Micro-batches of the step, and how many of them went into the model."""
        # SFTTrainer takes a dataset of its own library only, and never reads this one.
        row = Dataset.from_list([{name: list(sequences[0][name]) for name in ("input_ids", "labels")}])
        experts = trl["model"].config.get_text_config()
        returns_logits = getattr(experts, "output_router_logits", None)
        super().__init__(job, resume_plan, self.progress.saving, train_dataset=row, **trl)
        if returns_logits is not None:
            # TRL sets it for a mixture of experts, and asks for the router's logits at each batch besides: final/ need not return them.
            experts.output_router_logits = returns_logits
        self.train_dataset = sequences
        train = job.recipe.train
        alpha, self.smoothing = train.neftune_noise_alpha, train.label_smoothing_factor
        self.noise = NoisyEmbeddings(self.model.get_input_embeddings(), alpha) if alpha else None
        if self.smoothing and not is_plain(self):
            raise ModelError(
                f"train.label_smoothing_factor={self.smoothing:g} on a model whose router has a loss of its own, which would be left out. "
                "Remove it, or set output_router_logits to false in the model's config.json."
            )
        self.work = WorkSum(model_flops(self.model))
        self.remove_callback(PrinterCallback)
        if self.sequence_parallel_size > 1:
            # The loss is ours, over the target tokens of the whole step, and so are the batches.
            self.model_accepts_loss_kwargs = True
            self.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader

    # Ranks that share a batch.

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks, or groups of ranks, that have a batch of their own."""
        groups = self.accelerator.parallelism_config
        return int(self.accelerator.num_processes) // (groups.non_data_parallel_size if groups else 1)

    @property
    def data_parallel_rank(self) -> int:
        """Which of them this rank belongs to."""
        return int(self.accelerator.process_index) // self._sharing

    @property
    def counts_batches(self) -> bool:
        """Whether this rank accounts for its batches: one of those that share them does."""
        return int(self.accelerator.process_index) % self._sharing == 0

    @property
    def _sharing(self) -> int:
        return int(self.accelerator.num_processes) // self.data_parallel_ranks

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

    # Batches.

    def get_train_dataloader(self) -> Any:
        """One batch for each group of ranks that share sequences, with the account of what it holds."""
        size, rank, ranks = self.sequence_parallel_size, self.accelerator.process_index, self.accelerator.num_processes
        collator = self.data_collator
        self.data_collator = Accounted(collator, counts=self.counts_batches)
        if size > 1:
            collator.pad_to_multiple_of = size
            self.data_collator = PartOfSequences(self.data_collator, rank % size, size)
        try:
            loader = super().get_train_dataloader()
        finally:
            # The eval loss gives each rank full sequences.
            self.data_collator = collator
        if size > 1:
            share_batches(loader, ranks // size, rank // size)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> StepOrder:
        return self.order

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if self.sequence_parallel_size > 1:
            return labels_of_all(batch_samples, self.accelerator)
        return super()._get_num_items_in_batch(batch_samples, device)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one optimizer step, which begins here."""
        self.clock.start()
        self.progress.begin(self.state.global_step + 1)
        if self.stopping is not None:
            self.stopping.begin()
        batches, tokens = super().get_batch_samples(self.clock.timed(epoch_iterator), num_batches, device)
        self._batches, self._passes = len(batches), 0
        contents = [batch.pop(CONTENTS) for batch in batches]
        self.work.add(contents)
        if self.faults is not None:
            self.faults.begin(contents)
            self._loss_before = self._tr_loss.clone()
        return batches, tokens

    # A step.

    def doing(self) -> str:
        """What the ranks do, as a phrase after "while"."""
        return f"step {self.state.global_step + 1} was trained ({self.progress.phase})"

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward pass of a micro-batch; its loss, for the mean over ranks that is logged."""
        self._passes += 1
        self.progress.at(f"forward, micro-batch {self._passes}")
        loss = self.forward_backward(*args, **kwargs)
        if self._passes == self._batches:
            self.progress.at(OPTIMIZER)
        if self.sequence_parallel_size == 1:
            return loss
        return loss * (self.accelerator.num_processes // self.gradients_divided_by)

    def of_engine(self) -> dict[str, float]:
        """Figures of the engine for a line of metrics.jsonl."""
        return {}

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's part of it; returns the loss."""
        return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """plain_loss wherever TRL would compute the same, else TRL's."""
        training = self.model.training
        if self.noise is not None and training:
            self.noise.expect(inputs)
        if return_outputs or not is_plain(self):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        else:
            result = plain_loss(self, model, inputs, num_items_in_batch)
        self.progress.at(f"backward, micro-batch {self._passes}" if training else EVAL_LOSS)
        if return_outputs or self.faults is None or not training:
            return result
        self.faults.add(result)
        return finite(result)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The recipe's optimizer, as planned."""
        whole, job = self.model if model is None else model, self.job
        if job.recipe.train.optim == "muon":
            self.optimizer: Any = build_muon(job, whole, self.get_decay_parameter_names(whole))
        built: torch.optim.Optimizer = super().create_optimizer(model)
        return built

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's schedule, over DeepSpeed's optimizers too."""
        of_engine: Any = getattr(self.optimizer, "optimizer", None)
        if self.is_deepspeed_enabled and not hasattr(of_engine, "defaults"):
            of_engine.defaults = {"lr": self.args.learning_rate}  # where transformers' polynomial reads the peak
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: Any) -> Any:
        # transformers would scale bf16 gradients, and take their norm, in bf16.
        masters = getattr(self.optimizer, "optimizer", None)
        if isinstance(masters, MasterAdamW):
            return masters.clip_grad_norm(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Before the optimizer steps; under DeepSpeed right after, which itself discards gradients that are not finite.
        masters = getattr(self.optimizer, "optimizer", None)
        if grad_norm is None and isinstance(masters, MasterAdamW):
            grad_norm = masters.clip_grad_norm(float("inf"))
        norm = super()._get_grad_norm(model, grad_norm)
        if self.faults is not None:
            # Without ZeRO, DeepSpeed applies the step.
            applied = self.is_deepspeed_enabled and not getattr(self.model_wrapped.optimizer, "overflow", False)
            if self.faults.must_skip(self.state.global_step + 1, norm, applied):
                self._skip_step()
        return norm

    def _skip_step(self) -> None:
        """The step counts, moves the schedule, and changes nothing else."""
        if self.is_deepspeed_enabled:
            # It has discarded the step. If the trainer knew, it would hold back the schedule too.
            self.model_wrapped.optimizer.overflow = False
        else:
            # AdamW passes over weights without gradients.
            self.optimizer.zero_grad(set_to_none=True)
        self._tr_loss.copy_(self._loss_before)
        self._skipped += 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Without skipped steps in the mean loss."""
        work = self.work.gather(*peak_memory_gib())
        self.state.num_input_tokens_seen += work.tokens if work is not None else 0
        if "loss" in logs and self._skipped:
            trained = self._steps_in_line - self._skipped
            logs["loss"] = logs["loss"] * self._steps_in_line / trained if trained else float("nan")
            logs["skipped_steps"], self._skipped = self._skipped, 0
        super().log(logs, start_time)

    def _run_epoch(self, **kwargs: Any) -> None:
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            # The run was interrupted between its last step and final/; transformers would train another step.
            self.control.should_training_stop = True
            return
        # A resumed epoch wraps the loader once more to skip batches, and behind it the trainer does not find the sampler.
        self.order.set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate's state, with CPU ranks that may share a model."""
        shards_on_cpu = self.args.fsdp and self.args.use_cpu
        with cpu_ranks_may_shard() if shards_on_cpu else nullcontext():
            super().create_accelerator_and_postprocess()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # The last step, too. A resumed run starts new means and sums at its checkpoint: the steps before must have their line, and its
        # lines must be those of a run that was never interrupted.
        self.control.should_log |= self.control.should_save
        self._steps_in_line = self.state.global_step - self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began, stopping = time.monotonic(), self.stopping
        self.save_checkpoint(model, trial, goes_on=stopping is None or not stopping.agreed)
        if stopping is not None:
            stopping.saved(self.checkpoints.shortage, time.monotonic() - began, self.control)
