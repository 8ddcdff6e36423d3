"""Reads what really runs from the live objects before step 1, once the engine is set up, and compares it with the plan."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback
from trl import SFTTrainer

from sft.errors import PlanError
from sft.model.adapters import differing_adapters
from sft.model.attention import SWITCHED, running_switch
from sft.model.compiled_layers import are_compiled
from sft.model.frozen import frozen_names
from sft.model.gradient_checkpointing import planned_checkpointing, running_checkpointing
from sft.model.live import computes_in, unwrapped
from sft.model.load import weights_dtype
from sft.model.quantization import describe_planned, describe_running, numels
from sft.model.rope import planned_rope, running_rope
from sft.parallel.fsdp import reshard, sharded_units, sharding_readings, shards
from sft.parallel.process_group import group_timeouts
from sft.parallel.sequence import sequence_parallel_ranks
from sft.parallel.tensor import is_tensor_parallel, tensor_parallel_ranks
from sft.plan.job import Job
from sft.plan.parallelism import FSDP2
from sft.plan.pipeline import PIPELINE, describe, layers_of_stages
from sft.run.directory import Run
from sft.train.arguments import planned_schedule
from sft.train.isolation_probe import Probe, check_probe, probe, sample_documents
from sft.train.optimizers import compare_arguments, compare_kind
from sft.train.regularization import noise_of
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

    Must be called after engine_callbacks, and before what measures or trains. Findings are recorded in run.json.
    """

    def __init__(self, trainer: RecipeTrainer, job: Job, run: Run) -> None:
        self.trainer, self.job, self.run = trainer, job, run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the isolation probe, read everything, record, compare."""
        started, packed = time.monotonic(), self.job.recipe.data.packing
        documents = sample_documents(self.trainer.train_dataset)
        found = probe(self.trainer, documents, packed) if documents else None
        readings = read_running(self.trainer, self.job, found)
        if state.is_world_process_zero:
            self.run.update(
                running={reading.name: reading.running for reading in readings},
                probe={"moved": found.moved, "differ": found.differ} if found else None,
            )
        check_readings(readings)
        isolated = "no two documents to probe"
        if found is not None:
            check_probe(found, self.job.plan.attention.value, packed)
            isolated = f"{len(documents)} documents in one batch do not see each other"
        if state.is_world_process_zero:
            count, seconds = len(readings), time.monotonic() - started
            print(f"Runtime check: {count} of {count} settings as planned; {isolated} ({seconds:.1f} s).", flush=True)


def check_readings(readings: Iterable[Reading]) -> None:
    """Refuse to train anything else than was planned: a PlanError lists what differs, with both values."""
    wrong = [f"  {one.name}: planned {one.planned}, running {one.running}" for one in readings if one.wrong]
    if wrong:
        first = "What runs is not what was planned, so nothing was trained:"
        last = "Set the recipe's key to what can run, or report this with plan.json and run.json."
        raise PlanError("\n".join([first, *wrong, last]))


def read_running(trainer: SFTTrainer, job: Job, probe: Probe | None) -> list[Reading]:
    """Read everything that the plan decided from the live trainer; `probe` is None where there were no two documents to probe with."""
    if job.fsdp:
        reshard(trainer.model)
    # DeepSpeed's, or None.
    engine = trainer.model_wrapped if hasattr(trainer.model_wrapped, "zero_optimization_stage") else None
    return [
        *_of_engine(trainer, job, engine),
        *_of_model(trainer, job, engine, probe),
        *_of_steps(trainer, job, engine),
        *(_of_pass(trainer, probe) if probe is not None else []),
    ]


def _of_engine(trainer: Any, job: Job, engine: Any) -> Iterator[Reading]:
    plan, attention = job.plan, job.plan.attention.value
    stage = job.deepspeed.stage if job.deepspeed else 3 if job.fsdp else 0
    zero = job.deepspeed.config.get("zero_optimization", {}) if job.deepspeed else {}
    offloads = (zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param"))
    yield Reading.equal("engine", plan.engine.value, _engine_name(trainer, engine))
    yield Reading.equal("processes", job.hardware.ranks, trainer.accelerator.num_processes)
    yield Reading.equal("sharded", SHARDED[stage], SHARDED[_sharded(trainer, engine)])
    yield Reading.equal("tensor_parallel_size", plan.tensor_parallel_size.value, tensor_parallel_ranks(trainer.model))
    sequence_ranks = sequence_parallel_ranks(trainer, attention)
    yield Reading.equal("sequence_parallel_size", plan.sequence_parallel_size.value, sequence_ranks)
    if plan.pipeline_parallel_size.value > 1:
        layers = layers_of_stages(job.recipe, job.model)
        yield Reading.equal("layers of stages", describe(layers), describe(trainer.model_wrapped.layers_of_ranks()))
    if job.fsdp:
        yield from (Reading.equal(*reading) for reading in sharding_readings(trainer, job))
    yield Reading.equal("offloaded", _offload_words(*offloads), offloaded(engine.optimizer if engine else None))
    if torch.distributed.is_initialized():
        timeouts = ", ".join(f"{seconds} s" for seconds in sorted(group_timeouts()))
        yield Reading.equal("timeout", f"{job.recipe.train.ddp_timeout} s", timeouts)
    if job.recipe.debug:
        asked = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
        group: Any = torch.distributed  # torch reads the variable when it is imported
        yield Reading.equal("TORCH_DISTRIBUTED_DEBUG", asked, group.get_debug_level().name)


def _engine_name(trainer: Any, engine: Any) -> str:
    if engine is not None:
        return f"ZeRO-{engine.zero_optimization_stage()}"
    if is_tensor_parallel(trainer.model):
        return "tensor parallel"
    if sharded_units(trainer.model_wrapped)[:1] == [trainer.model_wrapped]:
        return FSDP2
    known = {"DistributedDataParallel": "DDP", "DataParallel": "DataParallel", "FullyShardedDataParallel": "FSDP1"}
    known |= {"Pipeline": PIPELINE}
    alone = "one process" if trainer.accelerator.num_processes == 1 else "processes that do not know of each other"
    return known.get(type(trainer.model_wrapped).__name__, alone)


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


def _offload_words(optimizer: str, parameters: str) -> str:
    places = {"optimizer": optimizer, "parameters": parameters}
    return ", ".join(f"{what} on {place}" for what, place in places.items() if place != "none") or "nothing"


def offloaded(zero: Any) -> str:
    """What ZeRO's optimizer keeps off the GPU; stages 1 and 2 know only the CPU."""
    if not hasattr(zero, "offload_param"):
        return _offload_words("cpu" if getattr(zero, "cpu_offload", False) else "none", "none")
    optimizer = "nvme" if zero.swap_optimizer else "cpu"
    parameters = "nvme" if zero.params_in_nvme_and_cpu else "cpu"
    return _offload_words(optimizer if zero.offload_optimizer else "none", parameters if zero.offload_param else "none")


def _of_model(trainer: Any, job: Job, engine: Any, probe: Probe | None) -> Iterator[Reading]:
    plan, model = job.plan, trainer.model
    yield _attention(trainer, plan.attention.value, probe)
    switch = SWITCHED.get(plan.attention.value), running_switch()
    if any(switch):
        yield Reading.equal("flash_attention", *(name or "torch's own" for name in switch))
    yield _kernels(model, plan.kernels.value)
    yield Reading.equal("precision", plan.precision.value, _precision(trainer, engine))
    yield from _weights(trainer, job)
    yield Reading.equal("quantization", describe_planned(job), describe_running(model))
    if (rope := job.recipe.model.rope_scaling) is not None:
        yield Reading.equal("rope_scaling", planned_rope(rope), running_rope(unwrapped(trainer)))
    yield Reading.equal("compile", plan.compile.value, are_compiled(model))
    planned = planned_checkpointing(model, plan.gradient_checkpointing.value)
    yield Reading.equal("gradient_checkpointing", planned, running_checkpointing(model))


def _attention(trainer: Any, planned: str, probe: Probe | None) -> Reading:
    configured = unwrapped(trainer).config.get_text_config()._attn_implementation
    if probe is None:
        return Reading.equal("attention", planned, configured)
    # A model's own function, `eager`, is not looked up in the table of functions.
    expected = set() if planned == "eager" else {planned}
    calls = ", ".join(f"{name} in {count} layers" for name, count in probe.attention_calls.items())
    wrong = configured != planned or set(probe.attention_calls) != expected
    # Older architectures call sdpa themselves, without the table.
    if planned == configured == "sdpa" and not calls:
        wrong = False
    return Reading("attention", planned, calls or ("the model's own" if wrong else configured), wrong)


def _kernels(model: Any, planned: str) -> Reading:
    """Count the layers whose forward is Liger's."""
    swapped = Counter(
        type(module).__name__
        for module in model.modules()
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
    # Without autocast the model computes in the dtype of its weights.
    return str(mixed) if mixed != "no" else _dtypes([next(unwrapped(trainer).parameters())])


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(sorted({SHORT.get(tensor.dtype, str(tensor.dtype)) for tensor in tensors}))


def _weights(trainer: Any, job: Job) -> Iterator[Reading]:
    named, lora = dict(trainer.model.named_parameters()), job.recipe.model.lora
    counts = numels(trainer.model)
    trained = {name: weight for name, weight in named.items() if weight.requires_grad}
    count, total = sum(counts[name] for name in trained), sum(counts.values())
    share = f"{count:,} of {total:,} parameters"
    if lora is None:
        patterns = job.recipe.model.freeze
        frozen = frozen_names(patterns, list(named))
        planned = f"all parameters but {len(frozen)} that model.freeze names" if patterns else "all parameters"
        yield Reading("trained", planned, share, set(named) - set(frozen) != set(trained))
    else:
        differs = [words for words in differing_adapters(trainer.model, lora) if words]
        adapters = sum(".lora_A." in name for name in trained)
        found = ", ".join([share, f"{adapters} adapters", *differs[:1]])
        yield Reading(
            "trained", f"adapters of {lora.words}", found, not 0 < count < total or not adapters or bool(differs)
        )
    # What the model's code keeps in fp32, such as the router of some experts, is no mismatch.
    kept = getattr(unwrapped(trainer), "_keep_in_fp32_modules_strict", None) or ()
    dtypes = _dtypes(
        weight
        for name, weight in trained.items()
        if weight.dtype != torch.float32 or not any(f".{part}." in f".{name}." for part in kept)
    )
    # Without DeepSpeed, PEFT keeps adapters in fp32 and they are trained in it.
    allowed = {SHORT[weights_dtype(job)], *(["fp32"] if lora is not None and job.deepspeed is None else [])}
    yield Reading("weights", " or ".join(sorted(allowed)), dtypes, not set(filter(None, dtypes.split(", "))) <= allowed)


def _of_steps(trainer: Any, job: Job, engine: Any) -> Iterator[Reading]:
    plan, args = job.plan, trainer.args
    optimizer, updated = trainer.optimizer, None
    while hasattr(optimizer, "optimizer"):
        # ZeRO-3 gives the innermost one the partitions at each step, and takes them away again.
        updated = getattr(optimizer, "fp32_partitioned_groups_flat", updated)
        optimizer = optimizer.optimizer
    # The dtype of what it updates is also that of its moments.
    dtypes = _dtypes(updated or [parameter for group in optimizer.param_groups for parameter in group["params"]])
    kind, running, is_other = compare_kind(optimizer, job)
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    # ZeRO-1's optimizer in bf16 and MasterAdamW have another name for it; FSDP2's is among the sharding.
    zero: Any = engine.optimizer if engine is not None else optimizer
    added = getattr(zero, "gradient_accumulation_dtype", None) or getattr(zero, "grad_acc_dtype", None)
    if added is not None:
        yield Reading.equal("gradients", plan.gradients.value, SHORT[added])
    yield Reading("optimizer", f"{kind} on fp32", f"{running} on {dtypes}{fused}", is_other or dtypes != "fp32")
    if not is_other:
        yield Reading.equal("optimizer_arguments", *compare_arguments(optimizer, job))
    # The peak that it was built with; its current rate is the schedule's.
    peaks = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    planned = plan.learning_rate.value
    yield Reading("learning_rate", str(planned), ", ".join(map(str, sorted(peaks))), peaks != {planned})
    yield _schedule(trainer, job)
    train = job.recipe.train
    yield Reading.equal("neftune_noise_alpha", train.neftune_noise_alpha, noise_of(trainer.model))
    yield Reading.equal("label_smoothing_factor", train.label_smoothing_factor, trainer.smoothing)
    yield Reading.equal("micro_batch_size", plan.micro_batch_size.value, args.per_device_train_batch_size)
    passes = engine.gradient_accumulation_steps() if engine is not None else args.gradient_accumulation_steps
    yield Reading.equal("gradient_accumulation_steps", plan.gradient_accumulation_steps.value, passes)
    yield Reading.equal("packing", job.recipe.data.packing, bool(trainer.padding_free))


def _schedule(trainer: Any, job: Job) -> Reading:
    """Compare the functions that multiply the peak, one per group of parameters, and their arguments."""

    def words(scheduler: Any) -> str:
        calls = {
            f"{one.func.__name__}({', '.join(f'{key}={one.keywords[key]}' for key in sorted(one.keywords))})"
            for one in scheduler.lr_lambdas
        }
        return "; ".join(sorted(call.removeprefix("_get_") for call in calls))

    live = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    return Reading.equal("lr_scheduler", words(planned_schedule(job, trainer.state.max_steps)), words(live))


def _of_pass(trainer: Any, probe: Probe) -> Iterator[Reading]:
    """What the probe's forward pass showed."""
    yield Reading.equal("use_cache", False, probe.use_cache)
    paths = {False: "TRL's fused head", True: "all logits, then cross-entropy"}
    yield Reading.equal("loss", paths[False], paths[probe.head_called])
