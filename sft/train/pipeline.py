"""The trainer of a model in pipeline stages: what differs from other engines (sft/parallel/pipeline.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch.nn.utils import clip_grads_with_norm_
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from sft.checkpoint.manifest import sync
from sft.files import write_json
from sft.hub.flops import model_flops
from sft.model.load import FindModules
from sft.parallel import process_group as distributed
from sft.parallel.patches import no_masks_of_packs
from sft.parallel.pipeline import Item, Pipeline, of_other_stages, place, take_stage
from sft.parallel.sequence import share_batches
from sft.plan.job import Job
from sft.plan.pipeline import bubble, layers_of_stages
from sft.train.batches import Sequences
from sft.train.trainer import RecipeTrainer, is_plain


def modules_elsewhere(job: Job) -> FindModules | None:
    """The modules that only other stages hold, whose weights this rank need not read; None where it reads all weights.

    Adapters that start as a part of the base are found for all layers, with random numbers in their order.
    """
    lora, stages = job.recipe.model.lora, layers_of_stages(job.recipe, job.model)
    if not stages or (lora is not None and lora.takes_from_base):
        return None
    return lambda model: of_other_stages(model, stages, place(len(stages))[0])


class PipelineTrainer(RecipeTrainer):
    """RecipeTrainer whose ranks each hold a stage. transformers calls it for each micro-batch; the last call of a step runs all of them."""

    def __init__(self, job: Job, sequences: Sequences, **arguments: Any) -> None:
        stages, whole = layers_of_stages(job.recipe, job.model), arguments["model"]
        flops, (self._stage, self._replica) = model_flops(whole), place(len(stages))
        take_stage(whole, stages, self._stage)
        super().__init__(job, sequences, **arguments)
        assert is_plain(self), "sft/plan/pipeline.py lets through no other loss"
        self.work.flops = flops
        self.pipeline = Pipeline(self.model, stages, self.args.device)
        self._waiting: list[dict[str, Any]] = []

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Pipeline:
        return self.pipeline

    # Batches: all stages of a replica load the same, and the first counts them.

    @property
    def data_parallel_ranks(self) -> int:
        """Replicas of the pipeline."""
        return int(self.accelerator.num_processes) // self.job.plan.pipeline_parallel_size.value

    @property
    def data_parallel_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self._replica

    @property
    def counts_batches(self) -> bool:
        """Whether this rank accounts for its batches."""
        return self._stage == 0

    @property
    def gradients_divided_by(self) -> int:
        """1: the pipeline adds up its replicas' gradients."""
        return 1

    def get_train_dataloader(self) -> Any:
        """The batches of this rank's replica."""
        loader = super().get_train_dataloader()
        share_batches(loader, self.data_parallel_ranks, self.data_parallel_rank)
        return loader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        # transformers adds up those of all ranks.
        return super()._get_num_items_in_batch(batch_samples, device) / self.job.plan.pipeline_parallel_size.value

    # A step.

    def forward_backward(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep the micro-batch; at the step's last one run all of them."""
        self._waiting.append(self._prepare_inputs(inputs))
        if len(self._waiting) < self._batches:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        model.train()
        loss_of = partial(self.compute_loss, num_items_in_batch=num_items_in_batch)
        with no_masks_of_packs() if self.takes_boundaries else nullcontext():
            loss = self.pipeline.step(batches, loss_of, self.compute_loss_context_manager)
        return loss * int(self.accelerator.num_processes)  # transformers logs the mean over all ranks

    def of_engine(self) -> dict[str, float]:
        """The fraction of a step that stages wait, by arithmetic."""
        plan = self.job.plan
        return {"bubble": bubble(plan.pipeline_parallel_size.value, plan.gradient_accumulation_steps.value)}

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        norm = self.pipeline.gradient_norm()
        clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, self.pipeline.gradient_norm() if grad_norm is None else grad_norm)

    # Checkpoints: weights in a file of each stage, adapters in one; the optimizer's state by stage and tensor name.

    is_part = True

    @property
    def holds_tensors(self) -> bool:
        """Whether rank 0 gets this rank's tensors by `of_all_stages`."""
        return self._replica == 0

    def of_all_stages(self, items: Iterable[Item]) -> Iterator[Item]:
        """On rank 0 what each stage has."""
        return self.pipeline.collect(items)

    def _save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        own, folder = self.pipeline.own_tensors(), Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if self.job.recipe.model.lora is not None:
            state = dict(self.of_all_stages((name, one.cpu()) for name, one in own.items()))
            if self.args.should_save:
                self.model.save_pretrained(output_dir, state_dict=state)
                # peft takes those of the layers that it finds here
                save_file(state, folder / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})
        else:
            self._save_stages(own, folder)
        if self.args.should_save:
            self.processing_class.save_pretrained(output_dir)

    def _save_stages(self, own: dict[str, torch.Tensor], folder: Path) -> None:
        """Each stage writes a file of its own, so that no rank holds the whole model."""
        count = self.job.plan.pipeline_parallel_size.value
        file = f"model-{self._stage + 1:05d}-of-{count:05d}.safetensors"
        held = distributed.gather([(name, file, one.nbytes) for name, one in own.items()] if self._replica == 0 else [])
        if self._replica == 0:
            save_file({name: one.cpu().contiguous() for name, one in own.items()}, folder / file, {"format": "pt"})
            sync(folder / file)
        if self.args.should_save:
            self.model.config.architectures = [type(self.model).__name__]
            self.model.config.save_pretrained(folder)
            self.model.generation_config.save_pretrained(folder)
            total = sum(size for some in held for _, _, size in some)
            places = {name: place for some in held for name, place, _ in some}
            write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})

    def _save_optimizer(self, output_dir: str) -> None:
        if self._replica == 0:
            states = self.optimizer.optimizer.state
            own = {name: states[one] for name, one in self.pipeline.own_parameters().items() if one in states}
            torch.save(own, Path(output_dir, f"optimizer_{self.args.process_index}.pt"))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))
