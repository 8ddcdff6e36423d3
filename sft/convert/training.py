"""Converts what several tools say about the training: batch, schedule, optimizer, dtype, the best checkpoint, trackers."""

from __future__ import annotations

import re

from sft.convert.conversion import Conversion, ConversionError, as_number, as_whole, is_true, refusal, shown


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
    if total % c.gpus:
        why += f"; {c.gpus} GPUs cannot share {total}: use a number that divides it, or set train.remainder to fill"
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
    """Convert the optimizer's name, once the engine is known, and Adam's arguments where it does not take them.

    `theirs` is a name that the key stands for.
    """
    theirs = theirs or str(c.get(key, "adamw")).lower().removeprefix("optimizernames.")
    ours, differs = _OPTIMIZERS.get(theirs, (theirs, ""))
    if ours.endswith("8bit") and ("train.deepspeed" in c.settings or "train.fsdp" in c.settings):
        ours, differs = "adamw", "its 8-bit states cannot be sharded; fp32 ones are, and take more memory"
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
        elif key == patience and c.has("evals_per_epoch"):
            said = "it counts checkpoints, where the eval loss is measured here: set it lower, or train.save_steps to evaluate as often"
            c.change(key, "train.early_stopping_patience", c.get(key), said)
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
