"""Converts configs of axolotl."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sft.convert import sources, training
from sft.convert.conversion import (
    Changed,
    Conversion,
    ConversionError,
    HoldsAnyway,
    NotCarried,
    as_list,
    as_whole,
    is_true,
)

_MODEL = f"""
base_model -> model.name_or_path
revision_of_model -> model.revision
model_type tokenizer_* cls_model_config is_*_derived_model -- classes and tokenizer are the model's own
chat_template -> model.chat_template -- chatml is ours; for other names {training.OWN_TEMPLATE}
chat_template_jinja -> model.chat_template -- text in the file becomes a .jinja file next to the recipe
eot_tokens -> model.eos_token -- one token ends a turn and an answer
special_tokens.pad_token -> model.pad_token
special_tokens.eos_token -> model.eos_token
special_tokens.additional_special_tokens tokens -> model.new_tokens
special_tokens.* tokens.* -- the tokenizer's own
*_embeddings_to_32x -- the embeddings get as many rows as model.new_tokens need
model_config.* -- config.json of the model says it; rope_scaling is model.rope_scaling
flash_attention sdp_attention eager_attention -> model.attn_implementation
flex_* xformers_attention sage_attention s2_attention flash_optimum -- not one of model.attn_implementation
plugins liger_* lora_*_kernel fused_attn_kernel *_cross_entropy flash_attn_* use_*kernels use_scattermoe
use_sonicmoe experts_implementation tiled_mlp* unsloth_* gemma4_* dsv4_* -- kernels: Liger's layers are the default, model.kernels
reinit_weights -- weights are always loaded: to train random ones is pretraining
adapter -> model.lora -- {training.ADAPTERS}
load_in_4bit load_in_8bit -> model.quantization
lora_r -> model.lora.r
lora_alpha lora_dropout -> model.lora.*
lora_target_linear lora_target_modules -> model.lora.target_modules
lora_modules_to_save -> model.lora.modules_to_save
lora_rank_pattern.* lora_alpha_pattern.* -- write it as model.lora.rank_pattern and model.lora.alpha_pattern
peft_use_dora -> model.lora.use_dora
peft_use_rslora -> model.lora.use_rslora
peft_init_lora_weights -> model.lora.init_lora_weights
peft_layers_to_transform -> model.lora.layers_to_transform
peft_layers_pattern -> model.lora.layers_pattern
bnb_config_kwargs.bnb_4bit_use_double_quant -> model.bnb_4bit_use_double_quant
bnb_config_kwargs.bnb_4bit_quant_type -> model.quantization
model_quantization_config* -- weights that come quantized are refused
lora_model_dir -- training does not start from adapters: merge them first, and name the merged model
lora_target_parameters quantize_moe_experts llama4_linearized_experts -- adapters are on linear layers, and experts are not quantized
loraplus_* loftq_config peft.* relora* lora_fan_in_fan_out lora_on_cpu gptq -- nothing here corresponds to it
unfrozen_parameters -> model.freeze -- a recipe names what is frozen, not what is trained
"""
_DATA = """
datasets.*.path -> data.train.path
datasets.*.data_files -> data.train.path -- the file is the path
datasets.*.name -> data.train.name
datasets.*.split -> data.train.split -- train[:20%] becomes a random 20%: data.train.epochs
datasets.*.revision -> data.train.revision
datasets.*.type -> data.train.format -- the chat template renders the rows, also Alpaca's
datasets.*.field_messages datasets.*.field -> data.train.columns
datasets.*.field_* datasets.*.message_* datasets.*.roles.* datasets.*.template_thinking_key -- usual names are recognized
datasets.*.train_on_* -- the end of a trained turn is always trained
datasets.*.chat_template datasets.*.roles_to_train -- one choice for all sources: model.chat_template, data.loss_on
datasets.* -- a source has no such key
test_datasets.*.path test_datasets.*.split test_datasets.*.type -> data.held_out
val_set_size -> data.held_out -- a fraction; a number of rows becomes 1%
dataset_exact_deduplication -> data.deduplicate
sequence_len -> data.max_length -- longer rows are dropped, as in axolotl, but more than 5% of them stop the run
excess_length_strategy -> data.overlong
sample_packing -> data.packing (false)
train_on_inputs -> data.loss_on
dataset_* skip_prepare_dataset push_dataset_to_hub -- rows are prepared on all cores, and kept
shuffle_*merging_datasets shuffle_merged_datasets curriculum_sampling -- rows are shuffled by train.seed
eval_sample_packing pad_to_sequence_len min_sample_len sample_packing_* total_num_tokens -- our own preparation packs the rows
default_system_message -- the chat template writes it
hf_use_auth_token -- a login is used where there is one: hf auth login
"""
_TRAIN = f"""
micro_batch_size -> train.global_batch_size (1) -- {training.BATCH}
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
batch_size -> train.global_batch_size
num_epochs -> train.num_train_epochs
lr_scheduler -> train.lr_scheduler_type
cosine_min_lr_ratio -> train.min_lr_ratio
cosine_constant_lr_ratio eta_min lr_quadratic_warmup lr_groups embedding_lr* -- no such schedule here
warmup_ratio -> train.warmup_ratio (0.03)
optimizer -> train.optim
adam_eps -> train.adam_epsilon
noisy_embedding_alpha -> train.neftune_noise_alpha
bfloat16 float16 -- weights in half precision get an fp32 copy here: train.precision
dp_shard_size dp_replicate_size tensor_parallel_size context_parallel_size sequence_parallel_degree
heads_k_stride ring_attn_func -- memory only: the result does not change; docs/multi-gpu.md has what there is here
saves_per_epoch -> train.save_strategy -- 1 is a checkpoint at the end of each epoch; for other numbers set train.save_steps
evals_per_epoch -- the eval loss is measured at the start, at each checkpoint and at the end
use_wandb use_tensorboard use_mlflow use_trackio -> tracking.report_to
wandb_project trackio_project_name -> tracking.project
wandb_name -> tracking.run_name
wandb_* -- wandb's own environment variables set it
use_otel_metrics -- no tracker here: tracking.report_to
loss_watchdog_* -- a loss or gradient that is not finite stops the run: train.on_nonfinite
do_causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens
generate_samples -- eval.tasks measure the model, and the report shows answers
eval_batch_size -- the eval loss takes the batch of the training
ddp gc_* experimental_* expert_parallel_* -- the launcher and the plan decide it
strict debug is_preprocess -- a switch of axolotl's own
qat.* quantization.* -- the model is trained as it is; what serves it can quantize it
"""


def _eos_token(c: Conversion, key: str, value: Any) -> str:
    tokens = as_list(value)
    if len(tokens) > 1 or c.get("special_tokens.eos_token") is not None:
        raise NotCarried("one token ends a turn: model.eos_token")
    return tokens[0]


def _new_tokens(c: Conversion, key: str, value: Any) -> list[str]:
    return [*as_list(c.get("tokens", [])), *as_list(c.get("special_tokens.additional_special_tokens", []))]


def _layers(c: Conversion, key: str, value: Any) -> Any:
    if is_true(c.get("lora_target_linear")):
        return "all-linear"
    if key == "lora_target_linear":
        raise HoldsAnyway("lora_target_modules names the layers")
    return value


def _freeze(c: Conversion, key: str, value: Any) -> Any:
    """All names in which none of the patterns of what is trained is found."""
    patterns = [pattern.replace(".", r"\.") for pattern in as_list(value)]
    if "model.lora" in c.settings:
        raise NotCarried("adapters leave all of the base as it is")
    if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in patterns):
        raise NotCarried("rows of a weight cannot be trained alone: model.freeze names whole weights")
    return Changed([f"^(?!.*(?:{'|'.join(patterns)}))"], "all but those patterns is frozen")


def _save_strategy(c: Conversion, key: str, value: Any) -> Any:
    if as_whole(value) == 1:
        return Changed("epoch", "a checkpoint at the end of each epoch")
    raise NotCarried("set train.save_steps: how many steps an epoch has is in the plan")


def _tracker(c: Conversion, key: str, value: Any) -> Any:
    names = ("wandb", "tensorboard", "mlflow", "trackio")
    return [name for name in names if is_true(c.get(f"use_{name}")) or (name == "wandb" and c.get("wandb_project"))]


AXOLOTL = training.SHARED | training.rows(
    _MODEL + _DATA + _TRAIN,
    {
        **{
            f"{name}_attention": {"true": ours, "false": "auto"}
            for name, ours in (("flash", "auto"), ("sdp", "sdpa"), ("eager", "eager"))
        },
        "model.eos_token": _eos_token,
        "special_tokens.eos_token": lambda c, key, value: value,
        "model.new_tokens": _new_tokens,
        "model.lora.target_modules": _layers,
        "model.freeze": _freeze,
        "excess_length_strategy": {"drop": "drop", "truncate": "truncate", "raise": "error"},
        "train_on_inputs": {"true": "all", "false": "auto"},
        "train.global_batch_size": training.batch("micro_batch_size", 1, "batch_size"),
        "saves_per_epoch": _save_strategy,
        "tracking.report_to": _tracker,
    },
)

_REFUSED = {
    "pretraining_dataset": "pretraining",
    "reward_model": "reward modelling",
    "process_reward_model": "process reward modelling",
    "processor_type": "vision or audio",
    "diffusion": "a diffusion language model",
}


def convert(c: Conversion) -> None:
    """Convert a config of axolotl.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    for key, value in c.keys.items():
        name = str(value).upper() if key == "rl" else _REFUSED.get(key.split(".")[0])
        if name and value not in (None, False, "", [], {}):
            raise ConversionError(
                f"{c.file} configures {name} ({key}: {value}); only supervised fine-tuning of text converts."
            )
    train = [_source(c, f"datasets.{index}.", "data.train") for index in sources.indices(c, "datasets")]
    test = [_source(c, f"test_datasets.{index}.", "data.held_out") for index in sources.indices(c, "test_datasets")]
    sources.set_sources(c, train, test)
    if c.get("wandb_project"):
        c.settings["tracking.report_to"] = _tracker(c, "", None)
    if not c.get("chat_template") and any(source.get("format") == "alpaca" for source in train):
        c.settings["model.chat_template"] = "plain"
        c.comments["model.chat_template"] = [
            "axolotl writes Alpaca's `### Instruction` around the text, and no chat template; here a template always renders it, and plain "
            "needs no tokens of its own. Remove the key for the tokenizer's own"
        ]
    training.apply(c, AXOLOTL)


_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "pretrain": "text"}
_NAMES = {
    "path": "path",
    "name": "name",
    "revision": "revision",
    "split": "split",
    "field_messages": "columns.messages",
    "field": "columns.text",
}


def _source(c: Conversion, prefix: str, to: str) -> dict[str, Any]:
    source = sources.read_source(c, prefix, _NAMES, to)
    files = as_list(c.get(f"{prefix}data_files", []))
    if len(files) == 1:
        is_reader = Path(source["path"]).suffix or source["path"] in ("json", "csv", "parquet", "arrow", "text")
        source["path"] = files[0] if is_reader else f"{source['path']}/{files[0]}"
        c.account(f"{prefix}data_files", f"{to}: {source['path']}", "the file is the path")
    kind = re.split("[:.]", str(c.get(f"{prefix}type", "")))[0]
    if kind in _FORMATS:
        source["format"] = _FORMATS[kind]
    if kind in (*_FORMATS, "chat_template"):
        c.account(
            f"{prefix}type", f"{to}: {_FORMATS.get(kind, 'format detected')}", "the chat template renders the rows"
        )
    return source
