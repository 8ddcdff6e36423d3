"""Converts configs of axolotl."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sft.convert import engine, model, sources, training
from sft.convert.conversion import Conversion, ConversionError, as_list, as_number, as_whole, is_true, refusal, table

_MODEL = f"""
base_model -> model.name_or_path
model_revision revision_of_model -> model.revision
trust_remote_code -> model.trust_remote_code -- only with a commit as revision: the code of models in transformers needs none
model_type tokenizer_type type_of_model base_model_config cls_model_config
tokenizer_use_fast tokenizer_legacy is_falcon_derived_model is_llama_derived_model
is_mistral_derived_model
is_qwen_derived_model -- classes follow from the model's config.json
tokenizer_config tokenizer_use_mistral_common tokenizer_save_jinja_files -- the tokenizer is the model's own
chat_template -> model.chat_template -- chatml is ours; for other names {model.OWN_TEMPLATE}
chat_template_jinja -> model.chat_template -- text in the file becomes a .jinja file next to the recipe
eot_tokens -> model.eos_token -- one token ends a turn and an answer
special_tokens.pad_token -> model.pad_token
special_tokens.eos_token -> model.eos_token
special_tokens.additional_special_tokens tokens -> model.new_tokens
special_tokens.* -- the tokenizer's own
resize_token_embeddings_to_32x shrink_embeddings mean_resizing_embeddings -- the embeddings get as many rows as model.new_tokens need
model_config.rope_scaling.* -- write it as model.rope_scaling
model_config.* overrides_of_model_config.* -- config.json of the model says it; change it there
attn_implementation -> model.attn_implementation
flash_attention sdp_attention eager_attention -> model.attn_implementation
flex_attn_compile_kwargs.* large_head_attention
xformers_attention flex_attention sage_attention s2_attention flash_optimum -- not one of model.attn_implementation
plugins liger_rope liger_rms_norm liger_glu_activation liger_layer_norm -- kernels: Liger's layers are the default, model.kernels
liger_fused_linear_cross_entropy liger_cross_entropy liger_swiglu -- kernels: the loss is computed for target tokens only
lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel fused_attn_kernel -- kernels: they change speed and memory
cut_cross_entropy chunked_cross_entropy flash_attn_cross_entropy -- kernels: the loss is computed for target tokens only
flash_attn_rms_norm flash_attn_fuse_mlp sdpa_varlen use_kernels
use_scattermoe use_sonicmoe experts_implementation liger_rms_norm_gated gemma4_hybrid_attn_impl
tiled_mlp tiled_mlp_num_shards unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o -- kernels: they change speed and memory
reinit_weights -- weights are always loaded: to train random ones is pretraining
adapter -> model.lora -- adapters are trained where model.lora is given; final/ is the merged model
load_in_4bit load_in_8bit -> model.quantization
lora_r -> model.lora.r
lora_alpha lora_dropout -> model.lora.*
lora_target_linear lora_target_modules -> model.lora.target_modules
lora_modules_to_save -> model.lora.modules_to_save
lora_rank_pattern.* -> model.lora.rank_pattern
lora_alpha_pattern.* -> model.lora.alpha_pattern
peft_use_dora -> model.lora.use_dora
peft_use_rslora -> model.lora.use_rslora
peft_init_lora_weights -> model.lora.init_lora_weights
peft_layers_to_transform -> model.lora.layers_to_transform
peft_layers_pattern -> model.lora.layers_pattern
lora_target_parameters quantize_moe_experts llama4_linearized_experts -- adapters are on linear layers, and experts are not quantized
model_quantization_config model_quantization_config_kwargs.* -- weights that come quantized are refused
bnb_config_kwargs.bnb_4bit_use_double_quant -> model.bnb_4bit_use_double_quant
bnb_config_kwargs.bnb_4bit_quant_type -> model.quantization
lora_model_dir -- training does not start from adapters: merge them first, and name the merged model
loraplus_lr_ratio loraplus_lr_embedding loftq_config peft.* relora relora_prune_ratio
lora_fan_in_fan_out lora_on_cpu gptq -- nothing here corresponds to it
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
datasets.*.field_thinking datasets.*.template_thinking_key -- reasoning_content and <think> are recognized
datasets.*.* -- a source has no such key
datasets.*.ds_type -- the file's suffix says it
datasets.*.message_property_mappings.* datasets.*.roles.* -- role and content, from and value, human and gpt and their like are recognized
datasets.*.message_field_role datasets.*.message_field_content -- role and content, from and value are recognized
datasets.*.roles_to_train -- data.loss_on selects, for all sources
datasets.*.train_on_eos datasets.*.train_on_eot -- the end of a trained turn is always trained
datasets.*.chat_template -- one template for all sources: model.chat_template
test_datasets.*.path test_datasets.*.split test_datasets.*.type -> data.held_out
val_set_size -> data.held_out -- a fraction; a number of rows becomes 1%
dataset_exact_deduplication -> data.deduplicate
sequence_len -> data.max_length -- longer rows are dropped, as in axolotl, but more than 5% of them stop the run
excess_length_strategy -> data.overlong
sample_packing -> data.packing (false)
train_on_inputs -> data.loss_on
dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory -- rows are prepared on all cores, and kept
dataset_shard_num dataset_shard_idx num_dataset_shards_to_save skip_prepare_dataset push_dataset_to_hub -- rows are prepared on all cores
shuffle_merged_datasets shuffle_before_merging_datasets group_by_length curriculum_sampling -- rows are shuffled by train.seed
remove_unused_columns eval_sample_packing pad_to_sequence_len pad_to_multiple_of min_sample_len
sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_eff_est
multipack_real_batches batch_flattening eval_sequence_len total_num_tokens -- our own preparation packs the rows
default_system_message -- the chat template writes it
hf_use_auth_token -- a login is used where there is one: hf auth login
"""
_TRAIN = """
micro_batch_size -> train.global_batch_size -- per GPU; a recipe states the batch over all GPUs, so --gpus is needed
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
batch_size -> train.global_batch_size
num_epochs -> train.num_train_epochs
max_steps learning_rate -> train.*
lr_scheduler -> train.lr_scheduler_type
lr_scheduler_kwargs.* cosine_min_lr_ratio -> train.min_lr_ratio
cosine_constant_lr_ratio -- no schedule here turns constant after a cosine
warmup_steps -> train.warmup_steps
warmup_ratio -> train.warmup_ratio (0.03)
optimizer -> train.optim
optim_args optim_args.* -- train.optim_args takes the arguments of lion, adafactor and muon
weight_decay adam_beta1 adam_epsilon max_grad_norm neftune_noise_alpha -> train.*
adam_beta2 -> train.adam_beta2 (0.999)
adam_eps -> train.adam_epsilon
eta_min lr_quadratic_warmup lr_groups embedding_lr -- no such schedule here
noisy_embedding_alpha -> train.neftune_noise_alpha
bf16 fp16 -> train.precision
bfloat16 float16 -> train.precision -- weights in half precision get an fp32 copy here
tf32 -> train.trainer_args.tf32 -- only where train.precision is fp32
fp8 fp8_enable_fsdp_float8_all_gather -- float8 is not supported
gradient_checkpointing -> train.gradient_checkpointing
gradient_checkpointing_kwargs.* -- always without reentry; the results are the same
activation_offloading -- train.gradient_checkpointing: offload keeps each layer's input in CPU memory
torch_compile -> model.compile
deepspeed -> train.deepspeed -- the file of ds_configs/ with the same stage, where the one named is not here
deepspeed.* -- a DeepSpeed file of your own may be named in train.deepspeed
fsdp -> train.fsdp -- FSDP2
fsdp_version -- FSDP2 is the only one here
fsdp_final_state_dict_type -- final/ is always a full model
dp_shard_size dp_replicate_size -- the model is sharded over all GPUs; train.fsdp.sharding_strategy: hybrid_shard shards it within a node
tensor_parallel_size -- memory only: the result does not change; train.tensor_parallel_size works without FSDP and DeepSpeed
context_parallel_size sequence_parallel_degree -- memory only: the result does not change; train.sequence_parallel_size needs DeepSpeed
heads_k_stride ring_attn_func -- memory only: the result does not change
seed -> train.seed -- rows are drawn differently
ddp_timeout logging_steps save_steps save_total_limit eval_steps -> train.*
saves_per_epoch -> train.save_strategy -- 1 is a checkpoint at the end of each epoch; for other numbers set train.save_steps
save_strategy -> train.save_strategy
evals_per_epoch eval_strategy -> train.eval_steps -- the eval loss is measured at the start, at each checkpoint and at the end
early_stopping_patience load_best_model_at_end metric_for_best_model greater_is_better -> train.*
wandb_project -> tracking.project
wandb_name -> tracking.run_name
wandb_run_id -- a resumed run continues its own wandb run
wandb_entity wandb_watch wandb_log_model wandb_mode -- wandb's own environment variables set it
use_swanlab swanlab_project swanlab_mode use_comet comet_project_name use_otel_metrics -- no tracker here: tracking.report_to
use_ray ray_num_workers expert_parallel_size -- the launcher and the plan decide it
use_wandb use_tensorboard use_mlflow use_trackio -> tracking.report_to
trackio_project_name -> tracking.project
output_dir -> output_dir -- runs go to a folder of their own below it: <output_dir>/<recipe>/<run>
hub_model_id hub_strategy hub_revision push_to_hub -- sft export --to hub uploads the finished model
resume_from_checkpoint auto_resume_from_checkpoints -- a run resumes by itself: train.resume
loss_watchdog_threshold loss_watchdog_patience -- a loss or gradient that is not finite stops the run: train.on_nonfinite
do_causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens
do_bench_eval bench_dataset generate_samples num_generation_samples -- eval.tasks measure the model, and the report shows answers
eval_batch_size -- the eval loss takes the batch of the training
save_only_model save_safetensors save_first_step -- checkpoints hold what a resumed run needs, and each save is verified
ddp ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers device device_map local_rank
world_size low_cpu_mem_usage max_memory gpu_memory_limit auto_find_batch_size dataloader_drop_last
gc_steps gc_collect_steps experimental_skip_move_to_device -- the launcher and the plan decide it
dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor torch_empty_cache_steps -> train.trainer_args.*
strict debug is_preprocess -- a switch of axolotl's own
qat.* -- quantization-aware training is not supported: the model is trained as it is
quantization.* -- the finished model is not quantized: what serves it can do that
"""
_ATTENTION = {"flash_attention": "auto", "sdp_attention": "sdpa", "eager_attention": "eager"}
AXOLOTL = (
    table(
        _MODEL + _DATA + _TRAIN,
        {
            **{key: {"true": ours, "false": "auto"} for key, ours in _ATTENTION.items()},
            "attn_implementation": model.ATTENTION,
            "excess_length_strategy": {"drop": "drop", "truncate": "truncate", "raise": "error"},
            "train_on_inputs": {"true": "all", "false": "auto"},
            "gradient_checkpointing": {"true": True, "false": False, "offload": "offload", "offload_disk": "offload"},
        },
    )
    | engine.FSDP
)

_REFUSED = {
    "pretraining_dataset": "pretraining",
    "reward_model": "reward modelling",
    "process_reward_model": "process reward modelling",
    "processor_type": "vision or audio",
    "diffusion": "a diffusion language model",
}


def _refuse(c: Conversion) -> None:
    """Refuse what is no supervised fine-tuning of text.

    Raises:
        ConversionError: Its name and the key that shows it.
    """
    if c.get("rl"):
        raise ConversionError(
            f"{c.file} configures {str(c.get('rl')).upper()} (rl: {c.get('rl')}); only supervised fine-tuning converts."
        )
    for key, value in c.keys.items():
        name = _REFUSED.get(key.split(".")[0])
        if name and value not in (None, False, "", [], {}):
            raise ConversionError(
                f"{c.file} configures {name} ({key}: {value}); only supervised fine-tuning of text converts."
            )


def convert(c: Conversion) -> None:
    """Convert a config of axolotl.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    _refuse(c)
    sharing = [
        as_whole(c.get(key)) or 1
        for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree")
    ]
    if as_whole(c.get("batch_size")):
        c.carry("batch_size", "train.global_batch_size", as_whole(c.get("batch_size")))
        for key in filter(c.has, ("micro_batch_size", "gradient_accumulation_steps")):
            c.keep(key, "train.micro_batch_size is measured, and accumulation follows from it")
    else:
        training.batch(c, "micro_batch_size", "gradient_accumulation_steps", 1, sharing[0] * max(sharing[1:]))
    training.schedule(c, "lr_scheduler", "lr_scheduler_kwargs", as_number(c.get("learning_rate")))
    training.warmup(c)
    if "train.warmup_steps" in c.settings:
        c.inapplicable.add("warmup_ratio")
    training.precision(c)
    for key in filter(c.has, ("bfloat16", "float16")):
        c.note(key, "train.precision", AXOLOTL[key].note)
    _tokens(c)
    model.remote_code(c, "model_revision")
    _adapters(c)
    _freeze(c)
    model.quantized(c)
    _data(c)
    training.best(c, "early_stopping_patience")
    engine.deepspeed(c)
    engine.fsdp(c)
    training.optimizer(c, "optimizer")
    _tracking(c)
    _checkpoints(c)
    engine.compiled(c, "torch_compile")
    c.apply(AXOLOTL)


def _tokens(c: Conversion) -> None:
    ends = c.get("eot_tokens")
    if c.has("eot_tokens"):
        first = str(ends[0]) if isinstance(ends, list) and ends else str(ends)
        if c.get("special_tokens.eos_token") is None and (not isinstance(ends, list) or len(ends) == 1):
            c.change("eot_tokens", "model.eos_token", first, "one token ends a turn and an answer")
        else:
            c.drop("eot_tokens", "one token ends a turn: model.eos_token")
    keys = ("tokens", "special_tokens.additional_special_tokens")
    added = [token for key in keys if c.has(key) for token in as_list(c.get(key))]
    for key in filter(c.has, keys):
        c.carry(key, "model.new_tokens", added)
    template, text = str(c.get("chat_template", "")), str(c.get("chat_template_jinja", ""))
    alpaca = [
        key
        for key, value in c.keys.items()
        if key.startswith("datasets.") and key.endswith(".type") and str(value).startswith("alpaca")
    ]
    if c.has("chat_template_jinja"):
        model.own_template(c, "chat_template_jinja", text)
        if c.has("chat_template"):
            c.keep("chat_template", "chat_template_jinja")
    elif template == "chatml":
        c.carry("chat_template", "model.chat_template", "chatml")
    elif template:
        c.note("chat_template", "model.chat_template", f"{template}: {model.OWN_TEMPLATE}")
    elif alpaca:
        c.change(
            alpaca[0],
            "model.chat_template",
            "plain",
            "axolotl writes Alpaca's `### Instruction` around the text, and no chat template; here a template always renders it, and plain "
            "needs no tokens of its own. Remove the key for the tokenizer's own",
        )


def _freeze(c: Conversion) -> None:
    """What is trained becomes what is frozen: all names in which none of the patterns is found."""
    key = "unfrozen_parameters"
    patterns = [pattern.replace(".", r"\.") for pattern in as_list(c.get(key, []))]
    if not c.has(key):
        return
    if c.get("adapter"):
        c.drop(key, "adapters leave all of the base as it is")
    elif any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in patterns):
        c.drop(key, "rows of a weight cannot be trained alone: model.freeze names whole weights")
    else:
        c.change(key, "model.freeze", [f"^(?!.*(?:{'|'.join(patterns)}))"], "all but those patterns is frozen")


def _adapters(c: Conversion) -> None:
    keys = [key for key in c.keys if key.startswith(("lora_", "peft_"))]
    if not c.get("adapter"):
        for key in filter(c.has, keys):
            if "kernel" not in key:
                c.drop(key, "no adapters: `adapter` is not set")
        return
    if c.get("adapter") not in ("lora", "qlora"):
        c.drop("adapter", f"{c.get('adapter')} is not supported; all weights are trained")
        return
    c.settings["model.lora"] = {}
    c.note("adapter", "model.lora", AXOLOTL["adapter"].note)
    if is_true(c.get("lora_target_linear")):
        c.carry("lora_target_linear", "model.lora.target_modules", "all-linear")
        if c.has("lora_target_modules"):
            c.keep("lora_target_modules", "all-linear has them: lora_target_linear is set")
    elif c.has("lora_target_linear"):
        c.keep("lora_target_linear", "lora_target_modules names the layers")
    patterns: dict[str, dict[str, Any]] = {}
    for key in [key for key in keys if key.startswith(("lora_rank_pattern.", "lora_alpha_pattern.")) and c.has(key)]:
        name, pattern = key.removeprefix("lora_").split(".", 1)
        patterns.setdefault(name, {})[pattern] = c.get(key)
        c.carry(key, f"model.lora.{name}", patterns[name])


_FORMATS = {"alpaca": "alpaca", "chat_template": None, "sharegpt": "sharegpt", "completion": "text", "pretrain": "text"}


_NAMES = {"path": "path", "name": "name", "revision": "revision", "split": "split"}


def _data(c: Conversion) -> None:
    train = [_source(c, f"datasets.{index}.", f"data.train.{index}") for index in sources.indices(c, "datasets")]
    test = [
        _source(c, f"test_datasets.{index}.", f"data.held_out.{index}") for index in sources.indices(c, "test_datasets")
    ]
    sources.set_sources(c, train, test)
    sources.held_out_size(c, "val_set_size")


def _source(c: Conversion, prefix: str, place: str) -> dict[str, Any]:
    source = sources.read_source(c, prefix, place, _NAMES)
    files = as_list(c.get(f"{prefix}data_files", []))
    if len(files) == 1 and c.has(f"{prefix}data_files"):
        is_reader = Path(source["path"]).suffix or source["path"] in ("json", "csv", "parquet", "arrow", "text")
        source["path"] = files[0] if is_reader else f"{source['path']}/{files[0]}"
        c.account(c.changed, f"{prefix}data_files", f"{place}.path: {source['path']} (the file is the path)")
    kind = re.split("[:.]", str(c.get(f"{prefix}type", "")))[0]
    if kind in _FORMATS:
        source |= {"format": _FORMATS[kind]} if _FORMATS[kind] else {}
        if c.has(f"{prefix}type"):
            why = f"{place}.format: {_FORMATS[kind] or 'detected'} (the chat template renders the rows)"
            c.account(c.changed, f"{prefix}type", why)
    sources.column(c, f"{prefix}field_messages", place, "messages", source)
    sources.column(c, f"{prefix}field", place, "text", source)
    return source


def _tracking(c: Conversion) -> None:
    trackers = [
        name
        for key, name in (
            ("wandb_project", "wandb"),
            ("use_tensorboard", "tensorboard"),
            ("use_mlflow", "mlflow"),
            ("use_trackio", "trackio"),
        )
        if c.get(key) and c.get(key) is not False
    ]
    known = [name for name in trackers if not refusal("tracking.report_to", [name])]
    if known:
        c.settings["tracking.report_to"] = known
    for key, name in (("use_tensorboard", "tensorboard"), ("use_mlflow", "mlflow"), ("use_trackio", "trackio")):
        if c.has(key) and name in known:
            c.carry(key, "tracking.report_to", known)
        elif c.has(key):
            c.drop(key, "not set" if not is_true(c.get(key)) else f"no tracker here is named {name}")
    if c.has("wandb_project"):
        c.carry("wandb_project", "tracking.project", str(c.get("wandb_project")))
    training.run_name(c, "wandb_name")


def _checkpoints(c: Conversion) -> None:
    saves = as_number(c.get("saves_per_epoch"))
    if c.has("saves_per_epoch") and saves == 1:
        c.change("saves_per_epoch", "train.save_strategy", "epoch", "a checkpoint at the end of each epoch")
    elif c.has("saves_per_epoch"):
        c.drop("saves_per_epoch", "set train.save_steps: how many steps an epoch has is in the plan")
    for key in filter(c.has, ("evals_per_epoch", "eval_strategy")):
        c.note(key, "train.eval_steps", AXOLOTL[key].note)
