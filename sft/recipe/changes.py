"""What differs between two recipes, and which differences a run may go on with. Imports no torch.

Every key belongs to one of three kinds, which docs/resume.md lists:

FREE     what is trained does not depend on it: it may change at any start
NAMED    it changes what is trained from here on, and takes effect: it may change where train.resume_allow_changes names it
FIXED    it would not take effect, or what was trained so far would no longer be part of the same run
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from sft.errors import RecipeError, did_you_mean
from sft.recipe.schema import Recipe, Section

FREE = frozenset(
    {
        "schema_version",
        "version",
        "output_dir",
        "debug",
        "eval",
        "tracking",
        # They judge the prepared data and do not change it.
        "data.max_overlong_fraction",
        "data.max_dropped_fraction",
        "data.allow",
        "data.min_trained_fraction",
        # Who computes what, and when it is written.
        "train.micro_batch_size",
        "train.remainder",
        "train.gradient_checkpointing",
        "train.deepspeed",
        "train.fsdp",
        "train.parallel",
        "train.tensor_parallel_size",
        "train.sequence_parallel_size",
        "train.ddp_timeout",
        "train.save_steps",
        "train.save_total_limit",
        "train.eval_steps",
        "train.logging_steps",
        "train.profile",
        "train.max_time",
        "train.save_canary",
        "train.resume",
        "train.resume_allow_changes",
        # What is done about broken numbers: nothing that was trained so far depends on it.
        "train.on_nonfinite",
        "train.max_nonfinite_steps",
        "train.trainer_args.dataloader_num_workers",
        "train.trainer_args.dataloader_pin_memory",
        "train.trainer_args.dataloader_prefetch_factor",
    }
)

_SCHEDULE = "the schedule is the new one from here on, at the step that was reached"
_ROUNDING = "the same arithmetic in another order from here on"

NAMED = {
    "train.max_steps": _SCHEDULE,
    "train.num_train_epochs": _SCHEDULE,
    "train.lr_scheduler_type": _SCHEDULE,
    "train.min_lr_ratio": _SCHEDULE,
    "train.warmup_steps": _SCHEDULE,
    "train.learning_rate": "the schedule has the new peak from here on",
    "train.lr_scaling": "the schedule has the new peak from here on",
    "train.base_batch_size": "the schedule has the new peak from here on",
    "train.max_grad_norm": "gradients are scaled down to the new norm from here on",
    "train.precision": "the new format from here on; what AdamW steps on is fp32 in both, and goes on; never to or from fp16",
    "model.attn_implementation": _ROUNDING,
    "model.kernels": _ROUNDING,
    "model.compile": _ROUNDING,
    "model.trust_remote_code": "the model's own code runs, or no longer does, from here on",
    "data": "as long as the prepared sequences stay the same",
}
"""Keys, and what happens when one changes."""

_OPTIMIZER = "it is part of the optimizer's state in the checkpoint, which would win"
_ORDER = "it decides which rows a step holds, so that some would be trained twice and others never"
_MODEL = "the weights and tokens in the checkpoint are those of the other model"

FIXED = {
    "train.global_batch_size": _ORDER,
    "train.global_batch_tokens": _ORDER,
    "train.seed": _ORDER,
    "train.weight_decay": _OPTIMIZER,
    "train.adam_beta1": _OPTIMIZER,
    "train.adam_beta2": _OPTIMIZER,
    "train.adam_epsilon": _OPTIMIZER,
    "train.trainer_args": "nobody can tell for any argument of the trainer whether it would take effect",
    "model.name_or_path": _MODEL,
    "model.revision": _MODEL,
    "model.chat_template": _MODEL,
    "model.pad_token": _MODEL,
    "model.eos_token": _MODEL,
    "model.new_tokens": _MODEL,
    "model.lora": _MODEL,
}
"""Keys, and why a run cannot go on with another value."""

MISSING = "(not there)"


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    old: Any
    new: Any

    @property
    def kind(self) -> str:
        """`free`, `named` or `fixed`."""
        return kind_of(self.key)

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def _shown(value: Any) -> str:
    if value == MISSING:
        return MISSING
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:97] + "..."


def kind_of(key: str) -> str:
    """`free`, `named` or `fixed`, by the key or the section that it is in."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        for kind, keys in (("free", FREE), ("named", NAMED), ("fixed", FIXED)):
            if name in keys:
                return kind
    raise AssertionError(f"{key} has no kind")


def differences(old: Any, new: Any, key: str = "") -> list[Change]:
    """What differs between two trees of plain values, by dotted key.

    >>> [str(change) for change in differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})]
    ['a.c: 2 -> 3']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = [(name, old.get(name, MISSING), new.get(name, MISSING)) for name in dict.fromkeys([*old, *new])]
    elif _are_lists_of_sections(old, new):
        pairs = [(str(place), *both) for place, both in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new and isinstance(old, bool) == isinstance(new, bool) else [Change(key, old, new)]
    return [change for name, one, other in pairs for change in differences(one, other, f"{key}.{name}".lstrip("."))]


def _are_lists_of_sections(old: Any, new: Any) -> bool:
    lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    return lists and all(isinstance(one, Mapping) for one in [*old, *new])


def recipe_differences(old: Recipe, new: Recipe) -> list[Change]:
    """What differs between two recipes, defaults filled in: the text and its order do not matter."""
    return differences(old.model_dump(mode="json"), new.model_dump(mode="json"))


def not_allowed(changes: Sequence[Change], named: Sequence[str]) -> list[Change]:
    """The changes that a run cannot go on with.

    Args:
        changes: From recipe_differences.
        named: train.resume_allow_changes.
    """

    def is_named(change: Change) -> bool:
        return change.kind == "named" and any(change.key == key or change.key.startswith(f"{key}.") for key in named)

    return [change for change in changes if change.kind != "free" and not is_named(change)]


def recipe_keys(schema: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every key of a recipe, sections included, dotted."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, Section):
                yield from recipe_keys(option, f"{prefix}{name}.")


def check_allowed_changes(named: Sequence[str]) -> None:
    """Refuse keys in train.resume_allow_changes that do not exist, or that no run can go on with.

    Raises:
        RecipeError: All of them in one message.
    """
    known, lines = set(recipe_keys()), []
    sections = {key.rpartition(".")[0] for key in known} - {"", "eval", "tracking", "data"}
    for key in named:
        if key not in known and not key.startswith("train.trainer_args."):
            lines.append(f"  {key}: unknown key{did_you_mean(key, sorted(known - sections))}")
        elif key in ("train", "model"):
            lines.append(f"  {key}: a section with keys of all kinds; name the keys")
        elif kind_of(key) == "fixed":
            why = next(reason for name, reason in FIXED.items() if key == name or key.startswith(f"{name}."))
            lines.append(f"  {key}: cannot change in a run that goes on: {why}")
    if lines:
        raise RecipeError("\n".join(["train.resume_allow_changes:", *lines]))
