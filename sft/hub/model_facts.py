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
    """Only a mask says what a token sees (chunks, chosen tokens, windows that the attention function is not given): functions that take
    no mask would compute something else."""

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
    """What the plan needs of a model; None where config.json could not be read before a download."""

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
    """None where the model's own code computes it."""

    commit: str | None = None
    """Of a hub model, what its revision stood for when it was looked up: all that is loaded of it is of this commit."""

    @property
    def layer_size(self) -> int:
        """Weights of one layer: the model's without its embedding, shared evenly; 0 where its shape is not known."""
        if not (self.parameters and self.hidden_size and self.num_hidden_layers):
            return 0
        embedding = (self.vocab_size or 0) * self.hidden_size
        return max(self.parameters - embedding, 0) // self.num_hidden_layers or self.parameters
