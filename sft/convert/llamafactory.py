"""Converts configs of LLaMA-Factory: those of `llamafactory-cli train`, and of its v1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft.convert import sources, training, trl
from sft.convert.conversion import (
    Conversion,
    ConversionError,
    HoldsAnyway,
    Translation,
    as_list,
    as_number,
    as_whole,
    is_true,
)

_NAMED = "a name in LLaMA-Factory's dataset_info.json: write the file, the folder or the id on the hub"

_BOTH = """
cutoff_len -> data.max_length -- LLaMA-Factory shortens prompt and answer; here the end of a longer document is cut
val_size -> data.held_out -- a fraction; a number of rows becomes 1%
packing -> data.packing (false) -- documents of a pack never attend to each other here, as with neat_packing
flash_attn -> model.attn_implementation
enable_thinking -> data.reasoning -- whether reasoning content is trained
early_stopping_steps -> train.early_stopping_patience
"""
_V0 = f"""
stage -- sft is all there is
template -> model.chat_template -- chatml is ours, default is plain; for other names {training.OWN_TEMPLATE}
finetuning_type -> model.lora ("lora") -- {training.ADAPTERS}; lora is LLaMA-Factory's default
lora_rank -> model.lora.r (8)
lora_alpha -> model.lora.lora_alpha ("twice the rank")
lora_dropout use_dora use_rslora -> model.lora.*
lora_target -> model.lora.target_modules -- all is all-linear
additional_target -> model.lora.modules_to_save
pissa_init pissa_iter -> model.lora.init_lora_weights -- pissa, or pissa_niter_16
pissa_convert -- final/ holds the merged model
loraplus_* create_new_adapter mixture_of_depths shift_attn -- nothing here corresponds to it
adapter_name_or_path -- training does not start from adapters: merge them first, and name the merged model
quantization_bit quantization_type -> model.quantization -- 4 is nf4 or fp4, 8 is int8
quantization_method -> model.quantization -- bitsandbytes is the only one here
double_quantization -> model.bnb_4bit_use_double_quant
freeze_trainable_* freeze_extra_modules use_llama_pro -- all weights are trained, or adapters: model.lora
enable_liger_kernel -> model.kernels
disable_gradient_checkpointing -> train.gradient_checkpointing
rope_scaling -- model.rope_scaling, with a factor: LLaMA-Factory computes it from cutoff_len
add_special_tokens add_tokens -> model.new_tokens -- new tokens are special tokens here
use_unsloth* use_reentrant_gc upcast_* use_kv_cache use_v1_kernels -- kernels and memory: Liger's layers are the default
dataset eval_dataset -> data.train -- {_NAMED}
dataset_dir -- dataset_info.json is looked for there
max_samples -> data.train.split -- train[:1000], the first rows of each source
neat_packing -> data.packing -- documents of a pack never attend to each other here
train_on_prompt mask_history -> data.loss_on
mix_strategy interleave_probs -- give each source of data.train a weight
streaming -- data.train.streaming of a source streams it
default_system tool_format -- the chat template decides it
overwrite_cache tokenized_path media_dir -- rows are prepared on all cores, and kept
pure_bf16 -> train.precision -- the optimizer steps on an fp32 copy of the weights
use_muon -> train.optim
use_adam_mini use_galore galore_* use_apollo apollo_* use_badam badam_* -- no such optimizer here: train.optim has those there are
use_dft_loss -> train.trainer_args.loss_type
use_eaft_loss eaft_alpha use_asft_loss asft_alpha -- no such loss here
oft_* module_dropout -- orthogonal adapters are not supported: model.lora
use_kt kt_* use_mca use_hyper_parallel use_megatron_bridge -- KTransformers and Megatron are no engines here
infer_* export_dir -- about inference or export: sft chat, sft export
"""
_V1 = f"""
model -> model.name_or_path
model_class -- a causal language model is all there is
train_dataset -> data.train -- {_NAMED}
custom_chat_template -> model.chat_template -- text in the file becomes a .jinja file next to the recipe
micro_batch_size -> train.global_batch_size (1) -- {training.BATCH}
global_batch_size -> train.global_batch_size
per_device_train_batch_size -- micro_batch_size is its name in v1
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
peft_config.name -> model.lora -- {training.ADAPTERS}
peft_config.r -> model.lora.r
peft_config.lora_alpha -> model.lora.lora_alpha
peft_config.lora_dropout -> model.lora.lora_dropout
peft_config.target_modules -> model.lora.target_modules -- all is all-linear
peft_config.* -- model.lora has no such key
dist_config.name -> train.fsdp
dist_config.* -- FSDP2 needs no such setting
dist_timeout -> train.ddp_timeout
enable_activation_checkpointing -> train.gradient_checkpointing
optim_config.* lr_scheduler_config.* quant_config.* -- write it in the recipe: train.optim, train.lr_scheduler_type, model.quantization
kernel_config.* init_config.* -- Liger's layers are the default, on a GPU: model.kernels
cp_size cp_mode dp_size mp_* batching_* -- memory only: the launcher and the plan decide it
sample_backend max_new_tokens -- about sampling: sft chat
"""


def _alpha(c: Conversion, key: str, value: Any) -> Any:
    return 2 * (as_whole(c.get("lora_rank")) or 8) if value == "twice the rank" else value


def _names(c: Conversion, key: str, value: Any) -> Any:
    return "all-linear" if value == "all" else as_list(value)


def _pissa(c: Conversion, key: str, value: Any) -> str:
    if not is_true(c.get("pissa_init")):
        raise HoldsAnyway("pissa_init is not set")
    rounds = as_number(c.get("pissa_iter", 16)) or 16
    return "pissa" if rounds < 0 else f"pissa_niter_{int(rounds)}"


_TRANSLATIONS: dict[str, Translation] = {
    "data.train": lambda c, key, value: value,
    "flash_attn": {"fa2": "auto", "fa3": "auto", "sdpa": "sdpa", "auto": "auto", "disabled": "eager"},
    "disable_gradient_checkpointing": {"true": False, "false": "auto"},
    "train_on_prompt": {"true": "all", "false": "auto"},
    "mask_history": {"true": "last_assistant", "false": "auto"},
    "enable_thinking": {"true": "keep", "false": "drop"},
    "use_dft_loss": {"true": "dft"},
    "pure_bf16": {"true": "bf16"},
    "dist_config.name": {"fsdp2": {}},
    "model.lora.lora_alpha": _alpha,
    "model.lora.target_modules": _names,
    "model.lora.modules_to_save": _names,
    "model.new_tokens": _names,
    "model.lora.init_lora_weights": _pissa,
}
_V0_ROWS = trl.TRAINER | training.rows(_BOTH + _V0, _TRANSLATIONS)
_V1_ROWS = trl.TRAINER | training.rows(
    _BOTH + _V1, _TRANSLATIONS | {"train.global_batch_size": training.batch("micro_batch_size", 1, "global_batch_size")}
)
LLAMA_FACTORY = _V1_ROWS | _V0_ROWS

_STAGES = {"pt": "pretraining", "rm": "reward modelling", "ppo": "PPO", "dpo": "DPO", "kto": "KTO"}


def _refuse(c: Conversion) -> None:
    """Refuse what is no supervised fine-tuning of text.

    Raises:
        ConversionError: Its name and the key that shows it.
    """
    stage, template, data = (str(c.get(key, "")) for key in ("stage", "template", "dataset"))
    if stage not in ("", "sft"):
        raise ConversionError(
            f"{c.file} configures {_STAGES.get(stage, stage)} (stage: {stage}); only supervised fine-tuning converts."
        )
    if not is_true(c.get("do_train", True)) or (is_true(c.get("do_predict")) and not c.get("do_train")):
        raise ConversionError(
            f"{c.file} configures prediction (do_predict: {c.get('do_predict')}), which trains nothing."
        )
    if not any(c.get(key) for key in ("do_train", "finetuning_type", "stage", "train_dataset", "dataset")):
        raise ConversionError(
            f"{c.file} trains nothing: it names no dataset. It is for inference or export (sft chat, sft export)."
        )
    vision = next((key for key in c.keys if key.startswith(("image_", "video_", "audio_"))), None)
    if vision or "_vl" in template or "mllm" in data:
        raise ConversionError(
            f"{c.file} configures vision ({vision or f'template: {template}, dataset: {data}'}); only supervised fine-tuning of text "
            "converts."
        )


def convert(c: Conversion) -> None:
    """Convert a config of LLaMA-Factory.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    _refuse(c)
    c.settings["data.overlong"] = "truncate"
    train = _sources(c, "dataset", "data.train") + _sources(c, "train_dataset", "data.train")
    sources.set_sources(c, train, _sources(c, "eval_dataset", "data.held_out"))
    if c.has("max_samples"):
        c.account("max_samples", "data.train.split: the first rows of each source")
    training.apply(c, _V0_ROWS if "model_name_or_path" in c.keys else _V1_ROWS)


def _sources(c: Conversion, key: str, to: str) -> list[dict[str, Any]]:
    found = []
    if c.has(key):
        infos = {name: _info(c, name) for name in as_list(c.get(key))}
        found = [info or {"path": name} for name, info in infos.items()]
        c.account(key, f"{to}: {', '.join(infos)}", _NAMED if None in infos.values() else "as dataset_info.json says")
        if None in infos.values():
            c.comments.setdefault(to, []).append(f"{key}: {_NAMED}")
    rows = as_whole(c.get("max_samples"))
    return [one | {"split": f"{one.get('split', 'train')}[:{rows}]"} for one in found] if rows else found


_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS |= {name: name for name in ("history", "messages", "system", "tools")}


def _info(c: Conversion, name: str) -> dict[str, Any] | None:
    """What dataset_info.json says about a name, if it is here."""
    file = Path(str(c.get("dataset_dir", "data"))) / "dataset_info.json"
    try:
        info = json.loads(file.read_text(encoding="utf-8"))[name]
        path = info.get("hf_hub_url") or file.parent / info["file_name"]
        named = dict(info.get("columns", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    source: dict[str, Any] = {"path": str(path)}
    source |= {ours: str(info[theirs]) for theirs, ours in (("subset", "name"), ("split", "split")) if info.get(theirs)}
    columns = {_COLUMNS[theirs]: str(column) for theirs, column in named.items() if theirs in _COLUMNS}
    columns = {ours: theirs for ours, theirs in columns.items() if theirs not in (ours, "conversations")}
    return source | ({"columns": columns} if columns else {})
