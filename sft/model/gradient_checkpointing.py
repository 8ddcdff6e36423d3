"""Sets up gradient checkpointing on the live model where transformers does not, and reads what really runs.

transformers switches its layers when the training begins, after the trainer was built.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import TrainerCallback

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


def has_layers_of_their_own(model: Any) -> bool:
    """Whether each layer can be switched by itself."""
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in _layers(model))


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


def running_checkpointing(model: Any) -> str:
    """What the layers do, such as `2 of 4 layers, selective`; `off` where none recomputes its activations."""
    layers = _layers(model)
    running = [layer for layer in layers if layer.gradient_checkpointing]
    functions = [getattr(layer, "_gradient_checkpointing_func", partial(checkpoint)) for layer in running]
    if not functions:
        return "off"
    if all(function.func is not checkpoint for function in functions):
        kind = "offload"  # transformers' wrapper that keeps what is saved in the machine's memory
    else:
        selective = all(function.keywords.get("context_fn") is not None for function in functions)
        kind = "selective" if selective else "full"
    return f"{len(running)} of {len(layers)} layers, {kind}"


def planned_checkpointing(model: Any, planned: bool | int | str) -> str:
    """What running_checkpointing must find.

    Args:
        model: Live.
        planned: False, True, `selective`, `offload`, or n for every n-th layer.
    """
    if not planned:
        return "off"
    every = planned if isinstance(planned, int) and not isinstance(planned, bool) else 1
    if every > 1 and not has_layers_of_their_own(model):
        return f"every {every} layers"
    layers = len(_layers(model))
    return f"{-(-layers // every)} of {layers} layers, {planned if isinstance(planned, str) else 'full'}"


class SelectiveCheckpointing(TrainerCallback):  # type: ignore[misc]
    """Completes what transformers has switched when the training began."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before the first step."""
        select(model)
