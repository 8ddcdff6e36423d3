"""Holds what is known of a model before its weights load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """How a model attends. The defaults are those of an ordinary decoder."""

    has_interface: bool = True
    """Goes through transformers' attention interface, so that a registered function is what runs."""

    has_sdpa: bool = True
    has_flash: bool = True
    sinks: bool = False
    """Learned scores that attend to nothing (gpt-oss)."""

    softcap: bool = False
    """Scores are squashed by tanh (Gemma 2)."""

    mask_only: bool = False
    """What a token sees is said by a mask alone (chunks, chosen tokens, windows that the function is not told of), so that functions
    that take no mask would compute something else."""

    blind_mask: bool = False
    """Its masks are made without position ids, so that no mask keeps packed documents apart (OPT, Falcon, gpt-oss)."""

    recurrent: bool = False
    """Some layers carry a state from token to token (Mamba, linear attention, short convolutions)."""

    head_dim: int | None = None
    value_head_dim: int | None = None
    """Where values are narrower than keys (multi-head latent attention)."""

    dropout: float = 0.0
    """Of attention weights while training."""

    tensor_plan: frozenset[str] = frozenset()
    """In which ways transformers' tensor parallel plan divides its layers; empty where it has none."""

    @property
    def one_kernel(self) -> bool:
        """Whether FlashAttention computes it: equal heads of a multiple of 8, at most 256."""
        width = self.head_dim
        same = self.value_head_dim in (None, width)
        return same and (width is None or (width % 8 == 0 and width <= 256))


@dataclass(frozen=True)
class ModelFacts:
    """The model's config.json, as far as the plan needs it; None where it could not be read before a download."""

    path: str
    """Local folder or hub id, `builtin:` names resolved."""

    model_type: str | None = None
    dtype: str | None = None
    """What the weights are stored in, which is what the model was trained in: bfloat16, float16, float32."""

    max_position_embeddings: int | None = None
    parameters: int | None = None
    vocab_size: int | None = None
    """Rows of the embedding."""

    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    """Width of the feed-forward layers."""

    sliding_window: int | None = None
    """Tokens that a query sees in layers with a window, where the model has such."""

    architecture: Architecture | None = None
    """How it attends; None where that is not known."""

    commit: str | None = None
    """Of a hub model, what its revision stood for when it was looked up: all that is loaded of it is of this commit."""
