"""Counts the FLOPs that a model's arithmetic needs for a step, from its weights and the lengths of the documents.

The formula is in docs/architecture.md. Counted is what the mathematics needs, once: activations that are computed again, padding,
and the half of the attention matrix that causality hides are no work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

TRAINED, FROZEN = 6, 4
"""FLOPs a token and weight: 2 forward, 2 for the gradient of the input, and 2 for that of a weight that is trained."""

ATTENTION = 12
"""FLOPs a pair of query and key, and channel: 2 for the score and 2 for the weighted value forward, twice that backward."""


@dataclass(frozen=True)
class Matmuls:
    """Weights that a token is multiplied with. An input embedding is looked up, and is none."""

    trained: int = 0
    frozen: int = 0
    head_trained: int = 0
    """Of the output head, tied or not."""

    head_frozen: int = 0


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers that are alike."""

    layers: int
    channels: int
    """Query heads x head_dim."""

    window: int | None = None
    """Keys that a query sees, itself among them; None for all before it."""


@dataclass(frozen=True)
class ModelFlops:
    """What a training step costs one model."""

    matmuls: Matmuls
    attention: tuple[AttentionLayers, ...]

    def of(self, lengths: np.ndarray, target_tokens: int) -> float:
        """FLOPs to train on these documents.

        The output head counts for the target tokens only, as TRL's fused head projects no others. With a head that
        projects every token the figure is too low, never too high.

        Args:
            lengths: Tokens of each document, dummies and padding left out.
            target_tokens: Tokens that have a loss.
        """
        weights, tokens = self.matmuls, int(lengths.sum())
        body = TRAINED * weights.trained + FROZEN * weights.frozen
        head = TRAINED * weights.head_trained + FROZEN * weights.head_frozen
        attention = sum(
            ATTENTION * layers.layers * layers.channels * attention_area(lengths, layers.window)
            for layers in self.attention
        )
        return float(body * tokens + head * target_tokens + attention)


def attention_area(lengths: np.ndarray, window: int | None = None) -> float:
    """Pairs of query and key of causal attention inside each document: half the square, or the band of a window.

    >>> attention_area(np.array([4, 10]))
    58.0
    >>> attention_area(np.array([4, 10]), window=6)
    50.0
    """
    seen = lengths if window is None else np.minimum(lengths, window)
    return float((seen * lengths - seen * seen / 2).sum())


def attention_layers(config: Any) -> tuple[AttentionLayers, ...] | None:
    """The attention layers of a text model, from its configuration; None where this formula does not hold for them."""
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int) or getattr(config, "is_heterogeneous", False):
        return None
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    if not set(kinds) <= {"full_attention", "sliding_attention"} or len(kinds) != layers:
        return None
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "v_head_dim", None):
        # Latent attention scores and mixes with different numbers of channels.
        head_dim = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size / heads
    windows = Counter(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(AttentionLayers(count, int(heads * head_dim), window) for window, count in windows.items())


def matmul_weights(model: Any) -> Matmuls | None:
    """Count the weights of a live model, with adapters where it has them, or of an empty one; sharded and quantized ones whole.

    Of experts, those that a token is routed to count. None where there is no output head, or weights that are used otherwise than one
    multiplication a token.
    """
    head = model.get_output_embeddings()
    if head is None:
        return None
    in_head = {id(module) for module in head.modules()}
    active = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        # Rows of embeddings that peft trains beside adapters lie in dictionaries.
        if hasattr(module, "num_embeddings") or hasattr(module, "keys"):
            continue
        routed = "experts" in name.split(".")
        for kind, parameter in module._parameters.items():
            shape = () if parameter is None else full_shape(module, kind)
            if len(shape) < 2 or "bias" in kind:
                continue
            if len(shape) != (3 if routed else 2) or (routed and not active):
                return None
            size = int(np.prod(shape)) * active // shape[0] if routed else shape[0] * shape[1]
            place = "head_" if id(module) in in_head else ""
            counts[place + ("trained" if parameter.requires_grad else "frozen")] += size
    return Matmuls(**counts)


def full_shape(module: Any, kind: str) -> tuple[int, ...]:
    """The shape of a module's parameter before bitsandbytes packs a 4-bit weight, or ZeRO-3 leaves a rank a flat shard."""
    parameter, packed = module._parameters[kind], getattr(module, "quant_state", None)
    if kind == "weight" and packed is not None:
        return tuple(packed.shape)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def model_flops(model: Any) -> ModelFlops | None:
    """What a training step costs a model, live or empty; None where it is not known."""
    matmuls, attention = matmul_weights(model), attention_layers(model.config.get_text_config())
    return ModelFlops(matmuls, attention) if matmuls is not None and attention is not None else None
