"""Sets up gradient checkpointing on the live model where transformers does not, and reads back what really runs.

transformers switches its layers when the training begins, after the trainer was built.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import TrainerCallback

from sft.errors import PlanError

# sdpa's backends, torch's varlen_attn, and the operators of the flash-attn packages.
_ATTENTION = re.compile(r"scaled_dot_product_\w*attention|varlen_attn|flash_attn")


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # TRL's own policy does not know varlen_attn, and would recompute it like everything else.
    kept = _ATTENTION.search(str(operator)) is not None
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _layers(model: Any) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # Code that a model's repository ships may have one flag for all its layers.
    return layers or [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def checkpointed_layers(model: Any) -> tuple[int, int]:
    """How many layers recompute their activations, and how many there are.

    Args:
        model: Live, wrapped or not; the trainer switches its layers when the training begins.
    """
    layers = _layers(model)
    return sum(bool(layer.gradient_checkpointing) for layer in layers), len(layers)


def running_checkpointing(model: Any) -> str:
    """How the layers that recompute do it: `off`, `full`, `selective` or `offload`."""
    running = [layer for layer in _layers(model) if layer.gradient_checkpointing]
    functions = [getattr(layer, "_gradient_checkpointing_func", partial(checkpoint)) for layer in running]
    if not functions:
        return "off"
    if all(function.func is not checkpoint for function in functions):
        return "offload"  # transformers' wrapper that keeps what is saved in the machine's memory
    kept = [function.keywords.get("context_fn") is not None for function in functions]
    return "selective" if all(kept) else "full"


def has_layers_of_their_own(model: Any) -> bool:
    """Whether each layer can be switched by itself."""
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in _layers(model))


def checkpoint_every(model: Any, number: int) -> None:
    """Switch a model whose training has begun with checkpointing to other layers.

    Args:
        model: Live.
        number: Every so many layers; 0 for none.
    """
    for place, layer in enumerate(_layers(model)):
        layer.gradient_checkpointing = number > 0 and place % number == 0


def select(model: Any) -> None:
    """Have the layers that recompute keep the outputs of attention, so that everything else is recomputed.

    transformers has no setting for it. TRL's `selective` wraps a method that transformers 5.23 does not call for adapters: all
    is recomputed then, and nothing says so.
    """
    for layer in _layers(model):
        if layer.gradient_checkpointing:
            function = layer._gradient_checkpointing_func
            contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
            layer._gradient_checkpointing_func = partial(
                function.func, *function.args, **function.keywords | {"context_fn": contexts}
            )


def check_checkpointing(model: Any, planned: bool | int | str) -> None:
    """Compare the live layers with the plan.

    Args:
        model: As the training has it.
        planned: False, True, `selective`, `offload`, or n for every n-th layer.

    Raises:
        PlanError: Other layers recompute, or otherwise.
    """
    running, layers = checkpointed_layers(model)
    every = planned if isinstance(planned, int) and not isinstance(planned, bool) else 1
    wanted = -(-layers // every) if planned else 0
    kind = planned if isinstance(planned, str) else "full" if planned else "off"
    found = running_checkpointing(model)
    if (running, found) == (wanted, kind) and (every == 1 or has_layers_of_their_own(model)):
        return
    raise PlanError(
        f"train.gradient_checkpointing={planned}: {wanted} of {layers} layers should recompute ({kind}), and {running} do ({found}). "
        f"Set it to {'true or false' if planned is not True else 'false'}."
    )


class CheckpointingAsPlanned(TrainerCallback):  # type: ignore[misc]
    """Completes what transformers has switched when the training began, and compares it with the plan.

    Args:
        planned: From the plan.
    """

    def __init__(self, planned: bool | int | str) -> None:
        self.planned = planned

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step.

        Raises:
            PlanError: Something else would run than was planned.
        """
        model = kwargs["model"]
        if self.planned == "selective":
            select(model)
        check_checkpointing(model, self.planned)
