"""Converts torchtune's configs of full and LoRA fine-tuning."""

from __future__ import annotations

import re

from sft.convert import engine, model, sources, training
from sft.convert.conversion import Conversion, ConversionError, as_list, as_number, as_whole, is_true, table

TORCHTUNE = table(
    """
model._component_ -> model.lora -- lora_ and qlora_ models train adapters; which model it is, the checkpoint's config.json says
model.lora_attn_modules model.apply_lora_to_mlp -> model.lora.target_modules -- output_proj is o_proj; the MLP is gate, up and down_proj
model.apply_lora_to_output -- adapters on the output head are not supported
model.lora_rank -> model.lora.r (8)
model.lora_alpha -> model.lora.lora_alpha (16)
model.lora_dropout -> model.lora.lora_dropout
model.use_dora -> model.lora.use_dora
model.quantize_base -> model.quantization -- nf4 of bitsandbytes
model.* -- config.json of the model says it
checkpointer.checkpoint_dir -> model.name_or_path -- a folder with config.json, tokenizer and safetensors, or the model's id on the hub
checkpointer.* -- the folder is read in full; runs save to their own
tokenizer.max_seq_len -> data.max_length -- longer rows are cut there; here they are dropped, and more than 5% of them stop the run
tokenizer.prompt_template -> model.chat_template -- the chat template writes it
tokenizer.* -- the tokenizer is the model's own
dataset._component_ -> data.train -- the dataset that it loads, and its format; the chat template renders the rows
dataset.source dataset.data_files -> data.train.path
dataset.split -> data.train.split -- train[:95%] becomes a random 95%, data.train.epochs, or with dataset_val an eval split
dataset.name dataset.subset -> data.train.name
dataset.column_map.* -> data.train.columns
dataset.column dataset.conversation_column -> data.train.columns
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
batch_size -> train.global_batch_size -- per GPU; a recipe states the batch over all GPUs, so --gpus is needed
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
epochs -> train.num_train_epochs
max_steps_per_epoch -> train.max_steps -- over all epochs
optimizer._component_ -> train.optim
optimizer.lr -> train.learning_rate
optimizer.weight_decay -> train.weight_decay (0.01)
optimizer.betas -> train.adam_beta2 (0.999) -- and train.adam_beta1
optimizer.eps -> train.adam_epsilon
optimizer.fused -- AdamW is fused where it can be
optimizer.* -- the optimizer here takes other arguments: train.optim_args
optimizer_in_bwd -- a step is taken after the backward pass
lr_scheduler._component_ -> train.lr_scheduler_type ("constant")
lr_scheduler.num_warmup_steps -> train.warmup_steps
lr_scheduler.* -- cosine ends at train.min_lr_ratio
early_exit_loss.* layer_dropout.* -- nothing here corresponds to it
loss._component_ loss.* -- cross-entropy, computed for target tokens only
clip_grad_norm -> train.max_grad_norm (0)
dtype -> train.precision -- bf16 weights get an fp32 copy for the optimizer
compile -> model.compile
enable_activation_checkpointing -> train.gradient_checkpointing
enable_activation_offloading activation_offloading_use_streams ac_mode ac_option -- train.gradient_checkpointing: offload, selective
fsdp_cpu_offload -> train.fsdp.offload_params
fsdp_reshard_after_forward -> train.fsdp.sharding_strategy
tensor_parallel_dim tensor_parallel_plan.* context_parallel_dim context_parallel_rotate_method -- memory only: the result does not change
data_parallel_shard_dim data_parallel_replicate_dim -- the model is sharded over all GPUs: train.fsdp
custom_sharded_layers low_cpu_ram memory_efficient_fsdp_wrap fsdp.* -- the plan decides it
enable_fp8_training fp8_recipe_name -- float8 is not supported
quantizer.* -- quantization-aware training is not supported: the model is trained as it is
metric_logger._component_ -> tracking.report_to
metric_logger.project -> tracking.project
metric_logger.name -> tracking.run_name
metric_logger.* -- metrics.jsonl has the curves
log_every_n_steps -> train.logging_steps
log_peak_memory_stats log_level -- metrics.jsonl has them
save_every_n_steps -> train.save_steps
save_adapter_weights_only -- final/adapter has the adapters alone, final/ the merged model
enable_async_checkpointing -- a checkpoint is complete before training continues
resume_from_checkpoint -- a run resumes by itself: train.resume
profiler.enabled -> train.profile
profiler.* -- docs/metrics.md says what train.profile traces
device cudnn_deterministic_mode collate_fn resize_token_embeddings -- the plan decides it
output_dir -> output_dir -- runs go to a folder of their own below it: <output_dir>/<recipe>/<run>
name project -- a name of this file's own
""",
    {"fsdp_reshard_after_forward": {"true": "full_shard", "false": "shard_grad_op"}},
)

_REFUSED = {
    "DPO": "torchtune.rlhf.loss.DPOLoss stack_exchange_paired_dataset hh_rlhf preference_dataset",
    "PPO": "PPOLoss",
    "GRPO": "grpo torchtune.dev.rl",
    "vision": "vision multimodal",
    "knowledge distillation": "ForwardKL",
}
_DATASETS = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "samsum_dataset": ("Samsung/samsum", "prompt_completion"),
    "grammar_dataset": ("liweili/c4_200m", "prompt_completion"),
    "text_completion_dataset": (None, "text"),
    "chat_dataset": (None, None),
    "instruct_dataset": (None, "prompt_completion"),
}
_COLUMNS = {
    "samsum_dataset": {"prompt": "dialogue", "completion": "summary"},
    "grammar_dataset": {"prompt": "input", "completion": "output"},
}
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
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
    sharing = (as_whole(c.get("tensor_parallel_dim")) or 1) * (as_whole(c.get("context_parallel_dim")) or 1)
    training.batch(c, "batch_size", "gradient_accumulation_steps", 1, sharing)
    if c.gpus and c.gpus > 1:
        c.settings["train.fsdp"] = {}
        c.comments["train.fsdp"] = ["torchtune's recipes for several GPUs shard with FSDP2"]
    _optimizer(c)
    _adapters(c)
    _data(c)
    dtype = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}.get(str(c.get("dtype")))
    if c.has("dtype") and dtype:
        c.change("dtype", "train.precision", dtype, TORCHTUNE["dtype"].note)
    logger = str(c.get("metric_logger._component_", "")).rpartition(".")[2]
    tracker = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(logger)
    if c.has("metric_logger._component_") and tracker:
        c.carry("metric_logger._component_", "tracking.report_to", [tracker])
    elif c.has("metric_logger._component_"):
        c.drop("metric_logger._component_", "metrics.jsonl has the curves")
    training.run_name(c, "metric_logger.name")
    if c.has("tokenizer.prompt_template"):
        c.note("tokenizer.prompt_template", "model.chat_template", model.OWN_TEMPLATE)
    if c.keys.get("tokenizer.max_seq_len", 0) is None:
        c.change(
            "tokenizer.max_seq_len",
            "data.max_length",
            2048,
            "no limit there; here longer rows are dropped, and more than 5% stop the run",
        )
    steps, epochs = as_whole(c.get("max_steps_per_epoch")), as_number(c.get("epochs")) or 1
    if c.has("max_steps_per_epoch") and steps:
        c.change("max_steps_per_epoch", "train.max_steps", int(steps * epochs), "over all epochs")
    engine.compiled(c, "compile")
    c.apply(TORCHTUNE)


def _optimizer(c: Conversion) -> None:
    theirs = str(c.get("optimizer._component_"))
    training.optimizer(c, "optimizer._component_", _OPTIMIZERS.get(theirs, theirs))
    betas = c.get("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        c.set("train.adam_beta1", betas[0])
        c.carry("optimizer.betas", "train.adam_beta2", betas[1])
    key = "lr_scheduler._component_"
    if c.has(key) and "cosine" in str(c.get(key)):
        c.carry(key, "train.lr_scheduler_type", "cosine")
    elif c.has(key):
        c.drop(key, "cosine and constant are torchtune's schedules that convert: train.lr_scheduler_type")


def _adapters(c: Conversion) -> None:
    model = str(c.get("model._component_")).rpartition(".")[2]
    is_lora = model.startswith(("lora_", "qlora_"))
    if not is_lora:
        if c.has("model._component_"):
            c.keep("model._component_", "all weights are trained; which model it is, the checkpoint's config.json says")
        return
    c.settings["model.lora"] = {}
    c.note(
        "model._component_", "model.lora", "adapters are trained where model.lora is given; final/ is the merged model"
    )
    if model.startswith("qlora_") or is_true(c.get("model.quantize_base")):
        c.set("model.quantization", "nf4")
        if c.has("model.quantize_base"):
            c.carry("model.quantize_base", "model.quantization", "nf4")
    names = [
        {"output_proj": "o_proj"}.get(name, name)
        for name in as_list(c.get("model.lora_attn_modules", ["q_proj", "v_proj"]))
    ]
    names += ["gate_proj", "up_proj", "down_proj"] if is_true(c.get("model.apply_lora_to_mlp")) else []
    for key in filter(c.has, ("model.lora_attn_modules", "model.apply_lora_to_mlp")):
        c.change(key, "model.lora.target_modules", names, "Hugging Face's names of the layers")


_NAMES = {"source": "path", "data_files": "path", "name": "name", "subset": "name", "split": "split"}


def _data(c: Conversion) -> None:
    kind = str(c.get("dataset._component_")).rpartition(".")[2]
    path, format = _DATASETS.get(kind, (None, None))
    held_out = _held_out(c)
    source = sources.read_source(c, "dataset.", "data.train", _NAMES)
    source["path"] = path if path and source["path"] == "DATA" else source["path"]
    if c.has("dataset.conversation_style"):
        format = "sharegpt" if c.get("dataset.conversation_style") == "sharegpt" else "messages"
        c.account(c.carried, "dataset.conversation_style", f"data.train.format: {format}")
    source |= {"format": format} if format else {}
    source |= {"columns": _COLUMNS[kind]} if kind in _COLUMNS else {}
    ours = {"input": "prompt", "output": "completion"} if format == "prompt_completion" else {}
    for name in ("instruction", "input", "output", "text"):
        sources.column(c, f"dataset.column_map.{name}", "data.train", ours.get(name, name), source)
    sources.column(c, "dataset.column", "data.train", "text", source)
    sources.column(c, "dataset.conversation_column", "data.train", "conversations", source)
    if held_out:
        source.pop("epochs", None)
        c.settings["data.held_out"] = held_out
    c.change(
        "dataset._component_", "data.train", [source], "the dataset that it loads; the chat template renders the rows"
    )
    if source["path"] == "DATA":
        c.comments.setdefault("data.train", []).append("write a file, a folder or an id on the hub")
    trains_prompt = c.get("dataset.train_on_input", kind.startswith("alpaca"))
    if c.has("dataset.train_on_input"):
        c.carry("dataset.train_on_input", "data.loss_on", "all" if is_true(trains_prompt) else "auto")
    elif trains_prompt:
        c.default("dataset.train_on_input", "data.loss_on", "all", " of Alpaca's datasets: the prompt is trained too")


def _held_out(c: Conversion) -> float | None:
    """The eval split, where it is what the training leaves of the same split."""
    split, fraction = sources.split_of(str(c.get("dataset.split", "train")))
    rest = round(1 - fraction, 10) if fraction else 0
    if not c.has("dataset_val.split"):
        return None
    if not rest or sources.split_of(str(c.get("dataset_val.split"))) != (split, rest):
        c.drop("dataset_val.split", "give the eval split in data.held_out")
        return None
    c.change("dataset_val.split", "data.held_out", rest, "that fraction of the rows, drawn with data.seed")
    return rest
