"""Reads DeepSpeed's JSON, compares it with the recipe before anything starts, and sizes its buffers for the model.

A value of the JSON that the recipe or the plan also decides must be `"auto"` or equal: DeepSpeed would follow the JSON and
the trainer the recipe.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft.errors import PlanError, did_you_mean
from sft.hub.model_facts import ModelFacts
from sft.plan.plan import Plan
from sft.recipe.load import find_file
from sft.recipe.schema import SHIPPED, Lora, Recipe

DS_CONFIGS = SHIPPED / "ds_configs"

# The keys of deepspeed 0.19's configuration that a training run can use. It ignores what it does not know, so a typo
# would silently do nothing; it has no list of these keys itself.
KNOWN_KEYS = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16 "
    "amp gradient_clipping prescale_gradients gradient_predivide_factor sparse_gradients zero_optimization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type "
    "seq_parallel_communication_data_type data_types checkpoint activation_checkpointing aio comms_logger "
    "flops_profiler tensorboard wandb csv_monitor comet steps_per_print wall_clock_breakdown "
    "dump_state memory_breakdown disable_allgather dataloader_drop_last timers compile "
    "use_data_before_expert_parallelism elasticity torch_autocast graph_harvesting use_node_local_storage"
).split()

# Keys that have DeepSpeed write files where they say, and keys that the recipe decides.
_WRITING_KEYS = "tensorboard.enabled wandb.enabled csv_monitor.enabled comet.enabled flops_profiler.output_file".split()
_OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
LARGEST_BUCKET = 500_000_000  # elements, 1 GB in bf16: larger ones win nothing more


@dataclass(frozen=True)
class DeepSpeedFile:
    """A DeepSpeed configuration and where it was read."""

    path: Path
    config: dict[str, Any]

    @property
    def zero(self) -> dict[str, Any]:
        """Its zero_optimization section."""
        return dict(self.config.get("zero_optimization", {}))

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self.zero.get("stage", 0))

    @property
    def devices(self) -> tuple[str, str]:
        """Where the optimizer and the parameters are offloaded: `none`, `cpu` or `nvme` each."""
        optimizer, parameters = (self.zero.get(f"offload_{what}", {}) for what in ("optimizer", "param"))
        return str(optimizer.get("device", "none")), str(parameters.get("device", "none"))

    @property
    def offload(self) -> str | None:
        """Where optimizer or parameters are kept besides the GPU: `cpu`, `nvme` or None."""
        return next((device for device in ("nvme", "cpu") if device in self.devices), None)


def load_deepspeed(name: str) -> DeepSpeedFile:
    """Read a DeepSpeed JSON by path or by the name of one in ds_configs/. Raises PlanError if DeepSpeed would not follow it."""
    shipped = DS_CONFIGS / f"{name}.json"
    path = shipped if shipped.is_file() else find_file(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = sorted(file.stem for file in DS_CONFIGS.glob("*.json"))
        raise PlanError(
            f"train.deepspeed={name}: there is no such file{did_you_mean(name, names, '.')} Shipped: {', '.join(names)}."
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"train.deepspeed={name}: {path} is not readable JSON: {error}.") from None
    if not isinstance(config, dict):
        raise PlanError(f"train.deepspeed={name}: {path} holds no JSON object.")
    config = _without_nulls(config)  # DeepSpeed takes null for absent, in sections too
    if problems := _problems(config) or ([] if path.resolve().parent == DS_CONFIGS else _zero_problems(config)):
        raise PlanError("\n  ".join([f"{path} is not a configuration that DeepSpeed would follow:", *problems]))
    # Left out, DeepSpeed would clip at 1.0 and count the batch its own way, whatever the recipe says.
    return DeepSpeedFile(path, dict.fromkeys(_OWNED, "auto") | config)


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in section.items() if value is not None}
    return {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in found.items()}


def _problems(config: dict[str, Any]) -> list[str]:
    sections = {key: config.get(key, {}) for key in ("zero_optimization", "bf16", "fp16")}
    return [
        *(f"{key}: unknown to DeepSpeed{did_you_mean(key, KNOWN_KEYS)}" for key in config if key not in KNOWN_KEYS),
        *(
            f"{key}: would write outside of the run's folder; remove it, tracking.report_to and train.profile=true do the same inside"
            for key in _WRITING_KEYS
            if _at(config, key, False)
        ),
        *(
            f"{key}: must be a section in braces, got {json.dumps(section)}"
            for key, section in sections.items()
            if not isinstance(section, dict)
        ),
    ]


def _zero_problems(config: dict[str, Any]) -> list[str]:
    """What DeepSpeed's own model of its section `zero_optimization` refuses. Its import takes seconds: for a file of the user's only."""
    zero = config.get("zero_optimization", {})
    logging.disable(logging.WARNING)  # its import says which accelerator it found
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    finally:
        logging.disable(logging.NOTSET)
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    except ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"], json.dumps(one["input"])) for one in error.errors()]
        return [f"zero_optimization.{key}: {reason}, got {value}" for key, reason, value in found]
    return []


def _at(config: dict[str, Any], dotted: str, absent: Any = "auto") -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key, absent) if isinstance(value, dict) else absent
    return value


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return isclose(found, expected, rel_tol=1e-12)
    return bool(found == expected)


def check_deepspeed(file: DeepSpeedFile, recipe: Recipe, plan: Plan) -> None:
    """Refuse a JSON that contradicts the recipe or the plan (PlanError, with every contradiction and both values)."""
    train, config, empty = recipe.train, file.config, plan.empty_sequences_per_step.value
    precision = plan.precision.value
    batch = f"train.global_batch_size with its {empty} empty slots" if empty else "train.global_batch_size"
    wanted = {
        "train_batch_size": (recipe.sequences_per_step + empty, batch),
        "train_micro_batch_size_per_gpu": (plan.micro_batch_size.value, "train.micro_batch_size"),
        "gradient_accumulation_steps": (plan.gradient_accumulation_steps.value, "accumulation in the plan"),
        "gradient_clipping": (train.max_grad_norm, "train.max_grad_norm"),
        "bf16.enabled": (precision == "bf16", f"train.precision ({precision})"),
        "fp16.enabled": (precision == "fp16", f"train.precision ({precision})"),
    }
    lines = [
        f"{key} is {json.dumps(found)}, and {name} is {json.dumps(value)}"
        for key, (value, name) in wanted.items()
        if (found := _at(config, key)) != "auto" and not _is_same(found, value)
    ]
    rows = {
        f"scheduler is {json.dumps(config.get('scheduler'))}, and train.lr_scheduler_type is {train.lr_scheduler_type}: remove the "
        "section": "scheduler" in config,
        # transformers would hand DeepSpeed one flat group of parameters: biases and norms would be decayed with the rest.
        f"optimizer is {json.dumps(config.get('optimizer'))}, and the recipe's is AdamW with its own learning_rate, betas and "
        "weight_decay (none on biases and norms): remove the section": "optimizer" in config,
        f"bf16.check_grad_overflow is false, and train.on_nonfinite is {train.on_nonfinite}: a gradient that is not finite would be "
        "applied before it is found; remove the key": _at(config, "bf16.check_grad_overflow", True) is False,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save is not true: the saved model would be empty": (
            file.stage == 3 and not file.zero.get("stage3_gather_16bit_weights_on_model_save")
        ),
    }
    lines += [line for line, applies in rows.items() if applies]
    if lines:
        remedy = 'Write "auto" in the JSON for what the recipe decides.'
        raise PlanError("\n".join([f"{file.path} contradicts the recipe:", *(f"  {line}" for line in lines), remedy]))


def size_buckets(file: DeepSpeedFile, model: ModelFacts, lora: Lora | None = None) -> DeepSpeedFile:
    """The file with numbers of elements where it says `"auto"` for the size of a buffer; DeepSpeed's defaults for an unknown model."""
    # transformers would put in the square of hidden_size, which is less than one weight of an MLP.
    # All of a small model in one reduction; never more than is trained.
    bucket = min(LARGEST_BUCKET, model.adapter_parameters(lora) or model.parameters or LARGEST_BUCKET)
    bucket += bucket % 2  # DeepSpeed asserts that it is even
    sizes = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": min(LARGEST_BUCKET, model.layer_size or 50_000_000),
        "stage3_param_persistence_threshold": 10 * (model.hidden_size or 10_000),
    }
    sized = {key: sizes[key] if value == "auto" and key in sizes else value for key, value in file.zero.items()}
    return replace(file, config=file.config | {"zero_optimization": sized}) if sized else file
