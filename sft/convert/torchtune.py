"""Converts torchtune's configs of full and LoRA fine-tuning."""

from __future__ import annotations

import re
from typing import Any

from sft.convert import sources, training
from sft.convert.conversion import (
    Changed,
    Conversion,
    ConversionError,
    HoldsAnyway,
    NotCarried,
    as_list,
    as_number,
    is_true,
)

_KEYS = f"""
model._component_ -> model.lora -- {training.ADAPTERS}; which model it is, the checkpoint's config.json says
model.lora_attn_modules -> model.lora.target_modules (["q_proj", "v_proj"]) -- with model.apply_lora_to_mlp also the MLP's layers
model.apply_lora_to_mlp -> model.lora.target_modules -- gate_proj, up_proj and down_proj
model.apply_lora_to_output -- adapters on the output head are not supported
model.lora_rank -> model.lora.r (8)
model.lora_alpha -> model.lora.lora_alpha (16)
model.lora_dropout -> model.lora.lora_dropout
model.use_dora -> model.lora.use_dora
model.quantize_base -> model.quantization (false) -- nf4 of bitsandbytes
model.* -- config.json of the model says it
checkpointer.checkpoint_dir -> model.name_or_path -- a folder with config.json, tokenizer and safetensors, or the model's id on the hub
checkpointer.* -- the folder is read in full; runs save to their own
tokenizer.max_seq_len -> data.max_length -- longer rows are cut there; here they are dropped, and more than 5% of them stop the run
tokenizer.prompt_template -- {training.OWN_TEMPLATE}
tokenizer.* -- the tokenizer is the model's own
dataset._component_ -> data.train -- the dataset that it loads, and its format; the chat template renders the rows
dataset.source dataset.data_files -> data.train.path
dataset.split -> data.train.split -- train[:95%] becomes a random 95%, data.train.epochs, or with dataset_val an eval split
dataset.name dataset.subset -> data.train.name
dataset.column_map.* dataset.column dataset.conversation_column -> data.train.columns
dataset.conversation_style -> data.train.format -- sharegpt; openai is messages
dataset.train_on_input -> data.loss_on -- all; Alpaca's datasets train the prompt too unless it is false
dataset.packed -> data.packing (false)
dataset.* -- sources have no such key
dataset_val.split -> data.held_out -- an eval split of the same size, drawn with data.seed
dataset_val.* -- the eval split is a part of data.train
run_val_every_n_steps -> train.eval_steps
batch_size_val -- the eval loss takes the batch of the training
shuffle -- rows are shuffled by train.seed
seed -> train.seed -- rows are drawn differently
batch_size -> train.global_batch_size (1) -- {training.BATCH}
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
epochs -> train.num_train_epochs
max_steps_per_epoch -> train.max_steps -- over all epochs
optimizer._component_ -> train.optim
optimizer.lr -> train.learning_rate
optimizer.weight_decay -> train.weight_decay (0.01)
optimizer.betas -> train.adam_beta2 (0.999) -- the first is train.adam_beta1
optimizer.eps -> train.adam_epsilon
optimizer.* optimizer_in_bwd -- the optimizer here takes other arguments: train.optim_args
lr_scheduler._component_ -> train.lr_scheduler_type ("constant")
lr_scheduler.num_warmup_steps -> train.warmup_steps
lr_scheduler.* -- cosine ends at train.min_lr_ratio
loss.* -- the loss is cross-entropy, computed for target tokens only
clip_grad_norm -> train.max_grad_norm (0)
dtype -> train.precision -- bf16 weights get an fp32 copy for the optimizer
compile -> model.compile
enable_activation_checkpointing -> train.gradient_checkpointing
enable_activation_offloading activation_offloading_use_streams ac_* -- train.gradient_checkpointing: offload, selective
fsdp_cpu_offload -> train.fsdp.offload_params
fsdp_reshard_after_forward -> train.fsdp.sharding_strategy
tensor_parallel_* context_parallel_* data_parallel_* -- memory only: the result does not change
custom_sharded_layers low_cpu_ram memory_efficient_fsdp_wrap fsdp.* -- the plan decides it
enable_fp8_training fp8_recipe_name -- float8 is not supported
quantizer.* -- quantization-aware training is not supported: the model is trained as it is
metric_logger._component_ -> tracking.report_to
metric_logger.project -> tracking.project
metric_logger.name -> tracking.run_name
metric_logger.* log_peak_memory_stats log_level -- metrics.jsonl has the curves
log_every_n_steps -> train.logging_steps
save_every_n_steps -> train.save_steps
save_adapter_weights_only -- final/adapter has the adapters alone, final/ the merged model
resume_from_checkpoint -- a run resumes by itself: train.resume
profiler.enabled -> train.profile
profiler.* -- docs/debugging.md says what train.profile traces
device collate_fn -- the plan decides it
output_dir -> output_dir -- runs go to a folder of their own below it: <output_dir>/<recipe>/<run>
name project -- a name of this file's own
"""


def _model(c: Conversion) -> str:
    return str(c.get("model._component_")).rpartition(".")[2]


def _adapters(c: Conversion, key: str, value: Any) -> Changed:
    if not _model(c).startswith(("lora_", "qlora_")):
        raise HoldsAnyway("all weights are trained; which model it is, the checkpoint's config.json says")
    return Changed({}, training.ADAPTERS)


def _layers(c: Conversion, key: str, value: Any) -> Changed:
    names = as_list(c.get("model.lora_attn_modules", ["q_proj", "v_proj"]))
    names += ["gate_proj", "up_proj", "down_proj"] if is_true(c.get("model.apply_lora_to_mlp")) else []
    return Changed(
        ["o_proj" if name == "output_proj" else name for name in names], "Hugging Face's names of the layers"
    )


def _quantization(c: Conversion, key: str, value: Any) -> str:
    if not is_true(value) and not _model(c).startswith("qlora_"):
        raise HoldsAnyway("not quantized")
    return "nf4"


def _max_steps(c: Conversion, key: str, value: Any) -> Changed:
    return Changed(int((as_number(value) or 0) * (as_number(c.get("epochs")) or 1)), "over all epochs")


def _beta2(c: Conversion, key: str, value: Any) -> Any:
    if isinstance(value, list) and len(value) == 2:
        c.settings["train.adam_beta1"] = value[0]
        return value[1]
    return value


def _schedule(c: Conversion, key: str, value: Any) -> str:
    if "cosine" in str(value):
        return "cosine"
    if value == "constant":
        return "constant"
    raise NotCarried("cosine and constant are torchtune's schedules that convert: train.lr_scheduler_type")


def _loss_on(c: Conversion, key: str, value: Any) -> str:
    return "all" if is_true(value) else "auto"


_LOGGERS = {
    "torchtune.training.metric_logging.wandblogger": ["wandb"],
    "torchtune.training.metric_logging.tensorboardlogger": ["tensorboard"],
    "torchtune.training.metric_logging.disklogger": [],
    "torchtune.training.metric_logging.stdoutlogger": [],
}
TORCHTUNE = training.rows(
    _KEYS,
    {
        "model.lora": _adapters,
        "model.lora.target_modules": _layers,
        "model.quantization": _quantization,
        "train.global_batch_size": training.batch("batch_size", 1),
        "train.max_steps": _max_steps,
        "train.adam_beta2": _beta2,
        "train.lr_scheduler_type": _schedule,
        "dtype": {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"},
        "data.loss_on": _loss_on,
        "metric_logger._component_": _LOGGERS,
    },
)

_REFUSED = {
    "DPO": "torchtune.rlhf.loss.DPOLoss stack_exchange_paired_dataset hh_rlhf preference_dataset",
    "PPO": "PPOLoss",
    "GRPO": "grpo torchtune.dev.rl",
    "vision": "vision multimodal",
    "knowledge distillation": "ForwardKL",
}


def _refuse(c: Conversion) -> None:
    components = {key: str(value) for key, value in c.keys.items() if key.endswith("_component_")}
    for name, signs in _REFUSED.items():
        for key, value in components.items():
            if any(sign in value for sign in signs.split()):
                raise ConversionError(
                    f"{c.file} configures {name} ({key}: {value}); only supervised fine-tuning of text converts."
                )
    missing = [name for name in ("optimizer", "dataset", "checkpointer") if f"{name}._component_" not in components]
    if missing:
        raise ConversionError(
            f"{c.file} has no {', '.join(missing)}, so it trains nothing that converts: full and LoRA fine-tuning do."
        )


def convert(c: Conversion) -> None:
    """Convert a config of torchtune.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    for key, value in c.keys.items():  # OmegaConf's references to other keys
        if isinstance(value, str):
            c.keys[key] = re.sub(r"\$\{([\w.]+)\}", lambda match: str(c.keys.get(match[1], match[0])), value)
    _refuse(c)
    if c.gpus and c.gpus > 1:
        c.settings["train.fsdp"] = {}
        c.comments["train.fsdp"] = ["torchtune's recipes for several GPUs shard with FSDP2"]
    _sources(c)
    c.apply(TORCHTUNE)


_DATASETS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "format": "alpaca"},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "format": "alpaca"},
    "text_completion_dataset": {"format": "text"},
    "instruct_dataset": {"format": "prompt_completion"},
}
_NAMES = {
    "source": "path",
    "data_files": "path",
    "name": "name",
    "subset": "name",
    "split": "split",
    "column": "columns.text",
    "conversation_column": "columns.conversations",
    "column_map.instruction": "columns.instruction",
    "column_map.text": "columns.text",
}


def _sources(c: Conversion) -> None:
    kind = str(c.get("dataset._component_")).rpartition(".")[2]
    known = _DATASETS.get(kind, {})
    ours = ("prompt", "completion") if known.get("format") == "prompt_completion" else ("input", "output")
    columns = {"column_map.input": f"columns.{ours[0]}", "column_map.output": f"columns.{ours[1]}"}
    source = sources.read_source(c, "dataset.", _NAMES | columns)
    source = source | known | ({} if source["path"] == "DATA" else {"path": source["path"]})
    if c.has("dataset.conversation_style"):
        source["format"] = "sharegpt" if c.get("dataset.conversation_style") == "sharegpt" else "messages"
        c.account("dataset.conversation_style", f"data.train.format: {source['format']}")
    split, rest = sources.split_of(str(c.get("dataset_val.split")))
    if rest and (split, round(1 - rest, 10)) == sources.split_of(str(c.get("dataset.split", "train"))):
        del source["epochs"]
        c.carry("dataset_val.split", "data.held_out", rest, "that fraction of the rows, drawn with data.seed")
    elif c.has("dataset_val.split"):
        c.dropped["dataset_val.split"] = "give the eval split in data.held_out"
    sources.set_sources(c, [source], [])
    c.account(
        "dataset._component_",
        f"data.train: {source['path']}",
        "the dataset that it loads; the chat template renders the rows",
    )
    if kind.startswith("alpaca") and not c.has("dataset.train_on_input"):
        c.settings["data.loss_on"] = "all"
        c.comments["data.loss_on"] = ["Alpaca's datasets train the prompt too"]
