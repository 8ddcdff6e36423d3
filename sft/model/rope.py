"""Extends a model's positions: writes model.rope_scaling into its configuration, and reads the live frequencies back."""

from __future__ import annotations

from typing import Any

import torch

from sft.errors import ModelError
from sft.recipe.schema import RopeScaling

_KEPT = ("rope_theta", "partial_rotary_factor")


def scale_positions(config: Any, rope: RopeScaling) -> Any:
    """The configuration with these positions, as it is saved to final/.

    Raises:
        ModelError: The model's class has its own idea of them.
    """
    text = config.get_text_config()
    own = text.rope_parameters or {}
    original = rope.original_max_position_embeddings or text.max_position_embeddings
    wanted = rope.model_dump(exclude_none=True) | {name: own[name] for name in _KEPT if name in own}
    if rope.rope_type != "linear":
        wanted["original_max_position_embeddings"] = original
    text.rope_parameters = dict(wanted)
    text.max_position_embeddings = int(original * rope.factor)
    text.standardize_rope_params()
    if text.rope_parameters != wanted:
        raise ModelError(
            f"model.rope_scaling: transformers makes {text.rope_parameters} of {wanted} for models of type {text.model_type}. Set "
            "rope_parameters in the model's config.json instead."
        )
    return config


def planned_rope(rope: RopeScaling) -> str:
    """A scaling in words."""
    return f"{rope.rope_type}, factor {rope.factor:g}"


def running_rope(model: Any) -> str:
    """The scaling of the live model in words, by the frequencies that its layers turn with."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config.get_text_config()
    rope = config.rope_parameters
    rotary = [module for module in model.modules() if hasattr(module, "inv_freq") and hasattr(module, "rope_type")]
    words = {f"{module.rope_type}, factor {rope.get('factor', 1):g}" for module in rotary}
    frequencies = ROPE_INIT_FUNCTIONS.get(rope["rope_type"])
    for module in rotary if frequencies else ():
        expected, _ = frequencies(config, module.inv_freq.device)
        if not torch.allclose(module.inv_freq.float(), expected.float(), rtol=1e-4):
            words.add("other frequencies")
    return "; ".join(sorted(words)) or "no rotary positions found"
