"""Decides what runs inside a layer: attention, kernels, torch.compile, gradient checkpointing."""

from __future__ import annotations

from dataclasses import replace

from sft.errors import PlanError
from sft.hub.model_facts import Architecture, ModelFacts
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Hardware
from sft.plan.plan import Decision, TuningResult
from sft.recipe.schema import Recipe

HEAD_TILE = (4096, 32768)
"""Tokens and words whose logits TRL's fused head has at one time: its TOKEN_CHUNK_SIZE, and
_CHUNKED_LOGPROB_CHUNK_SIZE whatever the vocabulary."""


def resolve_attention(
    recipe: Recipe, hardware: Hardware, precision: str, model_type: str | None, architecture: Architecture | None
) -> Decision[str]:
    """The attention function; `varlen` is our own, sft/model/attention.py. Raises PlanError if the recipe's does not run here.

    Args:
        recipe: The function, and whether documents are packed.
        hardware: The GPU, and which flash-attn is installed.
        precision: bf16, fp16 or fp32, as planned.
        model_type: Of config.json; None before a download.
        architecture: How the model attends; None where its own code computes it.
    """
    known = architecture or (Architecture() if model_type is None else Architecture(has_interface=False))
    wanted, packing = recipe.model.attn_implementation, recipe.data.packing
    models = f"models of type {model_type or 'this kind'}"
    if packing and known.recurrent:
        raise PlanError(
            f"data.packing=true, and {models} have recurrent layers, which carry their state from one packed document into the next. Set "
            "data.packing=false."
        )
    if hardware.is_described and wanted != "auto":  # what the recipe names is taken to be installed there
        hardware = replace(hardware, has_flash_attention=True, has_flash_attention_3=True)
    problems = _attention_problems(hardware, precision, known, models)
    if wanted == "auto":
        tried = [name for name in problems if packing or not name.startswith("varlen")]
        name = next(name for name in tried if problems[name] is None)
        missed = {"eager": "sdpa", "sdpa": "varlen" if packing else ""}.get(name)
        why = f"no {missed}, {problems[missed]}" if missed else "the first that runs here"
        apart = "by a block mask" if name in ("sdpa", "eager") else "by their boundaries"
        chosen = Decision(name, f"auto: {why}{f'; packed documents stay apart {apart}' if packing else ''}")
    elif problem := problems[wanted]:
        others = "auto or eager" if problems["sdpa"] else "auto or sdpa"
        raise PlanError(f"model.attn_implementation={wanted}, and {problem}. Set it to {others}.")
    else:
        chosen = Decision(wanted, "the recipe")
    if packing and known.blind_mask and chosen.value in ("sdpa", "eager"):
        raise PlanError(
            f"data.packing=true, and the masks of {models} do not follow documents: with {chosen.value} they would see each other. Set "
            "data.packing=false."
        )
    return chosen


def _attention_problems(hardware: Hardware, precision: str, known: Architecture, models: str) -> dict[str, str | None]:
    """Why each function would not run here, or not compute what the model means; in the order in which `auto` tries them."""
    gpu = hardware.gpu
    capability = gpu.compute_capability if gpu else 0.0
    this = f"this GPU (compute capability {capability})"
    no_gpu = (gpu is None, "there is no GPU here")
    softcap = (known.softcap, f"{models} cap their attention scores, which it does not support")
    sinks = (known.sinks, f"{models} have attention sinks, which it does not support")
    mask_only = (known.mask_only, f"{models} express by a mask alone what a token sees")
    dropout = (known.dropout > 0, f"the model's attention_dropout is {known.dropout:g}, which it would leave out")
    too_old = (gpu is not None and capability < 8.0, f"{this} has no FlashAttention")
    fp32 = (gpu is not None and precision == "fp32", "FlashAttention does not run in fp32")
    values = known.value_head_dim or known.head_dim
    heads = (
        gpu is not None and not known.one_kernel,
        f"FlashAttention has no kernel for heads of {known.head_dim} (values {values})",
    )
    no_interface = (not known.has_interface, f"{models} do not take another attention function")
    no_flash = (not known.has_flash, f"{models} have no flash attention in transformers")
    no_sdpa = (not known.has_sdpa, f"{models} have no sdpa in transformers")
    missing = (not hardware.has_flash_attention, "the flash-attn package is not installed")
    missing_3 = (not hardware.has_flash_attention_3, "the flash-attn 3 package is not installed")
    hopper = (not 9.0 <= capability < 10.0, f"{this} is not a Hopper, the only kind it runs on")
    blackwell = (not 10.0 <= capability < 11.0, f"{this} is not a B200 or its kind, on which it is taken")
    wide = (
        known.head_dim is not None and known.head_dim > 128,
        f"FlashAttention-4 is taken for heads up to 128, not {known.head_dim}",
    )
    inside = "it needs the flash-attn {} package, and a torch that can switch to it"
    flash = [fp32, too_old, no_flash, sinks, mask_only, heads]
    varlen = [softcap, sinks, no_interface, mask_only, dropout, too_old, fp32, heads]
    rows = {
        "varlen_fa4": [no_gpu, (not hardware.has_varlen_fa4, inside.format(4)), blackwell, wide, *varlen],
        "varlen_fa3": [no_gpu, (not hardware.has_varlen_fa3, inside.format(3)), hopper, *varlen],
        "flash_attention_3": [no_gpu, missing_3, hopper, *flash, dropout],
        "flash_attention_2": [no_gpu, missing, *flash],
        "varlen": varlen,
        "sdpa": [softcap, sinks, no_sdpa],
        "eager": [],
    }
    return {name: next((why for applies, why in reasons if applies), None) for name, reasons in rows.items()}


def resolve_kernels(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Decision[str]:
    """`liger` or `none`, as they will run; sft/plan/refusals.py refuses an explicit `liger` that has a problem."""
    wanted, problem = recipe.model.kernels, kernels_problem(recipe, hardware, model)
    if wanted == "liger" and hardware.gpu is None:
        why = "the recipe asks for liger, whose kernels do not run on a CPU; plain layers give the same result"
        return Decision("none", why)
    if wanted == "auto":
        return Decision("none" if problem else "liger", f"auto: {problem or 'fused norms, rotary embedding and MLP'}")
    return Decision(wanted, "the recipe")


def kernels_problem(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> str | None:
    """Why Liger's layers would not run, or were never compared with plain ones."""
    size = recipe.train.tensor_parallel_size
    rows = (
        (hardware.gpu is None, "Liger's kernels do not run on a CPU"),
        (model.has_liger is False, f"Liger has no kernels for models of type {model.model_type}"),
        (recipe.model.compile, "with model.compile=true, which fuses the same operations, Liger's layers are untested"),
        (size > 1, f"with train.tensor_parallel_size={size} Liger's layers are untested"),
    )
    return next((why for applies, why in rows if applies), None)


def resolve_checkpointing(
    recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None, tuned: TuningResult | None
) -> Decision[bool | int | str]:
    """Which layers recompute their activations: False, True, every n-th, `selective` or `offload`."""
    wanted = recipe.train.gradient_checkpointing
    is_reentrant = recipe.model.lora is not None and deepspeed is not None and deepspeed.stage == 3
    kind = "reentrant, which TRL needs for adapters under ZeRO-3" if is_reentrant else "non-reentrant"
    if wanted != "auto":
        return Decision(wanted, f"the recipe; {kind}" if wanted else "the recipe")
    if tuned:
        found = tuned.gradient_checkpointing
        return Decision(found, f"{tuned.reason}; {kind}" if found else tuned.reason)
    return Decision(hardware.gpu is not None, f"auto: on for a GPU, {kind}; off on a CPU")
