"""Decides which attention function runs; `varlen` is our own, sft/model/attention.py."""

from __future__ import annotations

from collections.abc import Mapping

from sft.errors import PlanError
from sft.hub.model_facts import Architecture
from sft.plan.decision import Decision
from sft.plan.hardware import Hardware
from sft.recipe.schema import Recipe

FLASH = {"flash_attention_3": "flash-attn 3", "flash_attention_2": "flash-attn"}


def choose_attention(
    recipe: Recipe, hardware: Hardware, precision: str, model_type: str | None, architecture: Architecture | None
) -> Decision[str]:
    """Decide the attention function.

    Args:
        recipe: What was asked for, and whether documents are packed.
        hardware: The GPU, and which flash-attn is installed.
        precision: bf16, fp16 or fp32, as planned.
        model_type: Of config.json; None before a download.
        architecture: How the model attends; None where its own code computes it.

    Raises:
        PlanError: What was asked for does not run here or not on this model; or the model cannot be packed.
    """
    known = architecture or (Architecture() if model_type is None else Architecture(has_interface=False))
    wanted, kind, packing = recipe.model.attn_implementation, model_type or "this kind", recipe.data.packing
    if packing and known.recurrent:
        raise PlanError(
            f"data.packing=true, and models of type {kind} have recurrent layers, which carry their state from one packed document into "
            "the next. Set data.packing=false."
        )
    # Why each function would not run here, or not compute what the model means; in the order in which `auto` tries them.
    problems = {name: _no_flash(name, hardware, precision, known, kind) for name in FLASH}
    problems |= {"varlen": _no_varlen(hardware, precision, known, kind), "sdpa": _no_sdpa(known, kind), "eager": None}
    if wanted == "auto":
        skipped = () if packing else ("varlen",)
        name = next(name for name, problem in problems.items() if problem is None and name not in skipped)
        chosen = Decision(name, f"auto: {_reason(name, hardware, packing, problems)}")
    elif problem := problems[wanted]:
        others = "auto or eager" if problems["sdpa"] else "auto or sdpa"
        raise PlanError(f"model.attn_implementation={wanted}, and {problem}. Set it to {others}.")
    else:
        chosen = Decision(wanted, "the recipe")
    if packing and known.blind_mask and chosen.value in ("sdpa", "eager"):
        raise PlanError(
            f"data.packing=true, and the masks of models of type {kind} do not follow documents: with {chosen.value} they would see each "
            "other. Set data.packing=false."
        )
    return chosen


def _reason(name: str, hardware: Hardware, packing: bool, problems: Mapping[str, str | None]) -> str:
    apart = "packed documents stay apart by their boundaries" if packing else "no packing"
    masked = "; packed documents stay apart by a block mask" if packing else ""
    if name in FLASH:
        return f"{FLASH[name]} is installed; {apart}"
    if name == "varlen":
        how = "FlashAttention inside torch" if hardware.gpu else "sdpa, document by document"
        return f"{how}; {apart}"
    if name == "sdpa":
        return f"no varlen, {problems['varlen']}{masked}" if packing else apart
    return f"{problems['sdpa']}{masked}"


def _no_sdpa(known: Architecture, kind: str) -> str | None:
    """Why sdpa would not compute what the model means."""
    if known.softcap:
        return f"models of type {kind} cap their attention scores, which sdpa cannot"
    if known.sinks:
        return f"models of type {kind} have attention sinks, which sdpa has not"
    return None if known.has_sdpa else f"models of type {kind} have no sdpa in transformers"


def _no_varlen(hardware: Hardware, precision: str, known: Architecture, kind: str) -> str | None:
    """Why our attention within documents would not compute it."""
    gpu = hardware.gpu
    if known.softcap or known.sinks:
        return _no_sdpa(known, kind)
    if not known.has_interface:
        return f"models of type {kind} do not take another attention function"
    if known.mask_only:
        return f"models of type {kind} say by a mask alone what a token sees"
    if known.dropout:
        return f"the model's attention_dropout is {known.dropout:g}"
    if gpu is None:
        return None
    if gpu.compute_capability < 8.0:
        return f"this GPU (compute capability {gpu.compute_capability}) has no FlashAttention"
    if precision == "fp32":
        return "FlashAttention does not run in fp32"
    if not known.one_kernel:
        return f"FlashAttention has no kernel for heads of {known.head_dim} (values {known.value_head_dim or known.head_dim})"
    return None


def _no_flash(name: str, hardware: Hardware, precision: str, known: Architecture, kind: str) -> str | None:
    """Why the flash-attn package would not run, or not compute it."""
    gpu, third = hardware.gpu, name == "flash_attention_3"
    installed = hardware.has_flash_attention_3 if third else hardware.has_flash_attention
    if gpu is None:
        return "there is no GPU here"
    if not installed:
        return f"the {'flash-attn 3' if third else 'flash-attn'} package is not installed"
    if precision == "fp32":
        return "it does not run in fp32"
    if third and not 9.0 <= gpu.compute_capability < 10.0:
        return f"this GPU (compute capability {gpu.compute_capability}) is not one: it runs on Hopper only"
    if gpu.compute_capability < 8.0:
        return f"this GPU (compute capability {gpu.compute_capability}) is too old for it"
    if not known.has_flash:
        return f"models of type {kind} have no flash attention in transformers"
    if known.sinks:
        return f"models of type {kind} have attention sinks, which it has not"
    if known.mask_only:
        return f"models of type {kind} say by a mask alone what a token sees"
    if third and known.dropout:
        return f"the model's attention_dropout is {known.dropout:g}, which it would leave out"
    return None if known.one_kernel else f"it has no kernel for heads of {known.head_dim}"
