"""Adapts the recipe and the plan to TRL and transformers: the only file that spells their arguments."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from accelerate import ParallelismConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import get_scheduler
from trl import SFTConfig

from sft.errors import RecipeError, did_you_mean
from sft.model.weight_checks import DTYPES
from sft.parallel.fsdp import plugin_arguments, policies
from sft.parallel.tensor import parallelism_config
from sft.plan.job import Job
from sft.plan.parallelism import mesh_shape
from sft.plan.schedule import TIMESCALE, decay_steps
from sft.run.directory import Run
from sft.train.optimizers import steps_on_copies

SCHEDULES = {
    "cosine": "cosine_with_min_lr",
    "cosine_with_min_lr": "cosine_with_min_lr",
    "linear": "linear",
    # transformers' `constant` ignores the warmup.
    "constant": "constant_with_warmup",
    "constant_with_warmup": "constant_with_warmup",
    "warmup_stable_decay": "warmup_stable_decay",
    "inverse_sqrt": "inverse_sqrt",
    "polynomial": "polynomial",
}


def schedule_arguments(job: Job) -> dict[str, Any]:
    """What transformers' schedule takes beside the steps of the run and of the warmup."""
    train, plan = job.recipe.train, job.plan
    arguments: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": train.min_lr_ratio},
        "warmup_stable_decay": {
            "num_decay_steps": decay_steps(train, plan.max_steps.value or 1),
            "decay_type": train.lr_decay_type,
            "min_lr_ratio": train.min_lr_ratio,
        },
        "inverse_sqrt": {"timescale": plan.warmup_steps.value or TIMESCALE},
        "polynomial": {"lr_end": train.min_lr_ratio * plan.learning_rate.value, "power": train.lr_power},
    }
    return arguments.get(SCHEDULES[train.lr_scheduler_type], {})


def planned_schedule(job: Job, steps: int) -> Any:
    """transformers' schedule of so many steps as planned, over an optimizer of its own; the runtime check compares the live one with it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=job.plan.learning_rate.value)
    name, warmup = SCHEDULES[job.recipe.train.lr_scheduler_type], job.plan.warmup_steps.value or 0
    return get_scheduler(name, optimizer, warmup, steps, schedule_arguments(job))


def _planned_arguments(job: Job, run: Path) -> dict[str, Any]:
    """Everything that the recipe and the plan decide, under SFTConfig's names."""
    recipe, plan, train = job.recipe, job.plan, job.recipe.train
    return {
        "output_dir": str(run / "checkpoints"),
        "run_name": f"{run.parent.name}-{run.name}",
        "per_device_train_batch_size": plan.micro_batch_size.value,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps.value,
        "max_steps": plan.max_steps.value or 1,
        "num_train_epochs": train.num_train_epochs,
        "learning_rate": plan.learning_rate.value,
        "lr_scheduler_type": SCHEDULES[train.lr_scheduler_type],
        "lr_scheduler_kwargs": schedule_arguments(job),
        "warmup_steps": plan.warmup_steps.value or 0,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm,
        # Autocast is for fp32 weights: bf16 weights compute in bf16 without it. DeepSpeed reads the same name; FSDP2 has a policy.
        "bf16": plan.precision.value == "bf16" and not steps_on_copies(job) and job.fsdp is None,
        "fp16": plan.precision.value == "fp16",
        "optim": "adamw_torch_fused",
        # Without it each rank of a CPU job trains on its own.
        "use_cpu": job.hardware.gpu is None,
        "gradient_checkpointing": bool(plan.gradient_checkpointing.value),
        "gradient_checkpointing_kwargs": _checkpointing_arguments(plan.gradient_checkpointing.value),
        "seed": train.seed,
        "save_strategy": "no" if train.save_strategy == "no" else "steps",
        "save_steps": job.save_steps,
        "save_total_limit": train.save_total_limit,
        "logging_steps": train.logging_steps,
        "logging_first_step": True,
        "report_to": list(recipe.tracking.report_to) or "none",
        "project": recipe.tracking.project,  # trackio's; the others read it from the environment
        # The filter would hide losses that are not finite, and wait for the device at each micro-batch.
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "deepspeed": _deepspeed(job),
        "parallelism_config": parallelism_config(job),
        # transformers cannot save the optimizer of tensor-parallel layers; RecipeTrainer can, and resets this.
        "save_only_model": train.tensor_parallel_size > 1,
        "max_length": recipe.sequence_length,
        "packing": recipe.data.packing,
        "packing_strategy": "bfd",
        # For groups that transformers makes; sft/parallel/process_group.py has made the one of all ranks.
        "ddp_timeout": train.ddp_timeout,
        # Else the collator would not see the numbers of its sequences.
        "remove_unused_columns": False,
        # The documents come tokenized, masked and packed; TRL's own preparation is not needed.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        # A causal language model uses every weight; looking for unused ones costs a walk of the graph each step.
        "ddp_find_unused_parameters": False,
        # The loss is divided by the target tokens of the whole step, over all ranks.
        "average_tokens_across_devices": True,
        # Batches are in pinned memory there: the host need not wait for what it has queued on the GPU before.
        "accelerator_config": _copies(job),
        **_sharding_arguments(job),
    }


def _copies(job: Job) -> dict[str, Any]:
    return {"non_blocking": job.hardware.gpu is not None}


def _deepspeed(job: Job) -> dict[str, Any] | None:
    if job.deepspeed is None:
        return None
    # sft/plan/optimizer.py lets through what was tested.
    return job.deepspeed.config | ({} if job.recipe.train.optim == "adamw" else {"zero_allow_untested_optimizer": True})


def _sharding_arguments(job: Job) -> dict[str, Any]:
    """FSDP2's; none under another engine."""
    if job.fsdp is None:
        return {}
    copies, shards = mesh_shape(job.fsdp, job.hardware)
    # Otherwise each rank would hold the gradients of all weights until the last micro-batch of the step.
    reduced: dict[str, Any] = {
        "accelerator_config": _copies(job) | {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    }
    if copies > 1:
        reduced["parallelism_config"] = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)
    return {"fsdp": True, "fsdp_config": plugin_arguments(job.fsdp), **reduced}


def _checkpointing_arguments(planned: bool | int | str) -> dict[str, Any] | None:
    if not planned:
        return None
    every = {"every_n_layers": planned} if planned is not True and isinstance(planned, int) else {}
    return {"use_reentrant": False, **every} | ({"offload": True} if planned == "offload" else {})


# Fields of SFTConfig that would decide a second time, or behind the plan's back, what something else decides.
_DECIDED_BY = {
    "data.held_out and train.eval_steps": "do_eval eval_on_start eval_steps eval_strategy",
    "data.loss_on": "assistant_only_loss completion_only_loss",
    "data.overlong": "truncation_mode",
    "data.packing": "eval_packing padding_free",
    "data.train": "dataset_num_proc dataset_text_field",
    "metrics.jsonl, which counts the tokens": "include_num_input_tokens_seen",
    "model.chat_template": "chat_template_path",
    "model.compile": "torch_compile torch_compile_backend torch_compile_mode",
    "model.eos_token": "eos_token",
    "model.kernels": "liger_kernel_config use_liger_kernel",
    "model.pad_token": "pad_token",
    "model.trust_remote_code": "trust_remote_code",
    "the keys of `model`": "model_init_kwargs",
    "scripts/export.sh, which uploads the finished model": (
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy push_to_hub"
    ),
    "train.lr_scheduler_type and the keys of its schedule": "lr_scheduler_kwargs lr_scheduler_type",
    "train.optim and train.optim_args": "optim optim_args optim_target_modules",
    "train.label_smoothing_factor": "label_smoothing_factor",
    "train.neftune_noise_alpha": "neftune_noise_alpha",
    "the engine: train.deepspeed or train.fsdp": "fsdp fsdp_config",
    "the launcher": "ddp_backend",
    "the plan": "accelerator_config dataloader_drop_last",
    "train.gradient_checkpointing": "activation_checkpointing activation_checkpointing_kwargs activation_offloading",
    "train.load_best_model_at_end": "greater_is_better load_best_model_at_end metric_for_best_model",
    "train.logging_steps": "logging_strategy",
    "train.max_time and the signals that stop a run": "enable_jit_checkpoint",
    "train.micro_batch_size": "auto_find_batch_size",
    "train.resume": "ignore_data_skip resume_from_checkpoint",
    "train.seed": "data_seed length_column_name shuffle_dataset train_sampling_strategy",
}
SECOND_WAYS = {name: decider for decider, names in _DECIDED_BY.items() for name in names.split()}


class _Validated(SFTConfig):  # type: ignore[misc]
    """SFTConfig whose types pydantic checks, and which joins no process group for its device."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    device = torch.device("cpu")


def _refused_by_loader(extra: dict[str, Any]) -> list[str]:
    """What torch's DataLoader would refuse once the weights are loaded."""
    rows: Any = [0]
    names = {name: name.removeprefix("dataloader_") for name in extra if name.startswith("dataloader_")}
    try:
        torch.utils.data.DataLoader(rows, **{short: extra[name] for name, short in names.items()})
    except (TypeError, ValueError) as error:
        return [f"{', '.join(names)}: torch's DataLoader refuses it: {error}"]
    return []


def _refused_by_trl(extra: dict[str, Any], on_cpu: bool) -> list[str]:
    # tf32 is refused by what this machine has, and the plan may be for another.
    given = {name: value for name, value in extra.items() if name != "tf32"}
    try:
        with catch_warnings(action="ignore"):  # of what the plan decides
            TypeAdapter(_Validated).validate_python(
                {"output_dir": "", "report_to": "none", "use_cpu": on_cpu, "bf16": False} | given
            )
    except ValidationError as error:
        return [
            f"{one['loc'][0]}: {one['msg']}, got {one['input']!r}" if one["loc"] else one["msg"]
            for one in error.errors()
        ]
    return []


def check_trainer_args(job: Job) -> None:
    """Refuse in train.trainer_args what SFTConfig does not know or take, and what the recipe or the plan decides: a RecipeError."""
    extra = job.recipe.train.trainer_args
    if not extra:
        return
    known = {field.name for field in fields(SFTConfig) if field.init}
    planned = _planned_arguments(job, Path("recipe/run"))
    lines = []
    for name, value in extra.items():
        if name not in known:
            lines.append(f"{name}: unknown to trl.SFTConfig{did_you_mean(name, sorted(known))}")
        elif name == "hub_token":
            lines.append("hub_token: a secret does not belong in a recipe; log in with `hf auth login`")
        elif name in SECOND_WAYS or name in planned:
            decider = SECOND_WAYS.get(name, "the recipe's own keys and the plan")
            lines.append(f"{name}: decided by {decider}")
        elif name == "loss_type" and value not in ("nll", "dft"):
            # SFTConfig takes any; the trainer refuses them after the weights are loaded.
            lines.append(f"loss_type: must be `nll` or `dft`, got {value!r}")
    lines = lines or _refused_by_trl(extra, job.hardware.gpu is None) or _refused_by_loader(extra)
    if lines:
        raise RecipeError("\n  ".join(["train.trainer_args:", *lines]))


def training_arguments(job: Job, run: Run) -> SFTConfig:
    """TRL's configuration of the job. Must exist before the model loads: ZeRO-3 shards it while it loads."""
    try:
        arguments = SFTConfig(**_planned_arguments(job, run.path), **job.recipe.train.trainer_args)
    except (TypeError, ValueError) as error:
        if not job.recipe.train.trainer_args:
            raise
        raise RecipeError(f"train.trainer_args: {error}") from None
    if job.fsdp is not None:  # SFTConfig has no names for these
        arguments.fsdp_plugin_args |= policies(job.fsdp, DTYPES[job.plan.precision.value], job.hardware.gpu is not None)
    return arguments
