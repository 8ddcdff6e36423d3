"""Decides what runs inside a layer: kernels, torch.compile, gradient checkpointing."""

from __future__ import annotations

from sft.errors import PlanError
from sft.plan.decision import Decision, TuningResult, stated
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Hardware
from sft.recipe.schema import Recipe


def resolve_kernels(recipe: Recipe, hardware: Hardware) -> Decision[str]:
    """`liger` or `none`, as they will run."""
    reason = stated(recipe.model, "kernels")
    if recipe.model.kernels == "none":
        return Decision("none", reason)
    if hardware.gpu is None:
        return Decision(
            "none",
            f"{reason} asks for liger, whose kernels do not run on a CPU; plain layers give the same result",
        )
    return Decision("liger", f"{reason}: fused RMSNorm, RoPE and SwiGLU; the loss path is TRL's fused head")


def resolve_compile(recipe: Recipe, kernels: str, deepspeed: DeepSpeedFile | None) -> Decision[bool]:
    """Whether each decoder layer is compiled.

    Raises:
        PlanError: Not with ZeRO-3 or Liger.
    """
    if not recipe.model.compile:
        return Decision(False, stated(recipe.model, "compile"))
    if deepspeed is not None and deepspeed.stage == 3:
        raise PlanError(
            f"model.compile=true, and {deepspeed.path.name} is ZeRO-3, which gathers each weight by hooks inside the layers: they "
            "would be compiled in many pieces. Set model.compile=false, or train.deepspeed=zero2."
        )
    if kernels == "liger":
        raise PlanError(
            "model.compile=true and model.kernels=liger: both fuse the layers' operations, and together they are untested. Set "
            "model.kernels=none, or model.compile=false."
        )
    return Decision(True, "the recipe: each decoder layer, for any number of tokens and documents")


def resolve_checkpointing(
    recipe: Recipe, hardware: Hardware, attention: str, deepspeed: DeepSpeedFile | None, tuned: TuningResult | None
) -> Decision[bool | int | str]:
    """Which layers recompute their activations: False, True, every n-th, `selective` or `offload`.

    Raises:
        PlanError: The recipe's cannot be had here.
    """
    wanted = recipe.train.gradient_checkpointing
    adapters_sharded = recipe.model.lora is not None and deepspeed is not None and deepspeed.stage == 3
    kind = "reentrant, which TRL needs for adapters under ZeRO-3" if adapters_sharded else "non-reentrant"
    if wanted == "selective" and (adapters_sharded or attention == "eager"):
        why = "its attention is no operator of its own" if attention == "eager" else f"its checkpointing is {kind}"
        place = "model.attn_implementation=eager" if attention == "eager" else "model.lora with ZeRO-3"
        raise PlanError(
            f"train.gradient_checkpointing=selective does not work with {place}: {why}. Set train.gradient_checkpointing=true."
        )
    if wanted == "offload" and hardware.gpu is None:
        raise PlanError(
            "train.gradient_checkpointing=offload takes activations from a GPU to the machine's memory, and there is no GPU here. Set it "
            "to true or auto."
        )
    if wanted != "auto":
        every = f", every {wanted} layers" if isinstance(wanted, int) and wanted > 1 else ""
        return Decision(wanted, f"the recipe{every}; {kind}" if wanted else "the recipe")
    found = tuned.gradient_checkpointing if tuned else None
    if tuned and found is not None:
        return Decision(found, f"{tuned.reason}; {kind}" if found else tuned.reason)
    failed = f"; {tuned.reason}" if tuned else ""
    if hardware.gpu is None:
        return Decision(False, f"auto: off on a CPU, where time is what is short{failed}")
    return Decision(True, f"auto: on a GPU, {kind}{failed}")
