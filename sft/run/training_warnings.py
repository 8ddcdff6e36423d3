"""Judges a training by its numbers, as a colleague who looks at the curve would.

Each function returns a sentence for `Run.warn`, or None if nothing stands out. docs/metrics.md explains the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

_ENOUGH_LINES = 8  # of metrics.jsonl, to estimate their noise
_CLEAR = 0.2  # fraction by which the loss must rise if there are fewer lines


def first_loss(loss: float | None, vocabulary: int, untrained: bool) -> str | None:
    """Compare the loss of the first batch, before any update, with the loss of guessing among all tokens."""
    guessing = math.log(vocabulary)
    if loss is None or untrained or loss < 0.98 * guessing:
        return None
    return (
        f"The first batch has a loss of {loss:.2f} before any update; guessing among {vocabulary:,} tokens gives {guessing:.2f}. Weights "
        "and tokenizer may not belong together, or the model knows nothing of this language or format. Check the files of "
        "model.name_or_path, and look at the rows with --show 3."
    )


def weights_moved(change: float) -> str | None:
    """Judge how far the training has moved the weights."""
    if change > 1e-8:
        return None
    return (
        f"The training has not moved the weights: they differ from the start by {change:.0e} of their norm, so final/ is the base model. "
        "Check train.learning_rate, train.warmup_steps, train.adam_epsilon and train.max_grad_norm, and that the weights are "
        "not all zero."
    )


def loss_course(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Compare the first and the last quarter of the training loss."""
    points = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    if len(points) < 2:
        return None
    part = max(1, len(points) // 4)
    first, last = ([loss for _, loss in some] for some in (points[:part], points[-part:]))
    start, end = fmean(first), fmean(last)
    if len(points) < _ENOUGH_LINES:
        rose, fell = end > start * (1 + _CLEAR), True
    else:
        noise = 2 * math.hypot(*(stdev(some) / math.sqrt(part) for some in (first, last)))
        rose, fell = end - start > noise, end < start
    of = f"{start:.4f} over the first {part} logged lines, {end:.4f} over the last {part}"
    if part == 1:
        of = f"{start:.4f} at step {points[0][0]}, {end:.4f} at step {points[-1][0]}"
    if rose:
        return f"The loss ended above its start: {of}. Lower train.learning_rate, or look at the rows with --show 3."
    if not fell:
        return f"The loss did not fall: {of}. Train longer, with another train.learning_rate, or look at the rows with --show 3."
    return None


def eval_loss_course(before: float | None, losses: Sequence[float]) -> str | None:
    """Compare the eval loss at the end with its start and its minimum."""
    known = [one for one in (before, *losses) if one is not None]
    if len(known) < 2:
        return None
    end, least = known[-1], min(known)
    if before is not None and end > before * 1.01:
        return (
            f"The eval loss ended above its start: {before:.4f} before step 1, {end:.4f} at the end. The model got worse on rows "
            "it was not trained on. Lower train.learning_rate, or train for fewer epochs."
        )
    if end > least * 1.05:
        return f"The eval loss rose again: minimum {least:.4f}, {end:.4f} at the end. The model overfits; train for fewer epochs."
    return None
