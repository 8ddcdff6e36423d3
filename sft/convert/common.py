"""Converts what several tools have in common: the batch, schedules, optimizers, precision, engines, templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sft.convert.conversion import Conversion, ConversionError, as_number, refusal, shown, table
from sft.recipe.load import find_file

OWN_TEMPLATE = "the tokenizer's own chat template is used; if it has none, set model.chat_template"


def is_true(value: Any) -> bool:
    """Whether a flag is set; YAML may hold it as text."""
    return value is True or str(value).lower() in ("true", "1", "yes", "auto")


def as_whole(value: Any) -> int | None:
    """A whole number above 0; None for -1 (no limit), fractions, and what is no number."""
    number = as_number(value)
    return int(number) if number is not None and number > 0 and number == int(number) else None


def batch(c: Conversion, per_gpu: str, accumulation: str, default: int, gpus_per_batch: int = 1) -> None:
    """Multiply the batch per GPU to the global batch of a recipe.

    Raises:
        ConversionError: The number of GPUs is missing or does not divide.
    """
    size, steps = as_whole(c.get(per_gpu, default)), as_whole(c.get(accumulation, 1))
    said = f"{per_gpu}={c.get(per_gpu)}" if c.get(per_gpu) is not None else f"{per_gpu} ({c.tool}'s default: {default})"
    if size is None:
        raise ConversionError(f"{c.file}: {said} is no number of sequences. Write a whole number of at least 1.")
    if steps is None:
        said = f"{accumulation}={c.get(accumulation)}"
        raise ConversionError(f"{c.file}: {said} is no number of micro-batches. Write a whole number of at least 1.")
    if c.gpus is None:
        raise ConversionError(
            f"{c.file}: {said} is per GPU, and a recipe states the batch over all GPUs. Add --gpus N, the number of GPUs that this "
            "file was used on."
        )
    if c.gpus % gpus_per_batch:
        raise ConversionError(
            f"--gpus {c.gpus} is no multiple of the {gpus_per_batch} GPUs that share a batch in {c.file}."
        )
    total = size * steps * (c.gpus // gpus_per_batch)
    shared = f" / {gpus_per_batch} that share a batch" if gpus_per_batch > 1 else ""
    gpus = f"{c.gpus} GPU{'s' * (c.gpus > 1)}{shared}"
    why = f"{size} per GPU x {steps} accumulated x {gpus}; accumulation follows from it on any number of GPUs"
    to = "train.global_batch_size"
    if c.has(per_gpu):
        c.change(per_gpu, to, total, why)
    else:
        c.default(per_gpu, to, total, f"; {why}")
    if c.has(accumulation):
        c.account(c.changed, accumulation, f"{to}: {total} (part of {per_gpu})")


_SCHEDULE_ARGUMENTS = {
    "cosine_with_min_lr": {"min_lr_rate": "min_lr_ratio", "min_lr": "min_lr_ratio"},
    "warmup_stable_decay": {
        "num_decay_steps": "lr_decay_steps",
        "min_lr_ratio": "min_lr_ratio",
        "decay_type": "lr_decay_type",
    },
    "polynomial": {"lr_end": "min_lr_ratio", "power": "lr_power"},
}
"""The arguments of transformers' schedules, and our keys of `train`."""


def schedule(c: Conversion, key: str, arguments: str, rate: float | None) -> None:
    """Convert the schedule's name and its arguments, and the limit of the steps."""
    steps = as_number(c.get("max_steps"))
    if c.has("max_steps") and steps is not None and steps <= 0:
        c.keep("max_steps", "no limit: the epochs decide")
    kind = str(c.get(key)).lower().removeprefix("schedulertype.")
    ends = [as_number(c.get(f"{arguments}.{name}")) for name in ("min_lr", "min_lr_rate")]
    to = "train.lr_scheduler_type"
    if c.has(key) and kind == "cosine_with_min_lr" and not any(ends):
        c.change(key, to, "cosine", "it ends at 0")
    elif c.has(key) and (reason := refusal(to, kind)):
        c.drop(key, f"{reason}. It is cosine unless you set it")
    elif c.has(key):
        c.carry(key, to, kind)
    for one in [one for one in c.keys if one.startswith(f"{arguments}.") and c.has(one)]:
        argument = one.removeprefix(f"{arguments}.")
        ours, value = _SCHEDULE_ARGUMENTS.get(kind, {}).get(argument), as_number(c.keys[one])
        if ours is None:
            c.drop(one, f"the schedule {kind} has no such argument here")
        elif argument in ("min_lr", "lr_end") and value is not None and rate:
            c.change(one, f"train.{ours}", float(f"{value / rate:.12g}"), "as a fraction of the learning rate")
        else:
            c.carry(one, f"train.{ours}", c.keys[one])
    if kind == "constant":
        for one in ("warmup_ratio", "warmup_steps"):
            if c.has(one) and as_number(c.keys[one]):
                c.drop(one, f"{c.tool}'s schedule `constant` has no warmup")


def warmup(c: Conversion, steps: str = "warmup_steps", ratio: str = "warmup_ratio") -> None:
    """Convert the warmup: in steps, or as a fraction of all steps."""
    number, fraction = as_number(c.get(steps)), as_number(c.get(ratio))
    if c.has(steps) and number is not None and 0 < number < 1:
        c.change(steps, "train.warmup_ratio", number, "below 1 it is a fraction of all steps")
    elif c.has(steps) and number is not None:
        c.carry(steps, "train.warmup_steps", int(number))
    if not c.has(ratio):
        return
    if number and fraction:
        c.drop(ratio, f"{steps} is given too, and {c.tool} takes that")
    elif fraction:
        c.carry(ratio, "train.warmup_ratio", fraction)
    else:
        c.carry(ratio, "train.warmup_steps", 0)


_OPTIMIZERS = {
    **dict.fromkeys("adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused".split(), ("adamw", "")),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), ("adamw_8bit", "")),
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), ("adamw_8bit", "that of bitsandbytes")),
    **dict.fromkeys(
        ("paged_adamw", "paged_adamw_32bit"), ("adamw", "with states on the GPU: only 8-bit ones are paged here")
    ),
    **dict.fromkeys(("lion", "lion_32bit"), ("lion", "")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "paged_lion_32bit"), ("lion", "with fp32 states on the GPU")),
    "muon": ("muon", "torch.optim.Muon, its step scaled to AdamW's"),
}
"""Their names, ours, and what differs."""


def optimizer(c: Conversion, key: str, theirs: str = "") -> None:
    """Convert the optimizer's name, and Adam's arguments where it does not take them; `theirs` is a name that the key stands for."""
    theirs = theirs or str(c.get(key, "adamw")).lower().removeprefix("optimizernames.")
    ours, differs = _OPTIMIZERS.get(theirs, (theirs, ""))
    to, reason = "train.optim", refusal("train.optim", ours)
    if c.has(key) and reason:
        c.drop(key, f"{reason}. It is adamw unless you set it")
    elif c.has(key) and differs:
        c.change(key, to, ours, differs)
    elif c.has(key):
        c.carry(key, to, ours)
    if reason or ours not in ("lion", "adafactor"):
        return
    c.inapplicable.add("adam_beta2")
    for number, default in (("1", 0.9), ("2", 0.999)):
        adam, argument = f"adam_beta{number}", f"train.optim_args.beta{number}"
        if ours == "lion" and c.has(adam):
            c.carry(adam, argument, as_number(c.get(adam)))
        elif ours == "lion":
            c.default(adam, argument, default, ": Lion gets AdamW's")
        elif c.has(adam):
            c.drop(adam, "adafactor has none")
    if c.has("adam_epsilon"):
        c.drop("adam_epsilon", f"{ours} has none here")


def precision(c: Conversion, unset: str = "auto") -> None:
    """Convert the flags of the dtype to train.precision; `unset` is what the tool computes in without any."""
    bf16, fp16, to = c.get("bf16"), c.get("fp16"), "train.precision"
    if str(bf16).lower() == "auto":
        value = "auto"
    elif is_true(bf16) or is_true(fp16):
        value = "bf16" if is_true(bf16) else "fp16"
    else:
        value = "fp32" if bf16 is not None else unset
    for key in filter(c.has, ("bf16", "fp16")):
        c.carry(key, to, value)
    if bf16 is None and fp16 is None and value != "auto":
        c.default("bf16", to, value)
    if c.has("tf32") and is_true(c.get("tf32")) and value == "fp32":
        c.carry("tf32", "train.trainer_args.tf32", True)
    elif c.has("tf32"):
        c.drop("tf32", f"it is about fp32 matrices, and train.precision is {value}")


def deepspeed(c: Conversion, key: str = "deepspeed") -> None:
    """Convert a DeepSpeed file, by its path or its content, to the one of ds_configs/ with the same stage and offload."""
    inside = [one for one in c.keys if one.startswith(f"{key}.") and c.has(one)]
    path = c.get(key)
    if isinstance(path, str) and c.has(key):
        if find_file(path).is_file():
            c.carry(key, "train.deepspeed", path)
            return
        match = re.search(r"z(?:ero)?[_-]?([0-3])", Path(path).name.lower())
        offload = "offload" in path.lower()
        _deepspeed_stage(c, key, int(match[1]) if match else None, offload, f"{path} is not here")
    elif inside:
        stage_key = f"{key}.zero_optimization.stage"
        devices = [
            str(c.get(f"{key}.zero_optimization.offload_{what}.device", "none")) for what in ("optimizer", "param")
        ]
        stage = c.get(stage_key)
        if c.has(stage_key):
            _deepspeed_stage(c, stage_key, stage, devices != ["none", "none"], "its own values are not read")
        for one in inside:
            if c.has(one):
                c.drop(
                    one,
                    "a DeepSpeed file of your own may be named in train.deepspeed; ds_configs/README.md explains each key",
                )


def _deepspeed_stage(c: Conversion, key: str, stage: Any, offload: bool, why: str) -> None:
    if stage not in (0, 1, 2, 3):
        c.drop(
            key, f"{why}, and its name shows no ZeRO stage: set train.deepspeed to a file of ds_configs/ or your own"
        )
    elif stage == 0:
        c.drop(key, "ZeRO-0 is plain data parallelism, as without DeepSpeed")
    else:
        name = f"zero{stage}" + ("_offload" if offload and stage > 1 else "")
        c.change(key, "train.deepspeed", name, f"{why}: ds_configs/{name}.json is the same stage")


_STRATEGIES = {"full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "hybrid_shard": "hybrid_shard"}
_RESHARD = {"true": "full_shard", "false": "shard_grad_op"}
_FSDP_TABLE = """
fsdp_sharding_strategy -> train.fsdp.sharding_strategy
fsdp_reshard_after_forward -> train.fsdp.sharding_strategy
fsdp_offload_params -> train.fsdp.offload_params
fsdp_state_dict_type -> train.fsdp.state_dict_type
fsdp_min_num_params -> train.fsdp.min_num_params
fsdp_activation_checkpointing -> train.gradient_checkpointing
fsdp_version -- FSDP2 is the only one here
fsdp_auto_wrap_policy -- each decoder layer is wrapped; train.fsdp.min_num_params wraps by size
fsdp_transformer_layer_cls_to_wrap -- the decoder layers are found in the model
fsdp_final_state_dict_type -- final/ is always a full model
* -- FSDP2 needs no such setting
"""
_FSDP_ROWS = table(
    _FSDP_TABLE,
    {
        "fsdp_sharding_strategy": _STRATEGIES,
        "fsdp_reshard_after_forward": _RESHARD | _STRATEGIES,
        "fsdp_state_dict_type": {"full_state_dict": "full", "sharded_state_dict": "sharded"},
    },
)
FSDP = {f"fsdp_config.{name}": row for name, row in _FSDP_ROWS.items()}
FSDP |= {f"fsdp_config.{name.removeprefix('fsdp_')}": row for name, row in _FSDP_ROWS.items()}


def fsdp(c: Conversion) -> None:
    """Turn on train.fsdp where the file has FSDP; its settings are in FSDP_ROWS."""
    given = c.get("fsdp")
    names = " ".join(map(str, given)) if isinstance(given, list) else str(given or "")
    inside = [one for one in c.keys if one.startswith("fsdp_config.")]
    if not inside and names.lower() in ("", "false", "none"):
        return
    if "no_shard" in names.lower() or str(c.get("fsdp_config.fsdp_sharding_strategy")).lower() == "no_shard":
        return
    if "train.deepspeed" in c.settings:
        for key in filter(c.has, ("fsdp", *inside)):
            c.drop(key, "the engine is DeepSpeed, which the file names too")
        return
    c.settings["train.fsdp"] = {}
    if c.has("fsdp"):
        strategy = next((ours for theirs, ours in _STRATEGIES.items() if theirs in names.lower()), "full_shard")
        c.change("fsdp", "train.fsdp.sharding_strategy", strategy, "FSDP2, with each decoder layer wrapped")
        if "offload" in names.lower():
            c.settings["train.fsdp.offload_params"] = True


def best(c: Conversion, patience: str) -> None:
    """Convert the best checkpoint and early stopping, once data.held_out is known."""
    keys = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", patience)
    wanted = is_true(c.get("load_best_model_at_end")) or c.has(patience)
    metric = str(c.get("metric_for_best_model", "eval_loss"))
    why = ""
    if not wanted:
        why = "no effect without load_best_model_at_end"
    elif c.settings.get("data.held_out") is None:
        why = "it compares the eval loss, and there is no eval split: set data.held_out"
    elif metric not in ("eval_loss", "loss"):
        why = (
            f"{metric} is not measured here: train.metric_for_best_model is eval_loss, or a metric of eval.every_steps"
        )
    for key in filter(c.has, keys):
        if key == "load_best_model_at_end" and not is_true(c.get(key)):
            c.keep(key, "not set")
        elif why:
            c.drop(key, why)
        elif key == "load_best_model_at_end":
            c.carry(key, "train.load_best_model_at_end", True)
        elif key == "metric_for_best_model":
            c.carry(key, "train.metric_for_best_model", "eval_loss")
        else:
            c.carry(key, f"train.{'early_stopping_patience' if key == patience else key}", c.get(key))
    if wanted and not why:
        c.set("train.load_best_model_at_end", True)
        steps, said = (
            as_whole(c.get("eval_steps")),
            "the eval loss is measured at each checkpoint, so that the best one is there",
        )
        for key in filter(c.has, ("eval_steps", "save_steps")):
            if steps:
                c.change(key, "train.save_steps", steps, said)


def quantized(c: Conversion) -> None:
    """Convert bitsandbytes' flags, once it is known whether adapters are trained."""
    kind = str(c.get("bnb_4bit_quant_type", c.get("bnb_config_kwargs.bnb_4bit_quant_type", "nf4")))
    four, eight = is_true(c.get("load_in_4bit")), is_true(c.get("load_in_8bit"))
    if not four:
        c.inapplicable.add("use_bnb_nested_quant")
    for key in filter(
        c.has, ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_config_kwargs.bnb_4bit_quant_type")
    ):
        if not is_true(c.get(key)) and key.startswith("load"):
            c.keep(key, "not quantized")
        elif "model.lora" not in c.settings:
            c.drop(key, "no adapters are trained, and quantized weights alone cannot be")
        elif key.startswith("load") or four:
            c.carry(key, "model.quantization", "int8" if eight and key != "load_in_4bit" else kind)
        else:
            c.drop(key, "no effect without load_in_4bit")


def remote_code(c: Conversion, revision: str) -> None:
    """Convert trust_remote_code: here the model's own code runs only from a commit."""
    key = "trust_remote_code"
    if c.has(key) and is_true(c.get(key)) and not re.fullmatch(r"[0-9a-f]{40}", str(c.get(revision))):
        c.drop(
            key,
            "models of transformers need none; where a model does, set model.revision to a commit, and model.trust_remote_code",
        )


def run_name(c: Conversion, key: str) -> None:
    """Convert a run's name, which names a folder here."""
    if not c.has(key):
        return
    name = str(c.get(key))
    ours = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    if ours == name:
        c.carry(key, "tracking.run_name", name)
    elif ours:
        c.change(key, "tracking.run_name", ours, "it also names the run's folder: letters, digits, `.`, `_` and `-`")
    else:
        c.drop(key, "it names the run's folder: letters, digits, `.`, `_` and `-`")


def report_to(c: Conversion, key: str) -> None:
    """Convert the list of trackers; each that recipes lack is named."""
    if not c.has(key):
        return
    given = c.get(key)
    names = [str(one).lower() for one in (given if isinstance(given, list) else [given])]
    names = [one for one in names if one != "none"]
    known = [one for one in names if not refusal("tracking.report_to", [one])]
    if names == known:
        c.carry(key, "tracking.report_to", known)
    elif known:
        c.change(key, "tracking.report_to", known, f"without {', '.join(one for one in names if one not in known)}")
    else:
        c.drop(key, f"no tracker here is named {shown(given)}; metrics.jsonl has the curves")


def own_template(c: Conversion, key: str, text: str) -> None:
    """Convert a chat template that stands in the file: it becomes a file beside the recipe."""
    if "{" not in text:
        c.carry(key, "model.chat_template", text)
        return
    name = f"{Path(c.file).stem}.jinja"
    c.templates[name] = text
    c.change(key, "model.chat_template", name, "a chat template is a file of its own; -o writes it beside the recipe")
