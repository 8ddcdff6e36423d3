"""Noise on the embeddings (NEFTune) and smoothed labels, in training passes only: probes and the eval loss are without them.

Both are ours. transformers' noise takes the length of the row, which packing makes that of all packs of a micro-batch: it would be weaker
than on each document alone, and change with the micro-batch. TRL's smoothing runs a second forward pass, and goes with TRL 2.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from sft.data.formats import IGNORED


class NoisyEmbeddings:
    """NEFTune (Jain et al. 2023, https://arxiv.org/abs/2310.05914): adds uniform noise within +-alpha / sqrt(length x hidden size).

    The length is that of a token's own document.

    Args:
        embeddings: The model's input embeddings.
        alpha: 5 to 15 are usual.
    """

    def __init__(self, embeddings: torch.nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: torch.Tensor | None = None
        embeddings.register_forward_hook(self._add)

    def expect(self, inputs: dict[str, Any]) -> None:
        """Take the lengths of the documents in the next batch, packed or padded."""
        if "cu_seq_lens_q" in inputs:
            counts = inputs["cu_seq_lens_q"].diff().long()
            tokens = inputs["input_ids"].numel()
            self._lengths = counts.repeat_interleave(counts, output_size=tokens).view(inputs["input_ids"].shape)
        else:
            self._lengths = inputs["attention_mask"].sum(1, keepdim=True)

    def _add(self, module: torch.nn.Module, arguments: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        assert self._lengths is not None, "each training pass is announced"
        bound = self.alpha / (self._lengths * embedded.shape[-1]).float().sqrt()
        noise = torch.rand_like(embedded, dtype=torch.float32).mul_(2).sub_(1) * bound[..., None]
        return embedded + noise.to(embedded.dtype)


def noise_of(model: Any) -> float | None:
    """The alpha of the noise that the live embeddings add; None without."""
    hooks = model.get_input_embeddings()._forward_hooks.values()
    return next(
        (hook.__self__.alpha for hook in hooks if isinstance(getattr(hook, "__self__", None), NoisyEmbeddings)), None
    )


def smoothed(model: Any, inputs: dict[str, Any], factor: float) -> SimpleNamespace:
    """A forward pass with all logits, under the names of TRL's fused head, for the target tokens only.

    `log_probs` are (1 - factor) x that of the target + factor x the mean over the vocabulary.
    """
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits
    labels = inputs["labels"][..., 1:]
    is_target = labels != IGNORED
    log_probs = functional.log_softmax(logits[..., :-1, :][is_target].float(), dim=-1)
    of_target = log_probs.gather(-1, labels[is_target][:, None]).squeeze(-1)
    mixed = (1 - factor) * of_target + factor * log_probs.mean(-1)
    return SimpleNamespace(log_probs=mixed, label_mask=is_target)
