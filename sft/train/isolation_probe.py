"""Probes on the live model, before step 1, that the documents of a batch do not see each other (promise: packed equals separate).

A few short documents of the run go through the trainer's own collator, attention and loss, and the hidden states that reach the output
head are compared. That takes a few forward passes over about a hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from trl import SFTTrainer

from sft.data.formats import IGNORED
from sft.errors import PlanError
from sft.model.live import arithmetic, evaluating, unwrapped
from sft.parallel.process_group import gather
from sft.train.batches import Sequences

DOCUMENTS, LONGEST = 4, 32

# Relative to the norm of the hidden states. In the same kernels a row does not depend on the rows beside it at all; the limit leaves room
# for kernels that sum in no fixed order. Experts get other rows, and so kernels of other shapes, as does a document that is alone.
MOVED = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
MOVED_BY_EXPERTS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
DIFFER = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 5e-2}


@dataclass(frozen=True)
class Probe:
    """What was measured."""

    moved: float
    """Largest relative change of a document's hidden states when another document is changed."""

    differ: float
    """Largest relative difference of a document in the batch from itself alone."""

    attention_calls: dict[str, int]
    """Calls of each attention function in one pass, without the model's own, `eager`."""

    use_cache: bool
    head_called: bool
    """Whether logits of all tokens were computed; TRL's fused head uses the head's weight and never calls it."""

    dtype: torch.dtype
    """In which the hidden states are computed."""

    experts: bool
    """Whether tokens are routed to experts."""

    finite_alone: bool = True
    """Whether the hidden states of each document alone, through plain attention, are finite."""


def sample_documents(sequences: Sequences) -> list[np.ndarray]:
    """The first LONGEST token ids of a few documents; none of a single token."""
    store, index = sequences.store, sequences.index
    found: list[np.ndarray] = []
    for sequence in range(len(index)):
        for document in index.of(sequence):
            tokens = np.asarray(store.document(document)[0][:LONGEST], dtype=np.int64)
            if len(tokens) > 1:
                found.append(tokens)
            if len(found) == DOCUMENTS:
                return found
    return found * DOCUMENTS if len(found) == 1 else found


def probe(trainer: SFTTrainer, documents: list[np.ndarray], packed: bool) -> Probe:
    """Measure on the live model, with two or more documents in a pack or a padded batch. Every rank takes part, with the same documents."""
    changed = (len(documents) - 1) // 2
    altered = list(documents)
    altered[changed] = _other_tokens(documents, changed)
    with evaluating(trainer):
        with recorded_attention() as calls:
            together = _one_pass(trainer, documents, packed)
        after = _one_pass(trainer, altered, packed)
        with _plain_attention(trainer):
            alone = [_one_pass(trainer, [document], packed).states[0] for document in documents]
    moved = [_distance(*pair) for pair in zip(after.states, together.states, strict=True)]
    config = unwrapped(trainer).config.get_text_config()
    differ = [_distance(*pair) for pair in zip(together.states, alone, strict=True)]
    # Of all ranks: a pipeline stage sees the states that leave it.
    figures = gather((np.max(moved[:changed] + moved[changed + 1 :]), np.max(differ), _all_finite(alone)))
    return Probe(
        # NaN where one of them is NaN.
        moved=float(np.max([one[0] for one in figures])),
        differ=float(np.max([one[1] for one in figures])),
        attention_calls=calls,
        use_cache=together.use_cache,
        head_called=together.head_called,
        dtype=arithmetic(trainer),
        experts=any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")),
        finite_alone=all(one[2] for one in figures),
    )


def check_probe(found: Probe, attention: str, packed: bool) -> None:
    """Refuse to train where documents see each other, or differ from what they are alone: a PlanError names the setting to change."""
    if not found.finite_alone:
        raise PlanError(
            f"The initial weights give hidden states that are not finite (NaN or infinite) in {found.dtype}. In float16 they may overflow: "
            "set train.precision=fp32, or bf16 where the GPU has it. If the run resumes, it had diverged before the checkpoint was "
            "written: remove the newest checkpoints, or start a new run with train.resume=never, and lower train.learning_rate. "
            "Nothing was trained."
        )
    where, remedy = "padded batch", "Set another model.attn_implementation: sdpa or eager"
    if packed:
        where, remedy = "pack", "Set data.packing=false, or another model.attn_implementation"
    limit = (MOVED_BY_EXPERTS if found.experts else MOVED)[found.dtype]
    if not found.moved <= limit:
        raise PlanError(
            f"The documents of a {where} see each other: changing one moved the hidden states of another by {found.moved:.1%} "
            f"(noise in this dtype is below {limit:.3%}). attn_implementation={attention} does not isolate them on this model. {remedy}. "
            "Nothing was trained."
        )
    if not found.differ <= DIFFER[found.dtype]:
        raise PlanError(
            f"A document in a {where} is not what it is alone: its hidden states differ by {found.differ:.1%} (noise in this dtype is "
            f"below {DIFFER[found.dtype]:.1%}). attn_implementation={attention} computes something else on this model. {remedy}. Nothing "
            "was trained."
        )


@dataclass
class _Pass:
    """What a forward pass showed."""

    states: list[torch.Tensor] = field(default_factory=list)
    """The output head's input for each document, fp32 [length, hidden]."""

    use_cache: bool = False
    head_called: bool = False


def _one_pass(trainer: SFTTrainer, documents: list[np.ndarray], packed: bool) -> _Pass:
    """Run collator, model and loss as in training."""
    lengths = [len(document) for document in documents]
    # Labels of all tokens but the first, as in training.
    rows: list[dict[str, Any]] = [
        {"input_ids": document, "labels": np.concatenate([[IGNORED], document[1:]])} for document in documents
    ]
    if packed:
        joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        rows = [joined | {"seq_lengths": lengths}]
    seen = _Pass()

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.states = list(output[0].detach().float())
        seen.use_cache = bool(kwargs.get("use_cache", module.config.use_cache))

    def called(module: Any, args: Any) -> None:
        seen.head_called = True

    backbone = unwrapped(trainer).base_model
    hooks = [backbone.register_forward_hook(keep, with_kwargs=True)]
    hooks.append(unwrapped(trainer).get_output_embeddings().register_forward_pre_hook(called))
    try:
        trainer.compute_loss(trainer.model_wrapped, trainer._prepare_inputs(trainer.data_collator(rows)))
    finally:
        for hook in hooks:
            hook.remove()
        trainer._metrics["eval"].clear()
    if packed:
        # Padding that the collator appends (pad_to_multiple_of) is no document.
        seen.states = list(torch.split(seen.states[0][: sum(lengths)], lengths))
    else:
        seen.states = [row[:length] for row, length in zip(seen.states, lengths, strict=True)]
    return seen


def _other_tokens(documents: list[np.ndarray], changed: int) -> np.ndarray:
    """For each token of a document the next one of those that occur in any."""
    # And one more that every vocabulary has, in case all tokens are the same.
    known = np.union1d(np.concatenate(documents), [abs(int(documents[0][0]) - 1)])
    return known[(np.searchsorted(known, documents[changed]) + 1) % len(known)]


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN where a state is NaN."""
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


@contextmanager
def _plain_attention(trainer: SFTTrainer) -> Iterator[None]:
    """Compute with the model's own attention, the reference for documents alone."""
    model = unwrapped(trainer)
    running = model.config.get_text_config()._attn_implementation
    if running in ("sdpa", "eager"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(running)


@contextmanager
def recorded_attention() -> Iterator[dict[str, int]]:
    """Count the calls of transformers' attention functions by name. A model's own, `eager`, is not in its table."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: dict[str, int] = {}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    # The interface's local mapping precedes the registered functions. DeepSpeed's sequence parallelism is in it, too.
    local = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = dict(local)
    for name in [*ALL_ATTENTION_FUNCTIONS.valid_keys()]:
        ALL_ATTENTION_FUNCTIONS[name] = counted(name, ALL_ATTENTION_FUNCTIONS[name])
    try:
        yield calls
    finally:
        local.clear()
        local.update(before)
