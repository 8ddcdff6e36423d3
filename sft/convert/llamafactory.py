"""Converts configs of LLaMA-Factory: those of `llamafactory-cli train`, and of its v1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft.convert import engine, model, sources, training, trl
from sft.convert.conversion import Conversion, ConversionError, as_list, as_number, as_whole, is_true, table

_NAMED = "a name in LLaMA-Factory's dataset_info.json: write the file, the folder or the id on the hub"

_OWN = f"""
template -> model.chat_template -- chatml is ours, default is plain; for other names {model.OWN_TEMPLATE}
finetuning_type -> model.lora -- lora is LLaMA-Factory's default; full trains all weights, as a recipe without model.lora does
lora_rank -> model.lora.r (8)
lora_alpha -> model.lora.lora_alpha -- twice the rank where it is not given
lora_dropout use_dora use_rslora -> model.lora.*
lora_target -> model.lora.target_modules -- all is all-linear
additional_target -> model.lora.modules_to_save
pissa_init pissa_iter -> model.lora.init_lora_weights -- pissa, or pissa_niter_16
pissa_convert -- final/ holds the merged model
loraplus_lr_ratio loraplus_lr_embedding create_new_adapter mixture_of_depths shift_attn -- nothing here corresponds to it
adapter_name_or_path -- training does not start from adapters: merge them first, and name the merged model
quantization_bit quantization_type -> model.quantization -- 4 is nf4 or fp4, 8 is int8
quantization_method -> model.quantization -- bitsandbytes is the only one here
double_quantization -> model.bnb_4bit_use_double_quant
freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro -- all weights are trained, or adapters: model.lora
flash_attn -> model.attn_implementation
enable_liger_kernel -> model.kernels
disable_gradient_checkpointing -> train.gradient_checkpointing
rope_scaling -- model.rope_scaling, with a factor: LLaMA-Factory computes it from cutoff_len
resize_vocab -- the embeddings get as many rows as model.new_tokens need
add_special_tokens add_tokens -> model.new_tokens -- new tokens are special tokens here
use_fast_tokenizer split_special_tokens -- text that spells special tokens is escaped: data.special_tokens
use_unsloth use_unsloth_gc use_reentrant_gc upcast_layernorm upcast_lmhead_output -- kernels and memory: Liger's layers are the default
low_cpu_mem_usage use_v1_kernels use_kv_cache -- kernels and memory: the plan decides
dataset eval_dataset -> data.train -- {_NAMED}
dataset_dir -- dataset_info.json is looked for there
cutoff_len -> data.max_length -- LLaMA-Factory shortens prompt and answer; here the end of a longer document is cut
max_samples -> data.train.split -- train[:1000], the first rows of each source
val_size -> data.held_out -- a fraction; a number of rows becomes 1%
packing -> data.packing (false) -- documents of a pack never attend to each other here, as with neat_packing
neat_packing -> data.packing -- documents of a pack never attend to each other here
train_on_prompt mask_history -> data.loss_on
mix_strategy interleave_probs -- a source of data.train can have a weight
streaming -- data.train.streaming of a source streams it
enable_thinking -> data.reasoning -- whether reasoning content is trained
default_system tool_format preserve_thinking -- the chat template decides it
overwrite_cache preprocessing_num_workers preprocessing_batch_size tokenized_path -- rows are prepared on all cores, and kept
data_shared_file_system buffer_size ignore_pad_token_for_loss eval_on_each_dataset media_dir -- rows are prepared on all cores
stage -- sft is all there is
pure_bf16 -> train.precision -- the optimizer steps on an fp32 copy of the weights
use_muon -> train.optim
use_adam_mini use_galore galore_layerwise galore_target galore_rank galore_scale apollo_rank
galore_update_interval galore_proj_type use_apollo
apollo_layerwise apollo_target apollo_scale -- no such optimizer here: train.optim has those there are
apollo_scale_type use_badam badam_mode badam_switch_mode badam_switch_interval badam_verbose -- no such optimizer here: train.optim
use_dft_loss -> train.trainer_args.loss_type
use_eaft_loss eaft_alpha use_asft_loss asft_alpha -- no such loss here
early_stopping_steps -> train.early_stopping_patience
compute_accuracy -- eval.tasks measure the model
include_effective_tokens_per_second -- metrics.jsonl has tokens per second
disable_shuffling -- rows are shuffled by train.seed
use_swanlab swanlab_project swanlab_mode -- no tracker here: tracking.report_to has those there are
oft_rank oft_block_size oft_target module_dropout -- orthogonal adapters are not supported: model.lora
use_kt kt_config.* kt_cpu_activation kt_weight_path -- KTransformers is no engine here
use_mca use_hyper_parallel use_megatron_bridge -- Megatron is no engine here
fp8 fp8_backend fp8_enable_fsdp_float8_all_gather -- float8 is not supported
use_ray ray_run_name ray_num_workers resources_per_worker placement_strategy -- Ray is no launcher here
infer_backend infer_dtype vllm_maxlen export_dir offload_folder -- about inference or export: sft chat, sft export
cache_dir -- HF_HOME says where downloads are kept
print_param_status -- the plan counts the parameters
"""
_V1 = """
model -> model.name_or_path
model_class -- a causal language model is all there is
train_dataset -> data.train -- a list of datasets in a file of LLaMA-Factory: write the files or hub ids that it names
custom_chat_template -> model.chat_template -- text in the file becomes a .jinja file next to the recipe
micro_batch_size -> train.global_batch_size -- per GPU; a recipe states the batch over all GPUs, so --gpus is needed
global_batch_size -> train.global_batch_size
peft_config.name -> model.lora -- adapters are trained where model.lora is given; final/ is the merged model
peft_config.r -> model.lora.r
peft_config.lora_alpha -> model.lora.lora_alpha
peft_config.lora_dropout -> model.lora.lora_dropout
peft_config.target_modules -> model.lora.target_modules -- all is all-linear
peft_config.* -- model.lora has no such key
init_config.* -- the plan decides how weights are loaded
cp_size cp_mode -- memory only: the result does not change
optim_config.* -- write it in the recipe: train.optim
lr_scheduler_config.* -- write it in the recipe: train.lr_scheduler_type
quant_config.* -- write it in the recipe: model.quantization
kernel_config.* -- Liger's layers are the default, on a GPU: model.kernels
dist_config.name -> train.fsdp
dist_config.* -- FSDP2 needs no such setting
enable_activation_checkpointing -> train.gradient_checkpointing
sample_backend max_new_tokens -- about sampling: sft chat
dp_size mp_replicate_size mp_shard_size batching_strategy batching_workers -- the launcher and the plan decide it
dist_timeout -> train.ddp_timeout
"""
_LEFT_OUT = (
    "lora_",
    "dataset_",
    "datasets",
    "packing",
    "completion_only",
    "assistant_only",
    "max_length",
    "max_seq",
    "load_in",
    "bnb_",
)
LLAMA_FACTORY = (
    {key: row for key, row in trl.TRL.items() if not key.startswith(_LEFT_OUT)}
    | table("learning_rate -> train.learning_rate (5e-5)")
    | table(
        _OWN + _V1,
        {
            "flash_attn": {
                "fa2": "auto",
                "fa3": "auto",
                "sdpa": "sdpa",
                "auto": "auto",
                "disabled": "eager",
            },
            "enable_liger_kernel": {"true": "auto", "false": "none"},
            "disable_gradient_checkpointing": {"true": False, "false": "auto"},
            "train_on_prompt": {"true": "all", "false": "auto"},
            "mask_history": {"true": "last_assistant", "false": "auto"},
            "use_dft_loss": {"true": "dft"},
        },
    )
)

_STAGES = {"pt": "pretraining", "rm": "reward modelling", "ppo": "PPO", "dpo": "DPO", "kto": "KTO"}


def _refuse(c: Conversion) -> None:
    """Refuse what is no supervised fine-tuning of text.

    Raises:
        ConversionError: Its name and the key that shows it.
    """
    stage = str(c.get("stage", "sft"))
    if stage != "sft":
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
    template, data = str(c.get("template", "")), str(c.get("dataset", ""))
    if vision or "_vl" in template or "mllm" in data:
        shown = f"{vision}: {c.get(vision)}" if vision else f"template: {template}, dataset: {data}"
        raise ConversionError(f"{c.file} configures vision ({shown}); only supervised fine-tuning of text converts.")


def convert(c: Conversion) -> None:
    """Convert a config of LLaMA-Factory.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    _refuse(c)
    is_v1 = "model_name_or_path" not in c.keys
    if is_v1 and c.has("global_batch_size"):
        c.carry("global_batch_size", "train.global_batch_size", as_whole(c.get("global_batch_size")))
        if c.has("micro_batch_size"):
            c.drop("micro_batch_size", "memory only: train.micro_batch_size is measured")
    elif is_v1:
        training.batch(c, "micro_batch_size", "gradient_accumulation_steps", 1)
    else:
        training.batch(c, "per_device_train_batch_size", "gradient_accumulation_steps", 8)
    training.schedule(c, "lr_scheduler_type", "lr_scheduler_kwargs", as_number(c.get("learning_rate", 5e-5)))
    training.warmup(c)
    if c.has("pure_bf16"):
        c.change("pure_bf16", "train.precision", "bf16", LLAMA_FACTORY["pure_bf16"].note)
    else:
        training.precision(c)
    c.settings["data.overlong"] = "truncate"
    _template(c)
    model.remote_code(c, "model_revision")
    _adapters(c, is_v1)
    _quantized(c)
    _data(c)
    trl.evaluation(c)
    training.best(c, "early_stopping_steps")
    engine.deepspeed(c)
    engine.fsdp(c)
    if c.get("dist_config.name") == "fsdp2":
        c.change("dist_config.name", "train.fsdp", {}, "FSDP2")
    is_muon = is_true(c.get("use_muon"))
    training.optimizer(c, "use_muon" if is_muon else "optim", "muon" if is_muon else "")
    training.report_to(c, "report_to")
    training.run_name(c, "run_name")
    c.apply(LLAMA_FACTORY)


def _template(c: Conversion) -> None:
    name = str(c.get("template", ""))
    ours = {"chatml": "chatml", "default": "plain"}.get(name)
    if c.has("template") and ours == name:
        c.carry("template", "model.chat_template", ours)
    elif c.has("template") and ours:
        c.change("template", "model.chat_template", ours, f"{name} writes roles as words, as plain does")
    elif c.has("template"):
        c.note("template", "model.chat_template", f"{name}: {model.OWN_TEMPLATE}")
    if c.has("custom_chat_template"):
        model.own_template(c, "custom_chat_template", str(c.get("custom_chat_template")))
    if c.has("enable_thinking"):
        c.change(
            "enable_thinking",
            "data.reasoning",
            "keep" if is_true(c.get("enable_thinking")) else "drop",
            "whether reasoning is trained",
        )


def _adapters(c: Conversion, is_v1: bool) -> None:
    kind = str(c.get("peft_config.name", "full")) if is_v1 else str(c.get("finetuning_type", "lora"))
    key = "peft_config.name" if is_v1 else "finetuning_type"
    if kind == "lora":
        c.settings["model.lora"] = {}
        if c.has(key):
            c.note(key, "model.lora", "adapters are trained where model.lora is given; final/ is the merged model")
        elif not is_v1:
            c.default(key, "model.lora", {}, "; without model.lora all weights are trained")
    elif c.has(key) and kind == "full":
        c.keep(key, "all weights are trained")
    elif c.has(key):
        c.drop(key, f"{kind} is not supported: all weights are trained, or adapters (model.lora)")
    names = [
        key
        for key in c.keys
        if key.startswith(("lora_", "pissa_")) or key in ("additional_target", "use_dora", "use_rslora")
    ]
    if kind != "lora":
        for name in filter(c.has, names):
            c.drop(name, f"no adapters: {key} is {kind}")
        return
    for name in filter(c.has, ("lora_target", "peft_config.target_modules")):
        layers = as_list(c.get(name))
        c.carry(name, "model.lora.target_modules", "all-linear" if layers == ["all"] else layers)
    if c.has("additional_target"):
        c.carry("additional_target", "model.lora.modules_to_save", as_list(c.get("additional_target")))
    if c.has("lora_alpha"):
        c.carry("lora_alpha", "model.lora.lora_alpha", as_whole(c.get("lora_alpha")))
    elif not is_v1:
        rank = as_whole(c.get("lora_rank", 8)) or 8
        c.default("lora_alpha", "model.lora.lora_alpha", 2 * rank, ": twice the rank")
    if c.has("pissa_init"):
        rounds = as_number(c.get("pissa_iter", 16)) or 16
        method = "pissa" if rounds < 0 else f"pissa_niter_{int(rounds)}"
        for name in filter(c.has, ("pissa_init", "pissa_iter")):
            if is_true(c.get("pissa_init")):
                c.carry(name, "model.lora.init_lora_weights", method)
            else:
                c.keep(name, "pissa_init is not set")


def _quantized(c: Conversion) -> None:
    bits = as_whole(c.get("quantization_bit"))
    kind = {4: str(c.get("quantization_type", "nf4")), 8: "int8"}.get(bits or 0)
    if str(c.get("quantization_method", "bnb")).lower() not in ("bnb", "bitsandbytes"):
        for key in filter(c.has, ("quantization_bit", "quantization_method", "quantization_type")):
            c.drop(key, f"quantized by {c.get('quantization_method')}; bitsandbytes is the only way here")
        return
    for key in filter(c.has, ("quantization_bit", "quantization_method", "quantization_type")):
        if kind is not None and "model.lora" not in c.settings:
            c.drop(key, "no adapters are trained, and quantized weights alone cannot be")
        elif kind is None:
            c.drop(key, f"quantization_bit={c.get('quantization_bit')}: model.quantization is nf4, fp4 or int8")
        else:
            c.carry(key, "model.quantization", kind)


def _data(c: Conversion) -> None:
    rows = as_whole(c.get("max_samples"))
    for key, to in (("dataset", "data.train"), ("train_dataset", "data.train"), ("eval_dataset", "data.held_out")):
        if not c.has(key):
            continue
        infos = {name: _info(c, name) for name in as_list(c.get(key))}
        found = [info or {"path": name} for name, info in infos.items()]
        if rows:
            found = [one | {"split": f"{one.get('split', 'train')}[:{rows}]"} for one in found]
        c.change(key, to, found, _NAMED if None in infos.values() else "as dataset_info.json describes it")
    if "data.train" not in c.settings:
        c.settings["data.train"] = "DATA"
        c.comments["data.train"] = [sources.NO_DATASET]
    elif c.has("max_samples") and rows:
        c.account(c.carried, "max_samples", f"data.train.split: [:{rows}], the first rows of each source")
    sources.held_out_size(c, "val_size")
    for key in filter(c.has, ("mix_strategy", "interleave_probs")):
        if c.get(key) == "concat":
            c.keep(key, "all rows of all sources")
        else:
            c.drop(key, "give each source of data.train a weight")


_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS |= {name: name for name in ("history", "messages", "system", "tools")}


def _info(c: Conversion, name: str) -> dict[str, Any] | None:
    """What dataset_info.json says about a name, if it is here."""
    file = Path(str(c.get("dataset_dir", "data"))) / "dataset_info.json"
    try:
        info = json.loads(file.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(info, dict):
        return None
    path = info.get("hf_hub_url") or (str(file.parent / str(info["file_name"])) if info.get("file_name") else None)
    if path is None:
        return None
    source: dict[str, Any] = {"path": str(path)}
    source |= {ours: str(info[theirs]) for theirs, ours in (("subset", "name"), ("split", "split")) if info.get(theirs)}
    named = info.get("columns")
    given = named.items() if isinstance(named, dict) else ()
    columns = {_COLUMNS[theirs]: str(column) for theirs, column in given if theirs in _COLUMNS}
    columns = {ours: theirs for ours, theirs in columns.items() if theirs not in (ours, "conversations")}
    return source | ({"columns": columns} if columns else {})
