"""Decides the optimizer, the bytes of its state, and which engines can run it."""

from __future__ import annotations

from collections.abc import Iterator

from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Hardware
from sft.plan.parallelism import resolve_fsdp
from sft.plan.plan import Decision, stated
from sft.recipe.schema import Recipe


def resolve_optimizer(recipe: Recipe) -> Decision[str]:
    """The optimizer's name, and in the reason its arguments."""
    given = "".join(f", {name}={value}" for name, value in recipe.train.optimizer_arguments.items())
    return Decision(recipe.train.optim, stated(recipe.train, "optim") + given)


def uses_bitsandbytes(recipe: Recipe) -> bool:
    """Whether the base is quantized, or the optimizer's state."""
    return recipe.model.quantization is not None or recipe.train.optim.endswith("8bit")


def state_bytes(recipe: Recipe, parameters: float, embedding: float, hidden: int) -> float:
    """Bytes of the optimizer's state for so many trained parameters, of which so many are the embedding's.

    8-bit blocks: 2 x (1 + 4 / 256) a parameter. Adafactor: 4 for a row and a column of each matrix, of about `hidden` each.
    """
    rest = max(0.0, parameters - embedding)
    match recipe.train.optim:
        case "adamw_8bit" | "paged_adamw_8bit":
            return 8 * embedding + 2.03125 * rest
        case "adafactor":
            return 8 * parameters / hidden if hidden else 0.0
        case "lion":
            return 4 * parameters
        case "muon":
            return 8 * embedding + 4 * rest
        case _:
            return 8 * parameters


def optimizer_refusals(recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None) -> Iterator[str]:
    """Why the optimizer cannot run here, with a remedy each."""
    optim, key = recipe.train.optim, f"train.optim={recipe.train.optim}"
    if optim == "adamw":
        return
    if optim == "paged_adamw_8bit" and hardware.gpu is None:
        yield f"{key} moves states between a GPU and the machine, and there is no GPU here. Set train.optim=adamw_8bit."
    if optim.endswith("8bit") and not hardware.has_bitsandbytes:
        yield f"{key} needs bitsandbytes, which is not installed: pip install -e '.[qlora]'."
    if deepspeed is not None and (deepspeed.offload is not None or deepspeed.stage == 0):
        yield f"{key}, and {deepspeed.path.name} offloads, or is DeepSpeed without ZeRO: only AdamW runs there. Set train.optim=adamw."
    elif optim != "lion" and (deepspeed is not None or (recipe.train.fsdp is not None and hardware.ranks > 1)):
        # It looks at rows and columns of matrices, or at blocks of one weight: of a shard it would compute something else.
        where = deepspeed.path.name if deepspeed else "train.fsdp"
        yield f"{key} looks at whole weights, and with {where} each rank steps on shards. Set train.optim to adamw or lion."
    elif (fsdp := resolve_fsdp(recipe, hardware)) is not None and fsdp.state_dict_type == "full":
        yield f"{key}: train.fsdp.state_dict_type=full saves the state of AdamW only. Leave state_dict_type out."
