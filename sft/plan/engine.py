"""Chooses what carries the training out: one process, DDP, DeepSpeed or FSDP2; by arithmetic the cheapest engine that fits.

The sums are in sft/plan/memory.py.
"""

from __future__ import annotations

from math import ceil

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.batch import resolve_data_parallel_ranks, resolve_sequences
from sft.plan.deepspeed import DeepSpeedFile, load_deepspeed, size_buckets
from sft.plan.hardware import Hardware
from sft.plan.memory import estimate_memory
from sft.plan.memory_estimate import GIB, MemoryEstimate, memory_bars
from sft.plan.parallelism import FSDP2, describe_fsdp, resolve_fsdp
from sft.plan.pipeline import PIPELINE
from sft.plan.plan import Decision
from sft.plan.precision import resolve_precision
from sft.recipe.schema import Recipe

REMEDY = "`sft plan RECIPE --fit` lists the smallest changes that make it fit."


def order_of_engines(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> list[str]:
    """What `auto` tries, the cheapest first, by the bytes that a step of a micro-batches sends to or from each rank, for P parameters.

    In bf16 ZeRO-2 sends (2 a + 2) P, ZeRO-1 6 P (one all-reduce, at the last micro-batch), DDP 8 P (and computes with fp32 weights that
    are cast), ZeRO-3 6 a P. So ZeRO-2 comes first: it takes 2 + 16/N bytes a parameter instead of ZeRO-1's 8 + 12/N and DDP's 22, which
    leaves room for larger micro-batches. Before it comes ZeRO-1 where the recipe states micro-batches of which a step has three or more.
    In fp32 DDP sends 8 P, ZeRO-2 (4 a + 4) P, ZeRO-1 12 P: DDP comes first. Offload is slower than any network. Adapters are small: DDP,
    and ZeRO-3 where the frozen weights do not fit. Never tried: NVMe, which cannot be resumed; name it in train.deepspeed.
    """
    train, adapters = recipe.train, recipe.model.lora is not None
    sharded = ["zero2", "zero3", "zero2_offload", "zero3_offload"]
    if train.tensor_parallel_size > 1 or (train.optim not in ("adamw", "lion") and train.sequence_parallel_size == 1):
        return ["none"]
    if train.sequence_parallel_size > 1:
        return sharded
    if _micro_batches(recipe, hardware) >= 3:
        sharded = ["zero1", *sharded]
    if hardware.ranks == 1:
        order = ["none", "zero2_offload", "zero3_offload"]
    elif adapters:
        order = ["none", "zero3", "zero3_offload"]
    else:
        order = ["none", *sharded] if resolve_precision(recipe, hardware, model).value == "fp32" else sharded
    # Adapters leave no optimizer to speak of on the GPU, and ZeRO-3 does not compile.
    unfit = {"zero2_offload"} if adapters else set()
    unfit |= {"zero3", "zero3_offload"} if recipe.model.compile else set()
    unfit |= {"zero2_offload", "zero3_offload"} if train.optim != "adamw" else set()
    return [name for name in order if name not in unfit]


def _micro_batches(recipe: Recipe, hardware: Hardware) -> int:
    """Of a step, on one rank; 1 where the recipe leaves their size open."""
    size = recipe.train.micro_batch_size
    if size == "auto" or recipe.train.fsdp is not None:
        return 1
    return ceil(resolve_sequences(recipe, hardware).value / resolve_data_parallel_ranks(recipe, hardware).value / size)


def first_that_fits(
    recipe: Recipe, hardware: Hardware, model: ModelFacts
) -> tuple[str | None, dict[str, MemoryEstimate]]:
    """The cheapest engine that fits, or None; and the estimates of it and of those before it."""
    estimates: dict[str, MemoryEstimate] = {}
    for name in order_of_engines(recipe, hardware, model):
        estimate = estimate_memory(recipe, hardware, model, load_deepspeed(name) if name != "none" else None)
        assert estimate
        estimates[name] = estimate
        if estimate.lack is None:
            return name, estimates
    return None, estimates


def choose_engine(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Decision[str | None]:
    """The file that `train.parallel: auto` stands for here; None: no DeepSpeed. Raises PlanError if none fits, with what would help."""
    name: str | None
    if hardware.gpu is None or model.parameters is None:
        name = order_of_engines(recipe, hardware, model)[0]
        reason = (
            f"{engine_words(name, recipe, hardware)}, the first that is tried: the model's size on a GPU is not known"
        )
    else:
        name, estimates = first_that_fits(recipe, hardware, model)
        lacks = ", ".join(
            f"{engine_words(one, recipe, hardware)} needs {estimate.lack}"
            for one, estimate in estimates.items()
            if one != name
        )
        if name is None:
            first, estimate = next(iter(estimates.items()))
            bars = "\n".join(memory_bars(estimate.as_json(), engine=engine_words(first, recipe, hardware)))
            raise PlanError(
                f"train.parallel=auto: training a model of {model.parameters / 1e9:.3g}e9 parameters does not fit on {hardware.device}: "
                f"{lacks}. {REMEDY}\n\n{bars}"
            )
        reason = f"{engine_words(name, recipe, hardware)} is the cheapest that fits{'; ' if lacks else ''}{lacks}"
        if name == "zero3" and hardware.ranks > hardware.ranks_per_node:
            reason += "; over slow links train.pipeline_parallel_size sends less (docs/pipeline.md)"
    return Decision(None if name == "none" else name, f"auto: {reason}")


def engine_words(name: str, recipe: Recipe, hardware: Hardware) -> str:
    """An engine as a person calls it: the file's name, or what there is without one."""
    if name != "none":
        return name
    without = "tensor parallel" if recipe.train.tensor_parallel_size > 1 else "DDP"
    return "one process" if hardware.ranks == 1 else without


def resolve_memory(
    estimate: MemoryEstimate | None, hardware: Hardware, micro_batch_size: int
) -> Decision[float | None]:
    """GiB that each GPU needs, and the sum, with a warning where that is more than there is."""
    if estimate is None:
        why = "the model's size is not known before it is downloaded" if hardware.gpu else "on a CPU nothing is counted"
        return Decision(None, why)
    how = "activations simulated" if estimate.simulated else "by arithmetic"
    words = f"{how}, for a micro-batch of {micro_batch_size}: {estimate.words}"
    if estimate.lack:
        words = f"WARNING: does not fit, {words}. {REMEDY}"
    return Decision(round(estimate.gpu_bytes / GIB, 1), words)


def open_deepspeed(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> DeepSpeedFile | None:
    """The DeepSpeed file that runs, its buckets sized for the model; None without DeepSpeed. Raises PlanError."""
    name = recipe.train.deepspeed
    if recipe.train.parallel == "auto":
        resolve_data_parallel_ranks(recipe, hardware)  # refuses ranks that do not divide into groups
        name = choose_engine(recipe, hardware, model).value
    return size_buckets(load_deepspeed(name), model, recipe.model.lora) if name else None


def resolve_engine(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, deepspeed: DeepSpeedFile | None
) -> Decision[str]:
    """`one process`, `DDP`, `ZeRO-<stage>`, `FSDP2`, `tensor parallel` or `pipeline parallel`, as it will run."""
    ranks, fsdp = hardware.ranks, resolve_fsdp(recipe, hardware)
    if deepspeed is not None:
        where = f" with offload to {deepspeed.offload}" if deepspeed.offload else ""
        engine = f"ZeRO-{deepspeed.stage}"
        reason = f"{deepspeed.path.name}{where}, {ranks} rank{'s' if ranks > 1 else ''}"
    elif fsdp is not None:
        engine, reason = FSDP2, describe_fsdp(fsdp, hardware)
    elif ranks == 1:
        engine, reason = "one process", "there is one process, and no train.deepspeed"
    elif recipe.train.tensor_parallel_size > 1:
        engine, reason = "tensor parallel", f"train.tensor_parallel_size; {ranks} ranks share each layer"
    elif recipe.train.pipeline_parallel_size > 1:
        stages = recipe.train.pipeline_parallel_size
        engine, reason = PIPELINE, f"train.pipeline_parallel_size; {ranks} ranks hold {stages} stages"
    else:
        engine, reason = "DDP", f"train.deepspeed is not set; {ranks} ranks each hold the whole model"
    if recipe.train.parallel == "auto":
        reason = choose_engine(recipe, hardware, model).reason
    return Decision(engine, reason)
