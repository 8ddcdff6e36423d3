"""What carries the training out: the cheapest engine that holds the model, and DeepSpeed's buckets in the model's size.

Pure arithmetic over the recipe, the machine and config.json: no torch.
"""

from __future__ import annotations

from dataclasses import replace

from sft.facts import ModelFacts
from sft.hardware import Hardware
from sft.recipe import Recipe
from sft.resolved import Resolved
from sft.zero import DeepSpeedFile, load_deepspeed

AUTO = "auto"

_ROOM = 0.25
"""Share of a GPU's memory that stays for activations, DeepSpeed's buckets and fragmentation."""

_LARGEST_BUCKET = 500_000_000
"""Elements, 1 GB in bf16: larger ones win nothing more."""


def choose_deepspeed(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Resolved[str | None]:
    """The file under ds_configs/ that `train.deepspeed: auto` stands for here, or None for no DeepSpeed.

    One process shares with nobody. Several share optimizer state and gradients (`zero2`) where that leaves room, else the
    weights too (`zero3`). Adapters are so small that only a frozen base without room is a reason.
    """
    if hardware.ranks == 1:
        return Resolved(None, "auto: one process shares with nobody, and needs no engine")
    adapters = recipe.model.lora is not None
    whole = "DDP" if adapters else "zero2"
    name = None if adapters else "zero2"
    if hardware.gpu is None or model.parameters is None:
        why = "on a CPU" if hardware.gpu is None else "the model's size is not known before it is downloaded"
        return Resolved(name, f"auto: {whole} for several ranks ({why})")
    # Weights on each rank; gradients, fp32 weights and moments shared out: ds_configs/README.md has the sums.
    width = 2 if _half_precision(recipe, hardware) else 4
    each = width + (0 if adapters else 16 / hardware.ranks)
    needed, memory = each * model.parameters / 2**30, hardware.gpu.memory_gib
    arithmetic = f"{each:g} bytes x {model.parameters / 1e9:.3g}e9 parameters = {needed:.3g} of {memory:.0f} GiB"
    if needed <= (1 - _ROOM) * memory:
        return Resolved(name, f"auto: {whole} fits, {arithmetic}")
    return Resolved("zero3", f"auto: {whole} would need {arithmetic}")


def _half_precision(recipe: Recipe, hardware: Hardware) -> bool:
    wanted = recipe.train.precision
    return wanted in ("bf16", "fp16") or (
        wanted == "auto" and hardware.gpu is not None and hardware.gpu.compute_capability >= 8.0
    )


def open_deepspeed(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> DeepSpeedFile | None:
    """The DeepSpeed file that runs, its buckets sized for the model; None without DeepSpeed.

    Raises:
        PlanError: train.deepspeed names a file that there is not, or that DeepSpeed would not follow.
    """
    name = recipe.train.deepspeed
    if name == AUTO:
        name = choose_deepspeed(recipe, hardware, model).value
    return size_buckets(load_deepspeed(name), model) if name else None


def size_buckets(file: DeepSpeedFile, model: ModelFacts) -> DeepSpeedFile:
    """The file with numbers, in elements, where it says `"auto"` for the size of a buffer.

    transformers would put in the square of hidden_size, which is less than one weight of an MLP.

    Args:
        file: From load_deepspeed; numbers that it holds stay.
        model: Its size. What is not known gives DeepSpeed's own defaults.
    """
    parameters, hidden, layers = model.parameters, model.hidden_size, model.num_hidden_layers
    # All of a small model in one reduction; never more than the model has.
    bucket = min(_LARGEST_BUCKET, parameters or _LARGEST_BUCKET)
    layer = _layer_size(model) if parameters and hidden and layers else 50_000_000
    sizes = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": min(_LARGEST_BUCKET, layer),
        "stage3_param_persistence_threshold": 10 * hidden if hidden else 100_000,
    }
    zero = file.config.get("zero_optimization", {})
    sized = {key: sizes[key] if value == AUTO and key in sizes else value for key, value in zero.items()}
    return replace(file, config=file.config | {"zero_optimization": sized}) if sized else file


def _layer_size(model: ModelFacts) -> int:
    """Weights of one layer: those of the model but its embedding, shared evenly."""
    assert model.parameters
    assert model.hidden_size
    assert model.num_hidden_layers
    embedding = (model.vocab_size or 0) * model.hidden_size
    return max(model.parameters - embedding, 0) // model.num_hidden_layers or model.parameters
