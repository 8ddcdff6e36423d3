"""The loss of a micro-batch, TRL's own, without its figures being read at each.

TRL gathers four figures from all ranks for each micro-batch and reads them at once, so that no rank can prepare the backward pass
while its GPU still computes the forward pass. Here they add up where they are, and are read when a line is logged. One wait stays
on a GPU: the fused head takes the labelled tokens only, and has to know how many there are.
"""

from __future__ import annotations

from typing import Any

import torch


def is_plain(trainer: Any) -> bool:
    """Whether the loss is the mean negative log-likelihood and nothing besides, so that plain_loss is TRL's."""
    return (
        trainer.args.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and not trainer.aux_loss_enabled
        and not getattr(trainer.accelerator.parallelism_config, "cp_enabled", False)
    )


def plain_loss(trainer: Any, model: Any, inputs: dict[str, Any], tokens_in_step: Any) -> tuple[torch.Tensor, Any]:
    """Negative log-likelihood of the micro-batch's labels, over the labels of the whole step.

    Args:
        trainer: Its arguments and the number of ranks.
        model: The engine, or the model itself.
        inputs: From the collator, on the device.
        tokens_in_step: Labels of all micro-batches of all ranks; None for those of these inputs.

    Returns:
        The loss, scaled so that what the engine makes of the ranks' gradients is the step's; and the fused head's output.
    """
    # A cache would keep documents of a pack from being told apart.
    outputs = model(**inputs, use_cache=False, fused_lm_head=True)
    tokens = outputs.label_mask.sum() if tokens_in_step is None else torch.as_tensor(tokens_in_step)
    loss = -outputs.log_probs.sum() / tokens.clamp(min=1)
    if tokens_in_step is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.gradients_divided_by
    return loss, outputs


class Tally:
    """Labels, entropy and right first guesses since the last line, on the device."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, outputs: Any) -> None:
        """Count a micro-batch."""
        parts = [outputs.label_mask, outputs.entropy.detach(), outputs.is_top1]
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, accelerator: Any) -> dict[str, list[float]]:
        """The means over all ranks since the last call, under TRL's names; nothing where nothing was counted."""
        if self._sums is None:
            return {}
        labels, entropy, right = accelerator.reduce(self._sums, reduction="sum").tolist()
        self._sums = None
        return {"entropy": [entropy / max(labels, 1)], "mean_token_accuracy": [right / max(labels, 1)]}
