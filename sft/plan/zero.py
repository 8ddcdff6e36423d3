"""DeepSpeed's JSON: found, read, and compared with the recipe before anything starts.

A value of the JSON that the recipe or the plan also decides must be `"auto"` or equal: DeepSpeed would follow the JSON and
the trainer the recipe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import PlanError, did_you_mean
from sft.recipe.load import find_file
from sft.recipe.schema import REPOSITORY, Recipe

# The keys of deepspeed 0.19's configuration that a training run can use. It ignores what it does not know, so a typo
# would silently do nothing.
KNOWN_KEYS = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16 "
    "amp gradient_clipping prescale_gradients gradient_predivide_factor sparse_gradients zero_optimization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type "
    "seq_parallel_communication_data_type data_types checkpoint activation_checkpointing aio comms_logger "
    "flops_profiler tensorboard wandb csv_monitor comet steps_per_print wall_clock_breakdown "
    "dump_state memory_breakdown disable_allgather dataloader_drop_last timers compile "
    "use_data_before_expert_parallelism elasticity torch_autocast graph_harvesting use_node_local_storage"
).split()


ZERO_KEYS = (
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param "
    "offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module"
).split()

WRITING_KEYS = (
    "tensorboard.enabled",
    "wandb.enabled",
    "csv_monitor.enabled",
    "comet.enabled",
    "flops_profiler.output_file",
)
"""Keys that have DeepSpeed write files where they say."""

_OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Keys that the recipe decides."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """A DeepSpeed configuration and where it was read."""

    path: Path
    config: dict[str, Any]

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    @property
    def offload(self) -> str | None:
        """Where optimizer or parameters are kept besides the GPU: `cpu`, `nvme` or None."""
        zero = self.config.get("zero_optimization", {})
        devices = {str(zero.get(key, {}).get("device", "none")) for key in ("offload_optimizer", "offload_param")}
        return next((device for device in ("nvme", "cpu") if device in devices), None)


def load_deepspeed(name: str) -> DeepSpeedFile:
    """Read a DeepSpeed JSON by path or by the name of one in ds_configs/.

    Raises:
        PlanError: There is none, it is no JSON, or it has a key that DeepSpeed does not know.
    """
    shipped = REPOSITORY / "ds_configs" / f"{name}.json"
    path = shipped if shipped.is_file() else find_file(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = sorted(file.stem for file in (REPOSITORY / "ds_configs").glob("*.json"))
        raise PlanError(
            f"train.deepspeed={name}: there is no such file{did_you_mean(name, names, '.')} Shipped: {', '.join(names)}."
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"train.deepspeed={name}: {path} is not readable JSON: {error}.") from None
    if not isinstance(config, dict):
        raise PlanError(f"train.deepspeed={name}: {path} holds no JSON object.")
    # DeepSpeed takes null for absent, in sections too.
    config = _without_nulls(config)
    _check_shape(path, config)
    # Left out, DeepSpeed would clip at 1.0 and count the batch its own way, whatever the recipe says.
    return DeepSpeedFile(path, dict.fromkeys(_OWNED, "auto") | config)


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value is not None
    }


def _check_shape(path: Path, config: dict[str, Any]) -> None:
    sections = (
        "zero_optimization",
        "bf16",
        "fp16",
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
    )
    wrong = [
        f"  {key}: must be a section in braces, got {json.dumps(value)}"
        for key in sections
        if not isinstance(value := _at(config, key, {}), dict)
    ]
    zero = config.get("zero_optimization", {})
    wrong += [
        f"  {key}: would write outside of the run's folder; remove it, tracking.report_to and train.profile=true do the same inside"
        for key in WRITING_KEYS
        if _at(config, key, False)
    ]
    wrong += [
        f"  {key}: unknown to DeepSpeed{did_you_mean(key, KNOWN_KEYS)}" for key in config if key not in KNOWN_KEYS
    ]
    if isinstance(zero, dict):
        wrong += [
            f"  zero_optimization.{key}: unknown to DeepSpeed{did_you_mean(key, ZERO_KEYS)}"
            for key in zero
            if key not in ZERO_KEYS
        ]
    if not isinstance(zero, dict) or type(zero.get("stage", 0)) is not int or zero.get("stage", 0) not in (0, 1, 2, 3):
        wrong.append(f"  zero_optimization.stage must be 0, 1, 2 or 3, got {json.dumps(zero)}")
    if wrong:
        raise PlanError("\n".join([f"{path} is not a configuration that DeepSpeed would follow:", *wrong]))


def _at(config: dict[str, Any], dotted: str, absent: Any = "auto") -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key, absent) if isinstance(value, dict) else absent
    return value


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    number = isinstance(found, int | float) and isinstance(wanted, int | float)
    return bool(abs(found - wanted) <= 1e-12 * abs(wanted) if number else found == wanted)


def check_deepspeed(
    file: DeepSpeedFile, recipe: Recipe, micro_batch_size: int, accumulation: int, precision: str, empty: int = 0
) -> None:
    """Refuse a JSON that says something else than the recipe.

    Args:
        file: The JSON.
        recipe: What was asked for.
        micro_batch_size: Sequences per forward pass on one rank, as planned.
        accumulation: Forward passes per optimizer step, as planned.
        precision: bf16, fp16 or fp32, as planned.
        empty: Places of a step that hold no sequence, which DeepSpeed counts like the others.

    Raises:
        PlanError: Every contradiction, with both values.
    """
    train = recipe.train
    wanted = {
        "train_batch_size": (
            recipe.sequences_per_step + empty,
            f"train.global_batch_size with its {empty} empty places" if empty else "train.global_batch_size",
        ),
        "train_micro_batch_size_per_gpu": (micro_batch_size, "train.micro_batch_size"),
        "gradient_accumulation_steps": (accumulation, "accumulation in the plan"),
        "gradient_clipping": (train.max_grad_norm, "train.max_grad_norm"),
        "bf16.enabled": (precision == "bf16", f"train.precision ({precision})"),
        "fp16.enabled": (precision == "fp16", f"train.precision ({precision})"),
    }
    lines = [
        f"  {key} is {json.dumps(found)}, and {name} is {json.dumps(value)}"
        for key, (value, name) in wanted.items()
        if (found := _at(file.config, key)) != "auto" and not _same(found, value)
    ]
    if "scheduler" in file.config:
        lines.append(
            f"  scheduler is {json.dumps(file.config['scheduler'])}, and train.lr_scheduler_type is {train.lr_scheduler_type}: "
            "remove the section"
        )
    if "optimizer" in file.config:
        # transformers would hand DeepSpeed one flat group of parameters: biases and norms would be decayed with the rest.
        lines.append(
            f"  optimizer is {json.dumps(file.config['optimizer'])}, and the recipe's is AdamW with its own learning_rate, betas and "
            "weight_decay (none on biases and norms): remove the section"
        )
    if _at(file.config, "bf16.check_grad_overflow", True) is False:
        lines.append(
            f"  bf16.check_grad_overflow is false, and train.on_nonfinite is {train.on_nonfinite}: a gradient that is not finite would be "
            "applied before it is found; remove the key"
        )
    zero = file.config.get("zero_optimization", {})
    if file.stage == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        lines.append(
            "  zero_optimization.stage3_gather_16bit_weights_on_model_save is not true: the saved model would be empty"
        )
    if lines:
        remedy = 'Write "auto" in the JSON for what the recipe decides.'
        raise PlanError("\n".join([f"{file.path} contradicts the recipe:", *lines, remedy]))
