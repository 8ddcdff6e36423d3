"""Chooses the numbers of a first recipe from the lengths of the rows, the model and the machine, each with its reason."""

from __future__ import annotations

from math import ceil

import numpy as np

from sft.hub.model_facts import ModelFacts
from sft.init.draft import Draft
from sft.plan.engine import first_that_fits
from sft.plan.hardware import Hardware
from sft.plan.warnings import CPU_PARAMETERS, FEW_STEPS

_LONGEST = 32_768
"""Tokens above which no row decides max_length by itself."""

_FULL_RATES = ((1e9, 1e-5), (1e8, 2e-5), (1e7, 1e-4), (0, 1e-3))
"""Learning rates for all weights, by the number of parameters: smaller models take larger ones."""

_LORA_RATE = 2e-4
_STEPS = 100
"""Optimizer steps that a run should at least have, where the data is large enough."""

_LARGEST_BATCH = 64


def choose_length(draft: Draft, lengths: np.ndarray, model: ModelFacts) -> None:
    """max_length, and what becomes of longer rows."""
    longest, p99, p95 = (int(np.percentile(lengths, at, method="higher")) for at in (100, 99, 95))
    wanted = longest if longest <= 1.5 * p99 else p99
    rounded = max(64, ceil(wanted / 64) * 64)
    limit = min(model.max_position_embeddings or 4096, _LONGEST)
    reason = f"95 of 100 rows have at most {p95:,} tokens, the longest has {longest:,}"
    draft.put("data.max_length", min(rounded, limit), reason + (f"; the limit is {limit:,}" if rounded > limit else ""))
    longer = int(np.sum(lengths > draft.recipe().data.max_length))
    if longer > 0.02 * len(lengths):
        reason = f"{longer:,} of {len(lengths):,} rows are longer than max_length: they are cut into pieces"
        draft.put("data.overlong", "split", reason)


def choose_weights(draft: Draft, hardware: Hardware, model: ModelFacts) -> None:
    """All weights or adapters, the engine, and the learning rate."""
    parameters = model.parameters or 0
    size = f"{parameters / 1e9:.2g} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.3g} million"
    names_engine = draft.has("train.deepspeed", "train.fsdp")
    if hardware.ranks > 1 and not names_engine:
        draft.put("train.parallel", "auto", "the cheapest engine that fits, on any number of GPUs")
    is_full = parameters <= CPU_PARAMETERS if hardware.gpu is None else _fits(draft, hardware, model)
    if not is_full:
        where = "a CPU" if hardware.gpu is None else hardware.device
        reason = f"adapters: all {size} weights with their optimizer are too many for {where}"
        draft.put("model.lora", {"r": 16, "lora_alpha": 32}, reason)
        quantized = draft.copy()
        quantized.put("model.quantization", "nf4", "QLoRA: adapters beside the base in 16 bits do not fit either")
        can_quantize = draft.recipe().model.lora is not None and not model.quantization and model.linear_parameters
        if can_quantize and not _fits(draft, hardware, model) and _fits(quantized, hardware, model):
            draft.decisions = quantized.decisions
    if not names_engine and not _fits(draft, hardware, model):
        draft.put("train.parallel", "auto", "moves to the CPU what the GPU cannot hold")
    if draft.recipe().model.lora is not None:
        draft.put("train.learning_rate", _LORA_RATE, "adapters usually take 1e-4 to 5e-4")
    else:
        rate = next(rate for least, rate in _FULL_RATES if parameters >= least)
        reason = f"all {size} weights are trained; models of a billion usually take 1e-6 to 5e-5, smaller ones more"
        draft.put("train.learning_rate", rate, reason)


def _fits(draft: Draft, hardware: Hardware, model: ModelFacts) -> bool:
    """Whether the machine holds it without moving anything to the CPU; yes where that is not known."""
    if hardware.gpu is None or not model.parameters:
        return True
    name, _ = first_that_fits(draft.recipe(), hardware, model)
    return name is not None and "offload" not in name


def choose_steps(draft: Draft, lengths: np.ndarray, rows: int, ranks: int) -> int:
    """Batch, epochs and packing, so that there are enough optimizer steps; and what is written on the way. Returns the steps.

    Args:
        draft: The recipe so far.
        lengths: Tokens of the rows that were read.
        rows: About how many rows the training has.
        ranks: GPUs, or processes on a CPU.
    """
    recipe = draft.recipe()
    packs = ceil(np.minimum(lengths, recipe.data.max_length).mean() * rows / recipe.sequence_length)
    epochs = 3 if rows < 10_000 else 2 if rows < 100_000 else 1
    draft.put("train.num_train_epochs", epochs, f"{rows:,} rows; watch the eval loss: where it rises, fewer are better")
    passes = draft.recipe().train.num_train_epochs
    if packs * passes < FEW_STEPS * ranks and packs < rows:
        draft.put("data.packing", False, f"the rows fill only {packs} packs; one row a sequence gives more steps")
    sequences, unit = (packs, "packs") if draft.recipe().data.packing else (rows, "rows")
    batch = ranks
    while batch * 2 <= min(_LARGEST_BATCH, sequences * passes / _STEPS):
        batch *= 2
    if not draft.has("train.global_batch_size", "train.global_batch_tokens"):
        draft.put("train.global_batch_size", batch, f"about {sequences:,} {unit} x {passes:g} epochs")
    recipe = draft.recipe()
    steps = recipe.train.max_steps or ceil(passes * ceil(sequences / recipe.sequences_per_step))
    every = max(1, steps // 10)
    draft.put("train.warmup_steps", steps // 20, f"a twentieth of about {steps:,} optimizer steps")
    draft.put("train.save_steps", max(every, 50), "a checkpoint to resume from")
    if recipe.data.held_out is not None:
        draft.put("train.eval_steps", every, "the eval loss about ten times")
    draft.put("train.logging_steps", max(1, min(10, steps // 20)))
    return steps
