"""Counts the FLOPs that a model's arithmetic needs for a step, from its weights and the lengths of the documents.

The formula is in docs/metrics.md. Counted is what the mathematics needs, once: activations that are computed again, padding,
and the half of the attention matrix that causality hides are no work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

TRAINED, FROZEN = 6, 4
"""FLOPs a token and weight: 2 forward, 2 for the gradient of the input, and 2 for that of a weight that is trained."""

ATTENTION = 12
"""FLOPs a pair of query and key, and channel: 2 for the score and 2 for the weighted value forward, twice that backward."""

KNOWN_LAYERS = {"full_attention", "sliding_attention"}


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

    def of(self, lengths: np.ndarray, labelled_tokens: int) -> float:
        """FLOPs to train on these documents.

        The output head counts for the labelled tokens only, as TRL's fused head projects no others. With a head that
        projects every token the figure is too low, never too high.

        Args:
            lengths: Tokens of each document, fillers and padding left out.
            labelled_tokens: Tokens that have a loss.
        """
        weights, tokens = self.matmuls, int(lengths.sum())
        body = TRAINED * weights.trained + FROZEN * weights.frozen
        head = TRAINED * weights.head_trained + FROZEN * weights.head_frozen
        attention = sum(
            ATTENTION * layers.layers * layers.channels * attention_area(lengths, layers.window)
            for layers in self.attention
        )
        return float(body * tokens + head * labelled_tokens + attention)


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
    """The attention layers of a model, from its configuration.

    Args:
        config: The text model's, of transformers.

    Returns:
        None where the layers are of kinds, or of sizes, that this formula does not hold for.
    """
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int) or getattr(config, "is_heterogeneous", False):
        return None
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    if not set(kinds) <= KNOWN_LAYERS or len(kinds) != layers:
        return None
    channels = heads * _head_dim(config, heads)
    windows = Counter(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(AttentionLayers(count, int(channels), window) for window, count in windows.items())


def _head_dim(config: Any, heads: int) -> float:
    """Channels of a head; latent attention scores and mixes with different numbers of them."""
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "v_head_dim", None):
        return float(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    return float(getattr(config, "head_dim", None) or config.hidden_size / heads)


def _own_weights(model: Any) -> Iterable[tuple[str, Any, tuple[int, ...], Any]]:
    """Name, module, whole shape and parameter of each weight with two or more dimensions; a tied one once a module."""
    for name, module in model.named_modules():
        for kind, parameter in module._parameters.items():
            if parameter is not None and "bias" not in kind:
                # Under ZeRO-3 a rank holds a flat part.
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                if len(shape) > 1:
                    yield name, module, shape, parameter


def matmul_weights(model: Any) -> Matmuls | None:
    """Count the weights of the live model, with adapters where it has them; sharded ones whole.

    Of experts, those that a token is routed to count.

    Returns:
        None where there is no output head, or weights that are used otherwise than one multiplication a token.
    """
    head = model.get_output_embeddings()
    if head is None:
        return None
    in_head = {id(module) for module in head.modules()}
    active = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
    counts: Counter[str] = Counter()
    for name, module, shape, parameter in _own_weights(model):
        # Rows of embeddings that peft trains beside adapters lie in dictionaries.
        if hasattr(module, "num_embeddings") or hasattr(module, "keys"):
            continue
        routed = "experts" in name.split(".")
        if len(shape) != (3 if routed else 2) or (routed and not active):
            return None
        size = int(np.prod(shape)) * active // shape[0] if routed else shape[0] * shape[1]
        place = "head_" if id(module) in in_head else ""
        counts[place + ("trained" if parameter.requires_grad else "frozen")] += size
    return Matmuls(**counts)


def model_flops(model: Any) -> ModelFlops | None:
    """What a training step costs the live model, or None where it is not known."""
    matmuls, attention = matmul_weights(model), attention_layers(model.config.get_text_config())
    return ModelFlops(matmuls, attention) if matmuls is not None and attention is not None else None
