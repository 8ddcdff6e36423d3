"""Attention within documents, registered with transformers as `attn_implementation="varlen"`.

A packed batch is one row of several documents. The collator says where each begins (`cu_seq_lens_q`), and here attention runs
inside those boundaries only: on a GPU in one kernel, FlashAttention as torch ships it; on a CPU document by document. Nothing of
the size of tokens squared is made for them. What is not packed (padded batches, generation with a cache, a pack of one document
that is longer than the model's window) goes through sdpa.
"""

from __future__ import annotations

import inspect
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sft.errors import ModelError

NAME = "varlen"
SWITCHED = {"varlen_fa3": "FA3", "varlen_fa4": "FA4"}
"""Names of the same function on another FlashAttention, as torch calls it."""

IN_ONE_KERNEL = {"cuda": (torch.bfloat16, torch.float16)}
"""Where torch's kernel runs: kinds of devices, with the dtypes of each."""

# torch 2.11 groups heads by itself; 2.13 needs an argument for it, which 2.11 does not have.
_KERNEL: Any = varlen_attn
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def register(name: str = NAME) -> None:
    """Make a name of this function known to transformers, and switch torch to the FlashAttention that it stands for.

    Raises:
        ModelError: Torch cannot switch to it.
    """
    AttentionInterface.register(name, document_attention)
    AttentionMaskInterface.register(name, document_mask)
    if name in SWITCHED:
        try:
            with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns of each operator that it overrides
                torch.nn.attention.activate_flash_attention_impl(SWITCHED[name])
        except Exception as error:  # whatever the package does when it is imported
            raise ModelError(
                f"model.attn_implementation={name}: torch cannot switch to FlashAttention-{name[-1]} ({type(error).__name__}: "
                f"{' '.join(str(error).split())}). Set it to {NAME}."
            ) from None


def running_switch() -> str | None:
    """Which FlashAttention torch runs instead of its own: FA3, FA4, or None. Older torch cannot switch."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current() if current else None


def document_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask for padded batches and a cache; for a row without padding none is made, boundaries and window say the same.

    transformers calls it before the first layer. Arguments are those of its `sdpa_mask`.

    Returns:
        Bool, [batch, 1, queries, keys], True where a query sees a key. None: causal, within documents.
    """
    one_row = kwargs["batch_size"] == 1 and kwargs["q_length"] == kwargs["kv_length"]
    if kwargs.get("attention_mask") is None and one_row:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, of each token to its own document.

    Args:
        module: The layer's attention.
        query: [1, heads, T, head_dim].
        key: [1, heads or a divisor of them, T, head_dim].
        value: As key.
        attention_mask: From document_mask; given for what is not packed.
        dropout: Of attention weights; must be 0 for packed documents.
        scaling: Factor of the scores; None for 1 / sqrt(head_dim).
        sliding_window: Tokens that a query sees, itself included; None for all before it.
        cu_seq_lens_q: int32, [documents + 1], first token of each document and T.
        max_length_q: Tokens of the longest document.
        kwargs: What transformers hands on besides; `position_ids` serve where boundaries are not given.

    Returns:
        [1, T, heads, head_dim], and None for the attention weights.

    Raises:
        ValueError: What this function cannot compute: dropout, softcapping, sinks, attention to later tokens, a mask of its own.
    """
    if cu_seq_lens_q is None and attention_mask is None:
        cu_seq_lens_q, max_length_q = _boundaries(kwargs.get("position_ids"), query, sliding_window)
    if cu_seq_lens_q is None:
        output: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return output, None
    _check(module, query, attention_mask, dropout, kwargs)
    # Rotary embeddings in fp32 leave query and key in fp32 beside a bf16 value under autocast.
    states = query.to(value.dtype), key.to(value.dtype), value
    if max_length_q is None:
        max_length_q = int(cu_seq_lens_q.diff().max())
    window = sliding_window if sliding_window and sliding_window < max_length_q else None
    if value.dtype in IN_ONE_KERNEL.get(value.device.type, ()):
        return _in_one_kernel(states, cu_seq_lens_q, max_length_q, scaling, window), None
    return _one_by_one(states, cu_seq_lens_q.tolist(), scaling, window), None


def _boundaries(
    position_ids: torch.Tensor | None, query: torch.Tensor, window: int | None
) -> tuple[torch.Tensor | None, int | None]:
    """Where documents begin by their position ids, for callers without TRL's collator.

    None where there is one document only, unless a window is shorter: no mask says so then, and sdpa would not know.
    """
    length = query.shape[2]
    if query.shape[0] != 1 or length == 1:
        return None, None
    starts = torch.empty(0, dtype=torch.int64, device=query.device)
    if position_ids is not None and position_ids.numel() == length:
        starts = (position_ids.reshape(-1).diff() != 1).nonzero().flatten() + 1
    if not len(starts) and not (window and window < length):
        return None, None
    ends = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), length)])
    return ends.to(torch.int32), None


def _check(
    module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    problems = {
        "a batch of one flattened row, got several": query.shape[0] != 1,
        "no mask besides the documents' boundaries": mask is not None,
        "no dropout of attention weights (attention_dropout)": bool(dropout),
        "no softcapping of scores": kwargs.get("softcap") is not None,
        "no attention sinks": kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None,
        "causal attention": not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False,
    }
    for problem, applies in problems.items():
        if applies:
            raise ValueError(
                f"attn_implementation=varlen takes {problem}. Set model.attn_implementation to sdpa or eager."
            )


def _in_one_kernel(
    states: tuple[torch.Tensor, ...], boundaries: torch.Tensor, longest: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    """FlashAttention over all documents; heads stay grouped. The kernel counts the tokens to the left without the query's own."""
    left = window - 1 if window else -1
    flat = [one.squeeze(0).transpose(0, 1) for one in states]
    output: torch.Tensor = _KERNEL(
        *flat, boundaries, boundaries, longest, longest, scale=scaling, window_size=(left, 0), **_GROUPED
    )
    return output.unsqueeze(0)


def _one_by_one(
    states: tuple[torch.Tensor, ...], boundaries: list[int], scaling: float | None, window: int | None
) -> torch.Tensor:
    """sdpa on each document."""
    lengths = [end - start for start, end in pairwise(boundaries)]
    outputs = []
    # split, not slices: the gradient of each slice would be a tensor of all documents.
    for q, k, v in zip(*(torch.split(one, lengths, dim=2) for one in states), strict=True):
        length, mask = q.shape[2], None
        if window and window < length:
            # True for the last `window` tokens up to the query's own.
            full = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = full.tril() & full.triu(1 - window)
        grouped = q.shape[1] != k.shape[1]
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()
