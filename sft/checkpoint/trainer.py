"""The part of the trainer that saves and loads checkpoints: complete or absent, and of any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import TrainerCallback
from trl import SFTTrainer

from sft.checkpoint.patches import plain_data_only
from sft.checkpoint.reshard import (
    FullTensors,
    adapter_names,
    load_schedule,
    load_torch,
    load_weights,
    open_full,
    source_names,
    start_random_streams,
    with_parameters,
)
from sft.checkpoint.resume import ResumePlan, resolve_resume, writer_here
from sft.checkpoint.write import CheckpointWriter
from sft.checkpoint.zero import load_zero
from sft.parallel.fsdp import reshard, units_as_planned
from sft.parallel.full_tensors import full_optimizer_state, full_state
from sft.parallel.process_group import barrier_at_end, is_rank_0
from sft.plan.disk import estimate_disk
from sft.plan.job import Job
from sft.run.directory import INCOMPLETE

Item = TypeVar("Item")


class CheckpointingTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer, whose checkpoints are complete or absent, and resume under any engine.

    Args:
        job: Decides the engine.
        resume_plan: How the run resumes from its checkpoint; None at the first step.
        saving: Around whatever may take as long as it needs.
        trl: What SFTTrainer takes.
    """

    is_part = False
    """Whether other ranks hold other parameters."""

    def __init__(
        self, job: Job, resume_plan: ResumePlan | None, saving: Callable[[], AbstractContextManager[None]], **trl: Any
    ) -> None:
        self.job, self.resume_plan, self.saving = job, resume_plan, saving
        # Such checkpoints hold full tensors, and are loaded as another engine's.
        self.saves_full = job.recipe.train.tensor_parallel_size > 1 or (
            job.fsdp is not None and job.fsdp.state_dict_type == "full"
        )
        by_name = self.saves_full or job.recipe.train.pipeline_parallel_size > 1
        self.reshards = resume_plan is not None and (resume_plan.reshards or by_name)
        facts = {"ranks": job.hardware.ranks, "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True)}
        self.writer = writer_here(job)
        folder, keep = Path(trl["args"].output_dir), job.recipe.train.save_total_limit
        disk = estimate_disk(job)
        self.checkpoints = CheckpointWriter(folder, keep, facts, round(disk.checkpoint) if disk else 0)
        super().__init__(**trl)
        # Only for transformers' check of a model whose layers are sharded (arguments.py); our checkpoints have an optimizer.
        self.args.save_only_model = False

    # Saving.

    @property
    def holds_tensors(self) -> bool:
        """Whether the live tensors are gathered on this rank."""
        return is_rank_0()

    def of_all_stages(self, items: Iterable[Item]) -> Iterator[Item]:
        """What rank 0 has, with what it has not because others do; every rank takes part, to the end of the iterator."""
        return iter(items)

    def _get_output_dir(self, trial: Any) -> str:
        # Where a checkpoint is written until it is complete.
        return str(Path(self.args.output_dir) / INCOMPLETE)

    def save_checkpoint(self, model: Any, trial: Any, goes_on: bool) -> None:
        """Save this step; where there is no room, say so if the run continues."""
        save = super()._save_checkpoint
        reshard(self.model)
        self.checkpoints.facts["writer"] = asdict(with_parameters(self.writer, self.model, self.optimizer))
        with self.saving():
            self.checkpoints.save(self.state.global_step, lambda: save(model, trial), goes_on)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank takes part."""
        with self._waiting_for_all():
            self._save_model(output_dir, _internal_call)

    def _waiting_for_all(self) -> AbstractContextManager[None]:
        """A part of a checkpoint, at the end of which ranks wait for the slowest one, however long it takes."""
        return barrier_at_end() if self.checkpoints.is_saving else nullcontext()

    def _save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        if not self.saves_full:
            super().save_model(output_dir, _internal_call)
            # A pickle of rank 0's that nothing reads.
            Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)
            return
        has_adapters, is_writer = self.job.recipe.model.lora is not None, bool(self.args.should_save)
        keep = (
            is_writer or self.job.fsdp is None
        )  # under tensor parallelism transformers has all ranks meet when it has saved
        state = full_state(self.model, has_adapters, keep=keep)
        if keep:
            self.model.save_pretrained(output_dir, state_dict=state, is_main_process=is_writer)
        if is_writer:
            self.processing_class.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._waiting_for_all():
            self._save_optimizer(output_dir)

    def _save_optimizer(self, output_dir: str) -> None:
        if not self.saves_full:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = full_optimizer_state(self.optimizer, keep=bool(self.args.should_save))
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: the run directory says what a model card would."""

    # Loading.

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        units = units_as_planned(self, self.job.fsdp) if self.job.fsdp else nullcontext()
        # The engines load their checkpoints here.
        with units, plain_data_only(self.is_deepspeed_enabled):
            checkpoint = None if self.reshards else resume_from_checkpoint
            prepared = super()._prepare_for_training(max_steps, train_dataloader, checkpoint)
        if self.resume_plan is not None and self.reshards:
            self._reshard(self.resume_plan)
        return prepared

    def load_weights_of(self, checkpoint: Path) -> None:
        """Give the live model, which is trained no further, the weights of a checkpoint of this run. Every rank takes part."""
        load_weights(*self._open(resolve_resume(checkpoint, self.job)))

    def _reshard(self, plan: ResumePlan) -> None:
        """Give the live engine the weights, the moments and the schedule of another engine's checkpoint."""
        module, tensors, sources = self._open(plan)
        if self.is_deepspeed_enabled:
            load_zero(self.model_wrapped, plan.checkpoint, tensors.read, sources, self.state.global_step)
        else:
            load_torch(module, self.optimizer.optimizer, tensors, sources)
        load_schedule(self.lr_scheduler, self.optimizer, plan.checkpoint / SCHEDULER_NAME)

    def _open(self, plan: ResumePlan) -> tuple[Any, FullTensors, dict[str, str]]:
        """The live model, the checkpoint's full tensors, and their names by those of the live trained parameters."""
        module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        tensors = open_full(plan.checkpoint, plan.writer, adapter_names(module))
        return module, tensors, source_names(module, tensors, self.is_part)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.reshards:  # else once the optimizer exists
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.resume_plan is None or self.resume_plan.random_state:
            super()._load_rng_state(checkpoint)
        else:
            start_random_streams(self.args.seed, self.state.global_step, self.args.process_index)


class ResumedSettings(TrainerCallback):  # type: ignore[misc]
    """Applies the current recipe's values, with this peak of the learning rate, over those that transformers loads from the checkpoint."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def on_train_begin(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """After the checkpoint is loaded, before the first step."""
        if state.global_step == 0:
            return
        # Steps between lines and between saves come from trainer_state.json.
        state.compute_steps(args, state.max_steps)
        # The checkpoint's scheduler state brings the old peaks back; the shape over the number of steps is already the new one.
        scheduler, peak = getattr(lr_scheduler, "scheduler", lr_scheduler), self.learning_rate
        scheduler.base_lrs = [peak] * len(scheduler.base_lrs)
        rates = [peak * shape(scheduler.last_epoch) for shape in scheduler.lr_lambdas]
        scheduler._last_lr = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"], group["lr"] = peak, rate
