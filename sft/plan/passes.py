"""Holds what decides the memory of a forward and backward pass, and what it is; sft/plan/simulation.py finds it, which imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from sft.recipe.schema import Lora


@dataclass(frozen=True)
class Pass:
    """What decides the memory of a forward and backward pass over one micro-batch."""

    tokens: int
    dtype: str
    """Of the weights: bfloat16, float16 or float32."""
    autocast: str | None
    """What matrices are multiplied in where something trained is fp32; None: in the dtype of the weights, adapters too."""
    recompute_every: int
    """Every n-th layer recomputes its activations; 0: none."""
    liger: bool
    eager: bool
    """Attention with a matrix of scores."""
    fp32_gradients: bool
    """Whether gradients in half precision are added up in fp32, weight by weight."""
    all_logits: bool
    tensor_parallel_size: int
    """Ranks that share the heads and the feed-forward width of each layer."""
    lora: Lora | None
    freeze: tuple[str, ...]


@dataclass(frozen=True)
class PassMemory:
    """Bytes beside weights, gradients and optimizer state."""

    kept: int
    """At the end of the forward pass through the layers."""
    peak: int
    """The most at any time of the pass."""
    trained: int
    """Parameters that are trained."""
