"""Decides what the layers compute in, and what weights and gradients are kept in.

MASTER is the only choice that sft/parallel/optimizer.py carries out by itself; under ZeRO DeepSpeed does.
"""

from __future__ import annotations

from sft.hub.model_facts import OVERFLOWS_FP16, ModelFacts
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Gpu, Hardware
from sft.plan.parallelism import resolve_fsdp
from sft.plan.plan import Decision, stated
from sft.recipe.schema import Recipe

MASTER = "bf16 with an fp32 copy"


def has_bf16(gpu: Gpu | None) -> bool:
    """Whether a GPU computes in bf16."""
    return gpu is not None and gpu.compute_capability >= 8.0


def resolve_precision(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Decision[str]:
    """What the layers compute in: `bf16`, `fp16` or `fp32`."""
    gpu = hardware.gpu
    if recipe.train.precision != "auto":
        return Decision(recipe.train.precision, "the recipe")
    if gpu is None:
        return Decision("fp32", "auto: on a CPU bf16 is no faster")
    stored = f"the weights are stored in {model.dtype}" if model.dtype else "the model's own dtype is not known yet"
    if has_bf16(gpu):
        return Decision("bf16", f"auto: the GPU has it; {stored}")
    why = f"auto: this GPU (compute capability {gpu.compute_capability}) has no bf16"
    unfit = (
        (model.model_type in OVERFLOWS_FP16, f"models of type {model.model_type} overflow fp16"),
        (resolve_fsdp(recipe, hardware) is not None, "fp16 is not built for train.fsdp"),
        (recipe.train.tensor_parallel_size > 1, "fp16 is untested with train.tensor_parallel_size"),
    )
    problem = next((words for applies, words in unfit if applies), None)
    return Decision("fp32", f"{why}; {problem}") if problem else Decision("fp16", f"{why}; with loss scaling; {stored}")


def resolve_weights(
    recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None, precision: str
) -> Decision[str]:
    """What the trained weights are kept in."""
    if (lora := recipe.model.lora) is not None:
        kept = f"{recipe.model.quantization or precision}, frozen"
        return Decision(kept, f"adapters are trained beside them: {lora.words}")
    if precision == "fp32":
        return Decision("fp32", "the precision")
    if deepspeed is not None and deepspeed.stage > 0:
        return Decision(MASTER.replace("bf16", precision), "DeepSpeed steps on its own copy, sharded over the ranks")
    if deepspeed is not None:
        return Decision(precision, "DeepSpeed without ZeRO decides about a copy")
    if resolve_fsdp(recipe, hardware) is not None:
        return Decision("fp32", "the rank's shard, which AdamW steps on; layers are gathered and computed in bf16")
    if hardware.ranks == 1 and precision == "bf16" and recipe.train.optim == "adamw":
        return Decision(MASTER, "AdamW steps on the copy, which keeps what bf16 would round away")
    return Decision("fp32", f"the optimizer steps on the weights themselves; {precision} by autocast")


def quant_storage(recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None, precision: str) -> str:
    """The dtype of the tensors that hold 4-bit weights: `uint8`, or where they are sharded that of the layers beside them."""
    shards = (deepspeed is not None and deepspeed.stage == 3) or resolve_fsdp(recipe, hardware) is not None
    return precision if shards else "uint8"


def resolve_quantization(
    recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None, precision: str
) -> Decision[str]:
    """What the frozen base is kept in."""
    if (kind := recipe.model.quantization) is None:
        return Decision("none", stated(recipe.model, "quantization"))
    stored = "" if kind == "int8" else f", stored as {quant_storage(recipe, hardware, deepspeed, precision)}"
    return Decision(kind, f"the recipe: bitsandbytes{stored}, computed in {precision}; final/ is dequantized")


def resolve_gradients(
    recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None, precision: str, accumulation: int
) -> Decision[str]:
    """What the gradients of a step's micro-batches are added up in: `fp32`, `bf16` or `fp16`."""
    if deepspeed is not None:
        named = deepspeed.config.get("data_types", {}).get("grad_accum_dtype", precision)
        return Decision(str(named), f"data_types.grad_accum_dtype of {deepspeed.path.name}")
    if resolve_fsdp(recipe, hardware) is not None:
        return Decision("fp32", "reduced over the ranks in fp32 after each micro-batch, into the rank's shard")
    if resolve_weights(recipe, hardware, None, precision).value == MASTER and accumulation == 1:
        return Decision("bf16", "one micro-batch a step: nothing is added up")
    return Decision("fp32", "bf16 would round each of a step's micro-batches")
