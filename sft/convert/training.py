"""Holds the keys that several tools share, most of them of transformers' TrainingArguments, and translates values to ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from sft.convert.conversion import (
    Changed,
    Conversion,
    ConversionError,
    HoldsAnyway,
    NotCarried,
    Row,
    Translate,
    Translation,
    as_number,
    as_whole,
    is_true,
    refusal,
    shown,
    table,
)
from sft.recipe.load import find_file

ADAPTERS = "adapters are trained where model.lora is given; final/ is the merged model"
OWN_TEMPLATE = "the tokenizer's own chat template is used; if it has none, set model.chat_template"
BATCH = "per GPU; a recipe states the batch over all GPUs, so --gpus is needed"

_SHARED = """
model_revision -> model.revision
trust_remote_code -> model.trust_remote_code -- only with a commit as revision: the code of models in transformers needs none
attn_implementation -> model.attn_implementation
deepspeed -> train.deepspeed -- the file of ds_configs/ with the same stage, where the one named is not here
deepspeed.* -- a DeepSpeed file of your own may be named in train.deepspeed
fsdp -> train.fsdp -- FSDP2
fsdp_config.fsdp_sharding_strategy fsdp_config.sharding_strategy -> train.fsdp.sharding_strategy
fsdp_config.fsdp_reshard_after_forward fsdp_config.reshard_after_forward -> train.fsdp.sharding_strategy
fsdp_config.fsdp_offload_params fsdp_config.offload_params -> train.fsdp.offload_params
fsdp_config.fsdp_state_dict_type fsdp_config.state_dict_type -> train.fsdp.state_dict_type
fsdp_config.fsdp_activation_checkpointing fsdp_config.activation_checkpointing -> train.gradient_checkpointing
fsdp_config.* fsdp_version fsdp_final_state_dict_type -- FSDP2 wraps each decoder layer and needs no such setting; final/ is a full model
max_steps learning_rate num_train_epochs -> train.*
lr_scheduler_type -> train.lr_scheduler_type
lr_scheduler_kwargs.min_lr lr_scheduler_kwargs.lr_end lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr_ratio -> train.min_lr_ratio
lr_scheduler_kwargs.num_decay_steps -> train.lr_decay_steps
lr_scheduler_kwargs.decay_type -> train.lr_decay_type
lr_scheduler_kwargs.power -> train.lr_power
lr_scheduler_kwargs.* -- no schedule has such an argument here
warmup_steps warmup_ratio -> train.*
optim -> train.optim
optim_args optim_args.* -- train.optim_args takes the arguments of lion, adafactor and muon
adam_beta1 adam_epsilon -> train.*
adam_beta2 -> train.adam_beta2 (0.999)
weight_decay max_grad_norm label_smoothing_factor neftune_noise_alpha -> train.*
bf16 fp16 -> train.precision
tf32 -- where train.precision is fp32, set train.trainer_args.tf32
torch_dtype dtype -- the dtype of the weights follows from train.precision
fp8* -- float8 is not supported
gradient_checkpointing activation_checkpointing -> train.gradient_checkpointing
gradient_checkpointing_kwargs.* activation_checkpointing_kwargs.* -- always without reentry; the results are the same
activation_offloading -- train.gradient_checkpointing: offload keeps each layer's input in CPU memory
torch_compile -> model.compile -- each decoder layer is compiled, instead of Liger's layers; not with ZeRO-3 or quantization
torch_compile_* -- model.compile takes no options
seed -> train.seed -- rows are drawn differently
data_seed -> data.seed -- rows are drawn differently
early_stopping_patience load_best_model_at_end metric_for_best_model greater_is_better -> train.*
eval_steps -> train.eval_steps
save_steps save_strategy -> train.*
ddp_timeout logging_steps save_total_limit -> train.*
eval_strategy evaluation_strategy do_eval
eval_delay eval_on_start -- the eval loss is measured every train.eval_steps, or at each checkpoint, where data.held_out is set
per_device_eval_batch_size eval_accumulation_steps *_full_eval -- the eval loss takes the batch of the training
group_by_length train_sampling_strategy length_column_name -- rows are shuffled by train.seed
remove_unused_columns dataset_num_proc preprocessing_* pad_to_multiple_of padding_free
eval_packing -- our own preparation renders and packs the rows
report_to -> tracking.report_to
project -> tracking.project
run_name -> tracking.run_name
use_swanlab swanlab_* use_comet comet_* -- no tracker here: tracking.report_to has those there are
output_dir -> output_dir -- runs go to a folder of their own below it: <output_dir>/<recipe>/<run>
resume_from_checkpoint auto_resume_from_checkpoints -- a run resumes by itself: train.resume
overwrite_output_dir -- finished runs are never overwritten
hub_* push_to_hub* -- sft export --to hub uploads the finished model; a token does not belong in a recipe
save_only_model save_safetensors save_on_each_node -- checkpoints hold what a resumed run needs
local_rank ddp_* use_ray ray_* device* low_cpu_mem_usage auto_find_batch_size dataloader_drop_last -- the launcher and the plan decide it
dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers -> train.trainer_args.*
torch_empty_cache_steps full_determinism loss_type router_aux_loss_coef -> train.trainer_args.*
"""

_FLASH = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "kernels-community/flash-attn3")
_STRATEGIES = {name: name for name in ("full_shard", "shard_grad_op", "hybrid_shard")}
_BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience")


def batch(per_gpu: str, default: int, total: str = "") -> Translate:
    """How the sequences per GPU become the global batch of a recipe, unless the file gives that under the name `total`.

    Raises:
        ConversionError: (When it translates.) The number of GPUs is missing or does not divide.
    """
    sharing = "tensor_parallel_size context_parallel_size sequence_parallel_degree tensor_parallel_dim context_parallel_dim".split()

    def translate(c: Conversion, key: str, value: Any) -> Any:
        if whole := as_whole(c.get(total)):
            return whole
        size, steps = as_whole(c.get(per_gpu, default)), as_whole(c.get("gradient_accumulation_steps", 1))
        if size is None or steps is None:
            raise ConversionError(
                f"{c.file}: {key}={value} is no number of sequences or micro-batches. Write a whole number of at least 1."
            )
        if c.gpus is None:
            raise ConversionError(
                f"{c.file}: {per_gpu} is per GPU, and a recipe states the batch over all GPUs. Add --gpus N, the number of GPUs that this "
                "file was used on."
            )
        together = prod(as_whole(c.get(name)) or 1 for name in sharing)
        if c.gpus % together:
            raise ConversionError(
                f"--gpus {c.gpus} is no multiple of the {together} GPUs that share a batch in {c.file}."
            )
        shared = f" / {together} that share a batch" if together > 1 else ""
        why = f"{size} per GPU x {steps} accumulated x {c.gpus} GPUs{shared}; accumulation follows from it on any number of GPUs"
        return Changed(size * steps * (c.gpus // together), why)

    return translate


def _remote_code(c: Conversion, key: str, value: Any) -> bool:
    if is_true(value) and not re.fullmatch(r"[0-9a-f]{40}", str(c.get("model_revision"))):
        raise NotCarried(
            "transformers' models need none; where yours does, set model.revision to a commit, and this key"
        )
    return is_true(value)


def _adapters(c: Conversion, key: str, value: Any) -> Changed:
    if str(value).lower() in ("false", "full"):
        raise HoldsAnyway("all weights are trained")
    if not is_true(value) and value not in ("lora", "qlora"):
        raise NotCarried(f"{shown(value)} is not supported; all weights are trained, or adapters: model.lora")
    return Changed({}, ADAPTERS)


def _layers(c: Conversion, key: str, value: Any) -> Any:
    return "all-linear" if value in ("all", ["all"], ["all-linear"]) else value


def _quantization(c: Conversion, key: str, value: Any) -> Any:
    """The kind of bitsandbytes' weights, from whichever of the flags a tool has."""
    bits = as_whole(c.get("quantization_bit"))
    if str(c.get("quantization_method", "bnb")).lower() not in ("bnb", "bitsandbytes"):
        raise NotCarried(f"quantized by {c.get('quantization_method')}; bitsandbytes is the only way here")
    is_quantized = is_true(c.get("load_in_4bit")) or is_true(c.get("load_in_8bit")) or bits in (4, 8)
    if not is_quantized or (key.startswith("load_in") and not is_true(value)):
        raise HoldsAnyway("not set")
    if "model.lora" not in c.settings:
        raise NotCarried("no adapters are trained, and quantized weights alone cannot be")
    if is_true(c.get("load_in_8bit")) or bits == 8:
        return "int8"
    kinds = ("bnb_4bit_quant_type", "bnb_config_kwargs.bnb_4bit_quant_type", "quantization_type")
    return next((c.get(kind) for kind in kinds if c.get(kind)), "nf4")


def _chat_template(c: Conversion, key: str, value: Any) -> Any:
    """A template in the file becomes a file beside the recipe; of the names, we have two."""
    if "{" in str(value):
        name = f"{Path(c.file).stem}.jinja"
        c.templates[name] = str(value)
        return Changed(name, "a chat template is a file of its own; -o writes it beside the recipe")
    if value == "default":
        return Changed("plain", "default writes roles as words, as plain does")
    if value == "chatml" or str(value).endswith((".jinja", ".j2")):
        return value
    raise NotCarried(f"{shown(value)}: {OWN_TEMPLATE}")


def _deepspeed(c: Conversion, key: str, value: Any) -> Any:
    path = str(value)
    if find_file(path).is_file():
        return path
    stage = re.search(r"z(?:ero)?[_-]?([0-3])", Path(path).name.lower())
    if stage is None or stage[1] == "0":
        raise NotCarried(
            f"{path} is not here, or names no ZeRO stage: set train.deepspeed to a file of ds_configs/ or your own"
        )
    name = f"zero{stage[1]}" + ("_offload" if "offload" in path.lower() and stage[1] != "1" else "")
    return Changed(name, f"{path} is not here: ds_configs/{name}.json is the same stage")


def _fsdp(c: Conversion, key: str, value: Any) -> Any:
    words = " ".join(map(str, value if isinstance(value, list) else [value])).lower()
    if words in ("false", "none") or "no_shard" in words:
        raise HoldsAnyway("not used")
    if "train.deepspeed" in c.settings:
        raise NotCarried("the engine is DeepSpeed, which the file names too")
    strategy = next((one for one in _STRATEGIES if one in words), None)
    named = {"sharding_strategy": strategy} if strategy else {}
    offload = {"offload_params": True} if "offload" in words else {}
    return Changed(named | offload, "FSDP2, with each decoder layer wrapped")


def _max_steps(c: Conversion, key: str, value: Any) -> Any:
    if (as_number(value) or 0) <= 0:
        raise HoldsAnyway("no limit: the epochs decide")
    return value


def _schedule(c: Conversion) -> str:
    name = str(c.get("lr_scheduler_type", c.get("lr_scheduler", "")))
    return name.lower().removeprefix("schedulertype.")


def _schedule_name(c: Conversion, key: str, value: Any) -> Any:
    lasts = [c.get(f"lr_scheduler_kwargs.{name}") for name in ("min_lr", "min_lr_rate")]
    if _schedule(c) == "cosine_with_min_lr" and 0 in lasts:
        return Changed("cosine", "which ends at 0")
    return _schedule(c) or value


def _compile(c: Conversion, key: str, value: Any) -> Any:
    if not is_true(value):
        raise HoldsAnyway("not compiled")
    if "model.quantization" in c.settings or str(c.settings.get("train.deepspeed")).startswith("zero3"):
        raise NotCarried("model.compile does not work with quantized weights, nor with ZeRO-3")
    return Changed(True, "each decoder layer is compiled, instead of Liger's layers")


def _last_rate(c: Conversion, key: str, value: Any) -> Any:
    if as_number(value) == 0:
        raise HoldsAnyway("the schedule ends at 0")
    if not key.endswith((".min_lr", ".lr_end")):
        return value
    rate, last = as_number(c.settings.get("train.learning_rate")), as_number(value)
    if not rate or last is None:
        raise NotCarried("train.min_lr_ratio is a fraction of the learning rate, which the file does not state")
    return Changed(float(f"{last / rate:.12g}"), "as a fraction of the learning rate")


def _warmup(c: Conversion, key: str, value: Any) -> Any:
    number, steps = as_number(value), as_number(c.get("warmup_steps"))
    if number and _schedule(c) == "constant":
        raise NotCarried("the schedule `constant` has no warmup")
    if key == "warmup_ratio" and steps:
        raise NotCarried(f"warmup_steps is given too, and {c.tool} takes that")
    if key == "warmup_ratio" and not number:
        return Changed(0, "none", "train.warmup_steps")
    if key == "warmup_steps" and number and 0 < number < 1:
        return Changed(number, "below 1 it is a fraction of all steps", "train.warmup_ratio")
    return value


_OPTIMIZERS = {
    **dict.fromkeys("adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused torch.optim.adamw".split(), ("adamw", "")),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw8bit"), ("adamw_8bit", "")),
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), ("adamw_8bit", "that of bitsandbytes")),
    "pagedadamw8bit": ("paged_adamw_8bit", ""),
    **dict.fromkeys(
        ("paged_adamw", "paged_adamw_32bit", "pagedadamw"),
        ("adamw", "with states on the GPU: only 8-bit ones are paged here"),
    ),
    **dict.fromkeys(
        "lion lion_32bit lion_8bit paged_lion_8bit paged_lion_32bit".split(),
        ("lion", "with fp32 states on the GPU, and Lion's own betas: train.optim_args"),
    ),
    "muon": ("muon", "torch.optim.Muon, its step scaled to AdamW's"),
}
"""Their names, ours, and what differs."""


def _optimizer(c: Conversion) -> tuple[str, str]:
    """The optimizer and what differs, once the engine is known: 8-bit states are not sharded."""
    named = next((c.get(key) for key in ("optim", "optimizer", "optimizer._component_") if c.get(key)), "adamw")
    theirs = "muon" if is_true(c.get("use_muon")) else str(named).lower().removeprefix("bitsandbytes.optim.")
    name, why = _OPTIMIZERS.get(theirs, (theirs, ""))
    if name.endswith("8bit") and ("train.deepspeed" in c.settings or "train.fsdp" in c.settings):
        return "adamw", "its 8-bit states cannot be sharded; fp32 ones are, and take more memory"
    return name, why


def _adam(c: Conversion, key: str, value: Any) -> Any:
    if _optimizer(c)[0] in ("lion", "adafactor"):
        raise NotCarried("lion and adafactor take train.optim_args")
    return value


def _precision(c: Conversion, key: str, value: Any) -> str:
    if str(c.get("bf16")).lower() == "auto":
        return "auto"
    if is_true(c.get("bf16")) or is_true(c.get("fp16")):
        return "bf16" if is_true(c.get("bf16")) else "fp16"
    return "fp32" if c.get("bf16") is not None or c.tool == "transformers" else "auto"


def _keeps_best(c: Conversion) -> bool:
    wanted = is_true(c.get("load_best_model_at_end")) or any(key.startswith("early_stopping") for key in c.keys)
    metric = c.get("metric_for_best_model", "eval_loss")
    return wanted and "data.held_out" in c.settings and metric in ("eval_loss", "loss")


def _best(c: Conversion, key: str, value: Any) -> Any:
    if key == "load_best_model_at_end" and not is_true(value):
        raise HoldsAnyway("not set")
    if not _keeps_best(c):
        raise NotCarried(
            "the best checkpoint is that of the lowest eval_loss, where data.held_out and load_best_model_at_end are set"
        )
    c.settings["train.load_best_model_at_end"] = True
    return "eval_loss" if key == "metric_for_best_model" else value


def _interval(c: Conversion, key: str, value: Any) -> Any:
    if _keeps_best(c) and as_whole(c.get("eval_steps")):
        why = "the eval loss is measured at each checkpoint, so that the best one is there"
        return Changed(as_whole(c.get("eval_steps")), why, "train.save_steps")
    return value


def _run_name(c: Conversion, key: str, value: Any) -> Any:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")
    why = "" if name == value else "it also names the run's folder: letters, digits, `.`, `_` and `-`"
    return Changed(name, why)


def _trackers(c: Conversion, key: str, value: Any) -> Any:
    names = [str(one).lower() for one in (value if isinstance(value, list) else [value])]
    known = [one for one in names if not refusal("tracking.report_to", [one])]
    others = [one for one in names if one not in (*known, "none")]
    if others and not known:
        raise NotCarried(f"no tracker here is named {', '.join(others)}; metrics.jsonl has the curves")
    return Changed(known, f"without {', '.join(others)}" if others else "")


def _held_out(c: Conversion, key: str, value: Any) -> Any:
    """The size of the eval split: a fraction, or a number of rows."""
    size = as_number(value)
    if "data.held_out" in c.settings:
        raise NotCarried("datasets of their own are the eval split")
    if size is None or size <= 0:
        raise HoldsAnyway("no eval split")
    return size if size < 1 else Changed(0.01, f"{size:g} rows there, and a fraction of the rows here")


_TRANSLATIONS: dict[str, Translation] = {
    "model.trust_remote_code": _remote_code,
    "model.attn_implementation": dict.fromkeys((*_FLASH, "auto"), "auto") | {"sdpa": "sdpa", "eager": "eager"},
    "model.kernels": {"true": "auto", "false": "none"},
    "model.chat_template": _chat_template,
    "model.lora": _adapters,
    "model.lora.target_modules": _layers,
    "model.quantization": _quantization,
    "train.deepspeed": _deepspeed,
    "train.fsdp": _fsdp,
    "train.fsdp.sharding_strategy": {"true": "full_shard", "false": "shard_grad_op"} | _STRATEGIES,
    "train.fsdp.state_dict_type": {"full_state_dict": "full", "sharded_state_dict": "sharded"},
    "train.gradient_checkpointing": {"true": True, "false": False, "offload": "offload", "offload_disk": "offload"},
    "model.compile": _compile,
    "train.precision": _precision,
    "train.max_steps": _max_steps,
    "train.lr_scheduler_type": _schedule_name,
    "train.min_lr_ratio": _last_rate,
    "train.warmup_steps": _warmup,
    "train.warmup_ratio": _warmup,
    "train.optim": lambda c, key, value: Changed(*_optimizer(c)),
    **dict.fromkeys(("train.adam_beta1", "train.adam_beta2", "train.adam_epsilon"), _adam),
    "data.held_out": _held_out,
    **dict.fromkeys((f"train.{name}" for name in _BEST), _best),
    "train.eval_steps": _interval,
    "train.save_steps": _interval,
    "train.save_strategy": {"no": "no", "false": "no", "steps": "steps", "epoch": "epoch"},
    "tracking.report_to": _trackers,
    "tracking.run_name": _run_name,
}
"""By our key."""


def rows(text: str, translations: Mapping[str, Translation] | None = None) -> dict[str, Row]:
    """A table of keys, with the translations that tools share and a tool's own."""
    return table(text, _TRANSLATIONS | dict(translations or {}))


SHARED = rows(_SHARED)


def apply(c: Conversion, rows: Mapping[str, Row]) -> None:
    """Convert the keys of the tools that shard as accelerate does: FSDP's settings alone turn it on."""
    strategy = str(c.get("fsdp_config.fsdp_sharding_strategy", c.get("fsdp"))).lower()
    if any(key.startswith("fsdp_config.") for key in c.keys) and "no_shard" not in strategy and not c.get("deepspeed"):
        c.settings["train.fsdp"] = {}
    c.apply(rows)
