"""Converts configs of TRL (`trl sft --config`), of the alignment-handbook, and TrainingArguments of transformers: one family of names."""

from __future__ import annotations

from typing import Any

from sft.convert import sources, training
from sft.convert.conversion import Changed, Conversion, ConversionError, HoldsAnyway, Translation, is_true

_TRAINER = f"""
model_name_or_path -> model.name_or_path
per_device_train_batch_size -> train.global_batch_size (8) -- {training.BATCH}
gradient_accumulation_steps -> train.global_batch_size -- part of the global batch; here it follows from it
learning_rate -> train.learning_rate (5e-5)
num_train_epochs -> train.num_train_epochs (3.0)
lr_scheduler_type -> train.lr_scheduler_type ("linear")
use_liger_kernel -> model.kernels
log_* logging_* disable_tqdm include_* skip_memory_metrics plot_loss -- metrics.jsonl has the curves, and the report draws them
do_train do_predict -- training is what the command does
average_tokens_across_devices -- always: the loss is divided by the target tokens of the step over all ranks
use_cpu no_cuda parallelism_config accelerator_config.* num_processes -- the launcher and the plan decide it
"""
_TRL = """
torch_dtype dtype -- the dtype of the weights follows from train.precision
use_peft -> model.lora -- adapters are trained where model.lora is given; final/ is the merged model
load_in_4bit load_in_8bit bnb_4bit_quant_type -> model.quantization
use_bnb_nested_quant -> model.bnb_4bit_use_double_quant (false)
bnb_4bit_quant_storage -- the engine decides it
lora_r -> model.lora.r
lora_alpha -> model.lora.lora_alpha
lora_dropout -> model.lora.lora_dropout (0.05)
lora_target_modules -> model.lora.target_modules (["q_proj", "v_proj"])
lora_modules_to_save -> model.lora.modules_to_save
use_rslora use_dora -> model.lora.*
lora_task_type -- always CAUSAL_LM
chat_template -> model.chat_template -- text in the file becomes a .jinja file next to the recipe
chat_template_path -> model.chat_template -- a .jinja file; the template of another model is not taken
eos_token pad_token -> model.*
accelerate_config -> train.deepspeed -- zero1 to zero3; for fsdp set train.fsdp, and the number of processes is that of the visible GPUs
dataset_name -> data.train
dataset_config -> data.train.name
dataset_train_split -> data.train.split
dataset_test_split -> data.held_out -- the eval split where eval_strategy is not `no`
dataset_streaming -> data.train.streaming
dataset_mixture.datasets.*.id datasets.*.path -> data.train.path
dataset_mixture.datasets.*.config datasets.*.name -> data.train.name
dataset_mixture.datasets.*.split datasets.*.split -> data.train.split
dataset_mixture.datasets.*.weight -> data.train.epochs -- the fraction of its rows to use
dataset_mixture.datasets.*.columns datasets.*.columns -- all columns are read, and unused ones listed
dataset_mixture.seed -> data.seed -- rows are drawn differently
dataset_mixture.test_split_size test_split_size -> data.held_out -- a fraction; a number of rows becomes 1%
dataset_mixer.* -- write its datasets into data.train
dataset_text_field -- a column of another name: data.train.columns
max_length -> data.max_length (1024) -- longer documents are cut at the end, as in TRL: data.overlong
max_seq_length -> data.max_length -- longer documents are cut at the end, as in TRL: data.overlong
packing -> data.packing (false)
packing_strategy -> data.overlong -- bfd cuts long documents, bfd_split splits them; documents never attend to each other here
truncation_mode -- keep_start is what data.overlong: truncate does; nothing keeps the end
assistant_only_loss -> data.loss_on (false) -- unless it is set, TRL trains every token of `messages`: `all`
completion_only_loss -> data.loss_on -- true is `completion`, false `all`
dataset_kwargs.* shuffle_dataset auto_insert_empty_system_msg -- our own preparation renders and packs the rows
ignore_bias_buffers -- no model that trains here needs it
"""


def _packing_strategy(c: Conversion, key: str, value: Any) -> str:
    if value == "bfd_split":
        return "split"
    raise HoldsAnyway("best-fit over all documents here, which never attend to each other")


def _loss_on(c: Conversion, key: str, value: Any) -> Any:
    """Which tokens TRL trains: of `messages` all, unless a flag says otherwise."""
    if is_true(c.get("assistant_only_loss")):
        return "assistant"
    if c.get("completion_only_loss") is not None:
        return "completion" if is_true(c.get("completion_only_loss")) else "all"
    has_messages = any(key.endswith("columns") and "messages" in str(value) for key, value in c.keys.items())
    if c.get("assistant_only_loss") is not None or has_messages:
        return Changed("all", "every token is trained, the user's too, as in TRL; `auto` trains the assistant's only")
    return Changed("auto", "for rows with `messages`, set data.loss_on: all to train every token, as TRL does")


_TRANSLATIONS: dict[str, Translation] = {
    "train.global_batch_size": training.batch("per_device_train_batch_size", 8),
    "accelerate_config": {name: name for name in ("zero1", "zero2", "zero3")},
    "packing_strategy": _packing_strategy,
    "data.loss_on": _loss_on,
}
TRAINER = training.SHARED | training.rows(_TRAINER, _TRANSLATIONS)
TRANSFORMERS = TRAINER | training.rows("bf16 -> train.precision (false)")
TRL = TRAINER | training.rows(_TRL, _TRANSLATIONS) | training.rows("learning_rate -> train.learning_rate (2e-5)")

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
            raise ConversionError(f"{c.file} configures preference training such as DPO ({key}: chosen and rejected).")
    if is_true(c.get("do_predict")) and not is_true(c.get("do_train")):
        raise ConversionError(f"{c.file} configures prediction (do_predict=true), which trains nothing.")


def convert(c: Conversion) -> None:
    """Convert a config of TRL, the handbook or transformers.

    Raises:
        ConversionError: Another kind of training, or --gpus is missing.
    """
    _refuse(c)
    _sources(c)
    if c.tool != "transformers":
        c.settings["data.overlong"] = "truncate"
    if not c.get("model_name_or_path"):
        c.settings["model.name_or_path"] = "MODEL"
        c.comments["model.name_or_path"] = ["the file names no model: write its path or its id on the hub"]
    training.apply(c, TRANSFORMERS if c.tool == "transformers" else TRL)


_DATASET = {
    "dataset_name": "path",
    "dataset_config": "name",
    "dataset_train_split": "split",
    "dataset_streaming": "streaming",
}
_MIXTURES = {
    "dataset_mixture.datasets": {"id": "path", "config": "name", "split": "split", "weight": "epochs"},
    "datasets": {"path": "path", "name": "name", "split": "split"},
}


def _sources(c: Conversion) -> None:
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    if c.has("dataset_name"):
        train = [sources.read_source(c, "", _DATASET)]
        evaluates = str(c.get("eval_strategy", c.get("evaluation_strategy", "no"))).lower()
        if evaluates not in ("no", "false"):
            held_out = [train[0] | {"split": str(c.get("dataset_test_split", "test"))}]
        if c.has("dataset_test_split"):
            c.account("dataset_test_split", "data.held_out: an eval split where eval_strategy is not `no`")
    for prefix, ours in _MIXTURES.items():
        train += [sources.read_source(c, f"{prefix}.{index}.", ours) for index in sources.indices(c, prefix)]
    for source in train:
        if source.get("name") == "default":
            del source["name"]
    sources.set_sources(c, train, held_out)
