"""Reads what really runs from the live objects before step 1, and compares it with the plan.

Only once the engine has begun can what was asked for be told from what a library made of it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft.errors import PlanError
from sft.model.compiled_layers import are_compiled
from sft.model.gradient_checkpointing import checkpointed_layers, running_checkpointing
from sft.model.live import computes_in, unwrapped
from sft.model.load import weights_dtype
from sft.parallel.fsdp import reshard, sharded_units, sharding_readings, shards
from sft.parallel.process_group import group_timeouts
from sft.parallel.sequence import sequence_parallel_ranks
from sft.parallel.tensor import is_tensor_parallel, tensor_parallel_ranks
from sft.plan.job import Job
from sft.plan.parallelism import FSDP2 as ENGINE
from sft.run.directory import Run
from sft.train.isolation_probe import Probe, check_probe, probe, sample_documents
from sft.train.trainer import RecipeTrainer

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARDED = {0: "nothing", 1: "optimizer", 2: "optimizer, gradients", 3: "optimizer, gradients, parameters"}


@dataclass(frozen=True)
class Reading:
    """One setting as planned and as found."""

    name: str
    planned: str
    running: str
    wrong: bool

    @classmethod
    def equal(cls, name: str, planned: object, running: object) -> Reading:
        """A setting that must be exactly as planned."""
        return cls(name, _word(planned), _word(running), planned != running)


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


class RuntimeCheck(TrainerCallback):  # type: ignore[misc]
    """Stops the run where documents of a batch see each other, or where something else runs than was planned.

    Must be called after engine_callbacks, and before what measures or trains.

    Args:
        trainer: Trains the model.
        job: The plan.
        run: Where the findings are recorded.
    """

    def __init__(self, trainer: RecipeTrainer, job: Job, run: Run) -> None:
        self.trainer, self.job, self.run = trainer, job, run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the isolation probe, read everything, record, compare.

        Raises:
            PlanError: Something differs.
        """
        started, packed = time.monotonic(), self.job.recipe.data.packing
        documents = sample_documents(self.trainer.train_dataset)
        found = probe(self.trainer, documents, packed) if documents else None
        readings = read_running(self.trainer, self.job, found)
        if state.is_world_process_zero:
            self.run.update(
                running={reading.name: reading.running for reading in readings},
                probe={"moved": found.moved, "differ": found.differ} if found else None,
            )
            if self.job.recipe.debug:
                print_table(readings)
        check_readings(readings)
        if found is not None:
            check_probe(found, self.job.plan.attention.value, packed)
        if state.is_world_process_zero:
            isolated = (
                f"{len(documents)} documents in one batch do not see each other"
                if documents
                else "no two documents to probe"
            )
            count, seconds = len(readings), time.monotonic() - started
            print(f"Runtime check: {count} of {count} settings as planned; {isolated} ({seconds:.1f} s).", flush=True)


def print_table(readings: list[Reading]) -> None:
    """Print each setting as planned and as it runs."""
    width = max(len(reading.name) for reading in readings)
    print("Runtime check: planned -> running")
    for reading in readings:
        mark = "!" if reading.wrong else " "
        print(f" {mark} {reading.name:<{width}}  {reading.planned} -> {reading.running}", flush=True)


def read_running(trainer: Any, job: Job, probe: Probe | None) -> list[Reading]:
    """Read everything that the plan decided from the live trainer.

    Args:
        trainer: Its engine initialized.
        job: What was planned.
        probe: From the isolation probe; None where there were no two documents to probe with.
    """
    plan, args = job.plan, trainer.args
    engine = _engine(trainer)
    if job.fsdp:
        reshard(trainer.model)
    stage = job.deepspeed.stage if job.deepspeed else 3 if job.fsdp else 0
    readings = [
        Reading.equal("engine", plan.engine.value, _engine_name(trainer, engine)),
        Reading.equal("processes", job.hardware.ranks, trainer.accelerator.num_processes),
        Reading.equal("sharded", SHARDED[stage], SHARDED[_sharded(trainer, engine)]),
        Reading.equal("tensor_parallel_size", plan.tensor_parallel_size.value, tensor_parallel_ranks(trainer.model)),
        Reading.equal(
            "sequence_parallel_size",
            plan.sequence_parallel_size.value,
            sequence_parallel_ranks(trainer, plan.attention.value),
        ),
        *([Reading.equal(*reading) for reading in sharding_readings(trainer, job)] if job.fsdp else []),
        Reading.equal("offloaded", _planned_offload(job), _offloaded(engine)),
        _attention(trainer, plan.attention.value, probe),
        _kernels(trainer, plan.kernels.value),
        Reading.equal("precision", plan.precision.value, _precision(trainer, engine)),
        *_weights(trainer, job),
        _optimizer(trainer),
        Reading.equal("compile", plan.compile.value, are_compiled(trainer.model)),
        _checkpointing(trainer, plan.gradient_checkpointing.value),
        Reading.equal("micro_batch_size", plan.micro_batch_size.value, args.per_device_train_batch_size),
        Reading.equal(
            "gradient_accumulation_steps",
            plan.gradient_accumulation_steps.value,
            engine.gradient_accumulation_steps() if engine is not None else args.gradient_accumulation_steps,
        ),
        _learning_rate(trainer, plan.learning_rate.value),
        Reading.equal("packing", job.recipe.data.packing, bool(trainer.padding_free)),
    ]
    if torch.distributed.is_initialized():
        timeouts = ", ".join(f"{seconds} s" for seconds in sorted(group_timeouts()))
        readings.append(Reading.equal("timeout", f"{job.recipe.train.ddp_timeout} s", timeouts))
    if job.recipe.debug:
        asked = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
        group: Any = torch.distributed  # torch reads the variable when it is imported
        readings.append(Reading.equal("TORCH_DISTRIBUTED_DEBUG", asked, group.get_debug_level().name))
    if probe is not None:
        readings.append(Reading.equal("use_cache", False, probe.use_cache))
        paths = {False: "TRL's fused head", True: "all logits, then cross-entropy"}
        # A smoothed label covers the vocabulary, so TRL computes all logits for it.
        smoothed = trainer.label_smoother is not None and args.loss_type == "nll"
        readings.append(Reading.equal("loss", paths[smoothed], paths[probe.head_called]))
    return readings


def check_readings(readings: Iterable[Reading]) -> None:
    """Refuse to train anything else than was planned.

    Raises:
        PlanError: Lists what differs, with both values.
    """
    wrong = [
        f"  {reading.name}: planned {reading.planned}, running {reading.running}"
        for reading in readings
        if reading.wrong
    ]
    if wrong:
        raise PlanError(
            "\n".join(
                [
                    "What runs is not what was planned, so nothing was trained:",
                    *wrong,
                    "Set the recipe's key to what can run, or report this with plan.json and run.json.",
                ]
            )
        )


def _engine(trainer: Any) -> Any:
    """DeepSpeed's engine, or None."""
    model = trainer.model_wrapped
    return model if hasattr(model, "zero_optimization_stage") else None


def _engine_name(trainer: Any, engine: Any) -> str:
    if engine is not None:
        return f"ZeRO-{engine.zero_optimization_stage()}"
    if is_tensor_parallel(trainer.model):
        return "tensor parallel"
    kind = type(trainer.model_wrapped).__name__
    known = {"DistributedDataParallel": "DDP", "DataParallel": "DataParallel", "FullyShardedDataParallel": "FSDP1"}
    if sharded_units(trainer.model_wrapped)[:1] == [trainer.model_wrapped]:
        return ENGINE
    alone = "one process" if trainer.accelerator.num_processes == 1 else "processes that do not know of each other"
    return known.get(kind, alone)


def _sharded(trainer: Any, engine: Any) -> int:
    """The ZeRO stage, judged by the objects and not by the configuration."""
    if any(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters()):
        return 3
    if shards(trainer.model) and not is_tensor_parallel(trainer.model):
        return 3
    optimizer: Any = engine.optimizer if engine is not None else None
    if hasattr(optimizer, "partition_gradients"):
        return 2 if optimizer.partition_gradients else 1
    # Stage 1 in bf16 with fp32 gradients has an optimizer of its own, without that switch.
    return 1 if hasattr(optimizer, "partition_count") else 0


def _offload_words(optimizer: str | None, parameters: str | None) -> str:
    places = {"optimizer": optimizer, "parameters": parameters}
    return ", ".join(f"{what} on {place}" for what, place in places.items() if place) or "nothing"


def _planned_offload(job: Job) -> str:
    zero = job.deepspeed.config.get("zero_optimization", {}) if job.deepspeed else {}
    devices = [zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    return _offload_words(*(device if device != "none" else None for device in devices))


def _offloaded(engine: Any) -> str:
    """What ZeRO's optimizer keeps off the GPU; stages 1 and 2 know only the CPU."""
    zero: Any = engine.optimizer if engine is not None else None
    if not hasattr(zero, "offload_param"):
        return _offload_words("cpu" if getattr(zero, "cpu_offload", False) else None, None)
    return _offload_words(
        ("nvme" if zero.swap_optimizer else "cpu") if zero.offload_optimizer else None,
        ("nvme" if zero.params_in_nvme_and_cpu else "cpu") if zero.offload_param else None,
    )


def _attention(trainer: Any, planned: str, probe: Probe | None) -> Reading:
    configured = unwrapped(trainer).config.get_text_config()._attn_implementation
    if probe is None:
        return Reading.equal("attention", planned, configured)
    # A model's own function, `eager`, is not looked up in the table of functions.
    expected = set() if planned == "eager" else {planned}
    calls = ", ".join(f"{name} in {count} layers" for name, count in probe.attention_calls.items()) or configured
    wrong = configured != planned or set(probe.attention_calls) != expected
    # Older architectures call sdpa themselves, without the table.
    if planned == configured == "sdpa" and not probe.attention_calls:
        wrong = False
    return Reading("attention", planned, calls if probe.attention_calls or not wrong else "the model's own", wrong)


def _kernels(trainer: Any, planned: str) -> Reading:
    """Count the layers whose forward is Liger's."""
    swapped = Counter(
        type(module).__name__
        for module in trainer.model.modules()
        if getattr(getattr(module.forward, "__func__", None), "__module__", "").startswith("liger_kernel")
    )
    running = "liger: " + ", ".join(f"{count} {name}" for name, count in swapped.items()) if swapped else "none"
    return Reading("kernels", planned, running, (planned == "liger") != bool(swapped))


def _precision(trainer: Any, engine: Any) -> str:
    if engine is not None:
        return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    if (sharded := computes_in(trainer.model)) is not None:
        return SHORT[sharded]
    mixed = trainer.accelerator.mixed_precision
    if mixed != "no":
        return str(mixed)
    # Without autocast the model computes in the dtype of its weights.
    dtype = next(unwrapped(trainer).parameters()).dtype
    return SHORT.get(dtype, str(dtype))


def _count(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _weights(trainer: Any, job: Job) -> list[Reading]:
    """How many parameters are trained, and in which dtypes."""
    total = trained = 0
    dtypes: Counter[str] = Counter()
    adapters = 0
    for name, parameter in trainer.model.named_parameters():
        total += _count(parameter)
        if parameter.requires_grad:
            trained += _count(parameter)
            if not (parameter.dtype == torch.float32 and _stays_fp32(trainer, name)):
                dtypes[SHORT.get(parameter.dtype, str(parameter.dtype))] += 1
            adapters += ".lora_A." in name
    lora = job.recipe.model.lora
    expected = SHORT[weights_dtype(job)]
    # Without DeepSpeed, PEFT keeps adapters in fp32 and they are trained in it.
    allowed = {expected, "fp32"} if lora is not None and job.deepspeed is None else {expected}
    share = f"{trained:,} of {total:,} parameters"
    if lora is None:
        weights = Reading("trained", "all parameters", share, trained != total)
    else:
        weights = Reading(
            "trained",
            f"adapters of rank {lora.r}",
            f"{share}, {adapters} adapters",
            not 0 < trained < total or not adapters,
        )
    kinds = ", ".join(sorted(dtypes))
    return [weights, Reading("weights", " or ".join(sorted(allowed)), kinds, not set(dtypes) <= allowed)]


def _stays_fp32(trainer: Any, name: str) -> bool:
    """Whether the model's code keeps this weight in fp32, such as the router of some experts."""
    kept = getattr(unwrapped(trainer), "_keep_in_fp32_modules_strict", None) or ()
    return any(f".{part}." in f".{name}." for part in kept)


def _optimizer(trainer: Any) -> Reading:
    """The innermost optimizer, and the dtype of what it updates, which is also that of its moments."""
    optimizer, updated = trainer.optimizer, None
    while hasattr(optimizer, "optimizer"):
        # ZeRO-3 gives it the partitions at each step, and takes them away again.
        updated = getattr(optimizer, "fp32_partitioned_groups_flat", updated)
        optimizer = optimizer.optimizer
    updated = updated or [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {tensor.dtype for tensor in updated}
    kinds = ", ".join(sorted(SHORT.get(dtype, str(dtype)) for dtype in dtypes))
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    name = type(optimizer).__name__
    return Reading(
        "optimizer", "AdamW on fp32", f"{name} on {kinds}{fused}", "Adam" not in name or dtypes != {torch.float32}
    )


def _learning_rate(trainer: Any, planned: float) -> Reading:
    """The peak that the optimizer was built with; its current rate is the schedule's."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    peaks = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    return Reading("learning_rate", str(planned), ", ".join(map(str, sorted(peaks))), peaks != {planned})


def _checkpointing(trainer: Any, planned: bool | int | str) -> Reading:
    """Whether layers recompute, judged by the layers; CheckpointingAsPlanned has compared them in detail."""
    running, layers = checkpointed_layers(trainer.model)
    kind = running_checkpointing(trainer.model)
    words = {True: "every layer", False: "off", "selective": "selective", "offload": "offload"}.get(planned)
    found = f"{running} of {layers} layers" + (f", {kind}" if kind != "full" else "") if running else "off"
    return Reading("gradient_checkpointing", words or f"every {planned} layers", found, bool(planned) != bool(running))
