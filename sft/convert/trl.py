"""Converts configs of TRL (`trl sft --config`), of the alignment-handbook, and TrainingArguments of transformers: one family of names."""

from __future__ import annotations

from typing import Any

from sft.convert import engine, model, sources, training
from sft.convert.conversion import Conversion, ConversionError, as_number, is_true, table

_MODEL = """
model_name_or_path -> model.name_or_path
model_revision -> model.revision
trust_remote_code -> model.trust_remote_code -- only with a commit as revision: the code of models in transformers needs none
attn_implementation -> model.attn_implementation
torch_dtype dtype -> train.precision -- the dtype of the weights follows from train.precision
use_peft -> model.lora -- adapters are trained where model.lora is given; final/ is the merged model
lora_r -> model.lora.r
lora_alpha -> model.lora.lora_alpha
lora_dropout -> model.lora.lora_dropout (0.05)
lora_target_modules -> model.lora.target_modules (["q_proj", "v_proj"])
lora_modules_to_save -> model.lora.modules_to_save
use_rslora use_dora -> model.lora.*
lora_task_type -- always CAUSAL_LM
load_in_4bit load_in_8bit bnb_4bit_quant_type -> model.quantization
use_bnb_nested_quant -> model.bnb_4bit_use_double_quant (false)
bnb_4bit_quant_storage -- the engine decides it
chat_template -> model.chat_template -- text in the file becomes a .jinja file next to the recipe
chat_template_path -> model.chat_template -- a .jinja file; the template of another model is not taken
eos_token pad_token -> model.*
use_liger_kernel -> model.kernels
"""
_DATA = """
dataset_name -> data.train
dataset_config -> data.train.name
dataset_train_split -> data.train.split
dataset_test_split -> data.held_out -- the eval split where eval_strategy is not `no`
dataset_streaming -> data.train.streaming
dataset_mixture.datasets.*.id datasets.*.path -> data.train.path
dataset_mixture.datasets.*.config datasets.*.name -> data.train.name
dataset_mixture.datasets.*.split datasets.*.split -> data.train.split
dataset_mixture.datasets.*.weight dataset_mixer.* -> data.train.epochs -- the fraction of its rows to use
dataset_mixture.datasets.*.columns datasets.*.columns -- all columns are read, and unused ones listed
dataset_mixture.seed -> data.seed -- rows are drawn differently
dataset_mixture.test_split_size test_split_size -> data.held_out -- a fraction; a number of rows becomes 1%
datasets.*.fraction -> data.train.weight
dataset_text_field -- a column of another name: data.train.columns
max_length -> data.max_length (1024) -- longer documents are cut at the end, as in TRL: data.overlong
max_seq_length -> data.max_length -- longer documents are cut at the end, as in TRL: data.overlong
packing -> data.packing (false)
packing_strategy -> data.overlong -- bfd cuts long documents, bfd_split splits them; documents never attend to each other here
truncation_mode -> data.overlong -- keep_start is `truncate`; nothing keeps the end
assistant_only_loss -> data.loss_on -- TRL trains every token of `messages` unless it is set: `all`; here `auto` trains the assistant's
completion_only_loss -> data.loss_on -- true is `completion`, false `all`
dataset_num_proc preprocessing_num_workers -- rows are prepared on all cores
dataset_kwargs.* eval_packing padding_free pad_to_multiple_of shuffle_dataset
auto_insert_empty_system_msg -- our own preparation renders and packs the rows
ignore_bias_buffers -- no model that trains here needs it
"""
_TRAIN = """
group_by_length train_sampling_strategy length_column_name -- rows are shuffled by train.seed
remove_unused_columns label_names -- our own preparation renders and packs the rows
use_cache dataloader_in_order -- training keeps no cache, and rows keep their order
per_device_train_batch_size -> train.global_batch_size -- per GPU; a recipe states the batch over all GPUs, so --gpus is needed
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
learning_rate -> train.learning_rate (2e-5)
num_train_epochs -> train.num_train_epochs (3.0)
max_steps -> train.max_steps
lr_scheduler_type -> train.lr_scheduler_type ("linear")
lr_scheduler_kwargs.* -> train.min_lr_ratio
warmup_steps -> train.warmup_steps
warmup_ratio -> train.warmup_ratio
optim -> train.optim
optim_args optim_args.* -- train.optim_args takes the arguments of lion, adafactor and muon
weight_decay adam_beta1 adam_epsilon max_grad_norm label_smoothing_factor neftune_noise_alpha -> train.*
adam_beta2 -> train.adam_beta2 (0.999)
bf16 fp16 -> train.precision
tf32 -> train.trainer_args.tf32 -- only where train.precision is fp32
gradient_checkpointing activation_checkpointing -> train.gradient_checkpointing
gradient_checkpointing_kwargs.* activation_checkpointing_kwargs.* -- always without reentry; the results are the same
activation_offloading -- train.gradient_checkpointing: offload keeps each layer's input in CPU memory
torch_compile -> model.compile
torch_compile_backend torch_compile_mode -- model.compile takes no options
deepspeed -> train.deepspeed -- the file of ds_configs/ with the same stage, where the one named is not here
deepspeed.* -- a DeepSpeed file of your own may be named in train.deepspeed
fsdp -> train.fsdp -- FSDP2
accelerate_config -> train.deepspeed -- the engine that it names; FSDP is train.fsdp
seed -> train.seed -- rows are drawn differently
data_seed -> data.seed -- rows are drawn differently
ddp_timeout logging_steps save_total_limit eval_steps -> train.*
save_steps -> train.save_steps
save_strategy -> train.save_strategy
eval_strategy evaluation_strategy -> train.eval_steps -- the eval loss is measured where data.held_out is set
do_eval -> data.held_out -- the eval loss is measured where data.held_out is set
load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience -> train.*
report_to -> tracking.report_to
run_name -> tracking.run_name
project -> tracking.project
output_dir -> output_dir -- runs go to a folder of their own below it: <output_dir>/<recipe>/<run>
resume_from_checkpoint -- a run resumes by itself: train.resume
overwrite_output_dir -- finished runs are never overwritten
push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision
push_to_hub_model_id push_to_hub_organization -- sft export --to hub uploads the finished model
hub_token push_to_hub_token -- a secret does not belong in a recipe: log in with `hf auth login`
log_level log_level_replica log_on_each_node logging_strategy logging_first_step logging_dir
logging_nan_inf_filter disable_tqdm include_num_input_tokens_seen include_tokens_per_second -- metrics.jsonl has the curves
skip_memory_metrics plot_loss -- metrics.jsonl has the curves, and the report draws them
local_rank use_cpu no_cuda use_mps_device ddp_backend ddp_find_unused_parameters parallelism_config
accelerator_config.* dataloader_drop_last auto_find_batch_size _n_gpu mp_parameters num_processes -- the launcher and the plan decide it
do_train do_predict -- training is what the command does
average_tokens_across_devices -- always: the loss is divided by the target tokens of the step over all ranks
save_only_model save_safetensors save_on_each_node ignore_data_skip
restore_callback_states_from_checkpoint enable_jit_checkpoint -- checkpoints hold what a resumed run needs
per_device_eval_batch_size eval_accumulation_steps bf16_full_eval fp16_full_eval -- the eval loss takes the batch of the training
eval_delay eval_on_start -- the eval loss is measured at the start, at each checkpoint or every train.eval_steps, and at the end
eval_do_concat_batches eval_use_gather_object prediction_loss_only batch_eval_metrics
include_for_metrics include_inputs_for_metrics -- eval.tasks measure the model
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor -> train.trainer_args.*
full_determinism torch_empty_cache_steps ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph -> train.trainer_args.*
router_aux_loss_coef loss_type -> train.trainer_args.*
"""
_VALUES = {
    "attn_implementation": model.ATTENTION,
    "use_liger_kernel": {"true": "auto", "false": "none"},  # transformers, too, leaves other model types as they are
}
TRL = table(_MODEL + _DATA + _TRAIN, _VALUES) | engine.FSDP
TRANSFORMERS = table(_MODEL + _TRAIN, _VALUES) | engine.FSDP | table("learning_rate -> train.learning_rate (5e-5)")

_OTHER_TRAINING = {
    "preference training such as DPO": "beta max_prompt_length precompute_ref_log_probs ref_model_init_kwargs rpo_alpha",
    "reward modelling": "center_rewards_coefficient reward_model_path",
    "GRPO": "num_generations reward_funcs",
    "KTO": "desirable_weight undesirable_weight",
}


def _refuse(c: Conversion) -> None:
    """Refuse configs of TRL's other trainers.

    Raises:
        ConversionError: Its name and the key that shows it.
    """
    for name, signs in _OTHER_TRAINING.items():
        if found := next((sign for sign in signs.split() if sign in c.keys), None):
            raise ConversionError(
                f"{c.file} configures {name} ({found}={c.keys[found]}); only supervised fine-tuning converts."
            )
    for key, value in c.keys.items():
        if key.endswith("columns") and isinstance(value, list) and {"chosen", "rejected"} <= set(map(str, value)):
            raise ConversionError(
                f"{c.file} configures preference training such as DPO ({key} has chosen and rejected)."
            )
    if is_true(c.get("do_predict")) and not is_true(c.get("do_train")):
        raise ConversionError(f"{c.file} configures prediction (do_predict=true), which trains nothing.")


def convert(c: Conversion) -> None:
    """Convert a config of TRL, the handbook or transformers.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    _refuse(c)
    rows = TRANSFORMERS if c.tool == "transformers" else TRL
    training.batch(c, "per_device_train_batch_size", "gradient_accumulation_steps", 8)
    rate = as_number(c.get("learning_rate", rows["learning_rate"].default))
    training.schedule(c, "lr_scheduler_type", "lr_scheduler_kwargs", rate)
    training.warmup(c)
    training.precision(c, "fp32" if c.tool == "transformers" else "auto")
    for key in filter(c.has, ("torch_dtype", "dtype")):
        c.note(key, "train.precision", rows[key].note)
    _model(c)
    _adapters(c)
    model.quantized(c)
    _sources(c)
    evaluation(c)
    training.best(c, "early_stopping_patience")
    engine.deepspeed(c)
    engine.fsdp(c)
    _launcher(c)
    training.optimizer(c, "optim")
    training.report_to(c, "report_to")
    training.run_name(c, "run_name")
    if c.tool != "transformers":
        c.settings["data.overlong"] = "truncate"
        _lengths(c)
    if not c.get("model_name_or_path"):
        c.settings["model.name_or_path"] = "MODEL"
        c.comments["model.name_or_path"] = ["the file names no model: write its path or its id on the hub"]
    engine.compiled(c, "torch_compile")
    c.apply(rows)


def _lengths(c: Conversion) -> None:
    """What is cut, and which tokens are trained."""
    strategy = str(c.get("packing_strategy", "bfd"))
    if c.has("packing_strategy") and strategy == "bfd_split":
        c.carry("packing_strategy", "data.overlong", "split")
    elif c.has("packing_strategy"):
        why = (
            "documents of a pack do not attend to each other here"
            if strategy == "wrapped"
            else "best-fit over all documents here"
        )
        c.note("packing_strategy", "data.packing", why)
    if c.has("truncation_mode") and c.get("truncation_mode") == "keep_start":
        c.carry("truncation_mode", "data.overlong", c.settings["data.overlong"])
    _loss_on(c)


def _loss_on(c: Conversion) -> None:
    columns = [
        str(one)
        for key, value in c.keys.items()
        if key.endswith("columns") and isinstance(value, list)
        for one in value
    ]
    assistant, completion, to = c.get("assistant_only_loss"), c.get("completion_only_loss"), "data.loss_on"
    if c.has("assistant_only_loss") and is_true(assistant):
        c.carry("assistant_only_loss", to, "assistant")
    elif c.has("completion_only_loss"):
        c.carry("completion_only_loss", to, "completion" if is_true(completion) else "all")
        if c.has("assistant_only_loss"):
            c.keep("assistant_only_loss", "false: completion_only_loss decides")
    elif "messages" in columns or assistant is not None:
        if assistant is not None:
            c.change(
                "assistant_only_loss",
                to,
                "all",
                "every token is trained, the user's too, as in TRL; `auto` trains the assistant's only",
            )
        else:
            c.default(
                "assistant_only_loss",
                to,
                "all",
                "; every token of `messages` is trained, and `auto` trains the assistant's only",
            )
    else:
        c.default(
            "assistant_only_loss",
            to,
            "auto",
            ": false. For rows with `messages`, set data.loss_on: all to train every token, as TRL does",
        )


def _model(c: Conversion) -> None:
    if c.has("model_revision") and c.get("model_revision") == "main":
        c.keep("model_revision", "model.revision: main is the default")
    model.remote_code(c, "model_revision")
    if c.has("chat_template"):
        model.own_template(c, "chat_template", str(c.get("chat_template")))
    if c.has("chat_template_path"):
        path = str(c.get("chat_template_path"))
        if path.endswith((".jinja", ".j2")):
            c.carry("chat_template_path", "model.chat_template", path)
        else:
            c.drop(
                "chat_template_path",
                f"{path} is a model whose template to take: save it as a .jinja file and set model.chat_template",
            )


def _adapters(c: Conversion) -> None:
    adapters = [key for key in c.keys if key.startswith("lora_") or key in ("use_rslora", "use_dora")]
    if not is_true(c.get("use_peft")):
        for key in filter(c.has, adapters):
            c.drop(key, "no adapters: use_peft is not set")
        if c.has("use_peft"):
            c.keep("use_peft", "all weights are trained")
        return
    c.settings["model.lora"] = {}
    if c.get("lora_target_modules") == ["all-linear"]:
        c.carry("lora_target_modules", "model.lora.target_modules", "all-linear")
    c.note("use_peft", "model.lora", "adapters are trained where model.lora is given; final/ is the merged model")


def _sources(c: Conversion) -> None:
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    names = {
        "dataset_name": "path",
        "dataset_config": "name",
        "dataset_train_split": "split",
        "dataset_streaming": "streaming",
    }
    mixture = {"dataset_mixture.datasets": {"id": "path", "config": "name", "split": "split", "weight": "epochs"}}
    mixture["datasets"] = {"path": "path", "name": "name", "split": "split", "fraction": "weight"}
    if c.has("dataset_name"):
        train.append(sources.read_source(c, "", "data.train", names))
        if strategy_of(c, "eval_strategy", "evaluation_strategy") not in ("no", "false"):
            split = str(c.get("dataset_test_split", "test"))
            held_out = [{key: value for key, value in train[0].items() if key != "epochs"} | {"split": split}]
            if c.has("dataset_test_split"):
                c.account(c.carried, "dataset_test_split", f"data.held_out.split: {split}")
        elif c.has("dataset_test_split"):
            c.drop("dataset_test_split", "eval_strategy is `no`")
    for prefix, ours in mixture.items():
        for index in sources.indices(c, prefix):
            source = sources.read_source(c, f"{prefix}.{index}.", f"data.train.{len(train)}", ours)
            if source.get("name") == "default":
                del source["name"]
            train.append(source)
    for key in [key for key in c.keys if key.startswith("dataset_mixer.") and c.has(key)]:
        name = key.removeprefix("dataset_mixer.")
        source = sources.read_source(c, "dataset_mixer.", f"data.train.{len(train)}", {name: "epochs"})
        train.append(source | {"path": name})
    sources.set_sources(c, train, held_out)
    for key in ("dataset_mixture.test_split_size", "test_split_size"):
        sources.held_out_size(c, key)


def strategy_of(c: Conversion, *keys: str) -> str:
    """The first of the strategies that the file gives: no, steps or epoch."""
    given = next((c.get(key) for key in keys if c.get(key) is not None), "no")
    return str(given).lower().rpartition(".")[2]


def evaluation(c: Conversion) -> None:
    """Convert how often the eval loss is measured, and when checkpoints are written."""
    for key in ("eval_strategy", "evaluation_strategy"):
        if not c.has(key):
            continue
        strategy = strategy_of(c, key)
        if strategy in ("no", "false"):
            c.keep(key, "no eval loss unless data.held_out is set")
        elif strategy == "steps":
            c.note(
                key,
                "train.eval_steps",
                "the eval loss is measured every train.eval_steps, and at each checkpoint where that is unset",
            )
        else:
            c.note(key, "train.eval_steps", "the eval loss is measured at each checkpoint, at the start and at the end")
    if c.has("do_eval"):
        c.keep("do_eval", "the eval loss is measured where data.held_out is set")
    if c.has("save_strategy"):
        strategy = strategy_of(c, "save_strategy")
        if strategy == "steps":
            c.keep("save_strategy", "train.save_steps")
        else:
            c.carry("save_strategy", "train.save_strategy", "no" if strategy == "false" else strategy)


def _launcher(c: Conversion) -> None:
    """TRL's own names for accelerate's files."""
    key, name = "accelerate_config", str(c.get("accelerate_config", ""))
    if not c.has(key):
        return
    if "train.deepspeed" in c.settings or "train.fsdp" in c.settings:
        c.drop(key, "the file names the engine too")
    elif name.startswith("zero"):
        c.change(key, "train.deepspeed", name, "ds_configs/ has a file of that stage")
    elif name.startswith("fsdp"):
        c.change(key, "train.fsdp", {}, "FSDP2")
    else:
        c.drop(key, "the number of processes is that of the visible GPUs: NPROC")
