"""Chooses the numbers of a first recipe from the lengths of the rows, the model and the machine, each with its reason."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from sft.data.packing import pack
from sft.hub.model_facts import ModelFacts
from sft.init.draft import Draft
from sft.init.own_task import EvalSplit, pairs
from sft.init.rows import Rows
from sft.init.tokens import Tokenized
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
_PROMPTS, _LONGEST_PROMPT = 4, 200
"""Prompts to answer after training, and characters of the longest."""


@dataclass(frozen=True)
class Size:
    """How much there is to train on."""

    rows: int
    """About as many rows as the training has."""

    is_exact: bool
    sample: Tokenized

    @property
    def scale(self) -> float:
        """Rows of the training for each row of the sample."""
        return self.rows / len(self.sample.lengths)

    @property
    def words(self) -> str:
        """The number of rows, in words."""
        return f"{'' if self.is_exact else 'about '}{self.rows:,} row{'s' if self.rows > 1 else ''}"


def choose_length(draft: Draft, size: Size, model: ModelFacts) -> None:
    """max_length, and what becomes of longer rows."""
    lengths, count = np.sort(size.sample.lengths), len(size.sample.lengths)
    longest, most = int(lengths[-1]), int(lengths[ceil(0.99 * count) - 1])
    wanted = longest if longest <= 1.5 * most else most
    limit = min(model.max_position_embeddings or 4096, _LONGEST)
    value = min(_rounded(wanted), limit)
    p95 = int(lengths[ceil(0.95 * count) - 1])
    shown = f"95 of 100 rows have at most {p95:,} tokens, the longest has {longest:,}"
    if _rounded(wanted) > limit:
        is_models = limit == model.max_position_embeddings
        shown += f"; the model has {limit:,} positions" if is_models else f"; no more than {limit:,} is chosen here"
    draft.put("data.max_length", value, shown)
    value = draft.recipe().data.max_length
    over, headless = float(np.mean(lengths > value)), float(np.mean(size.sample.first_targets >= value))
    longer = f"{np.sum(lengths > value):,} of {count:,} rows are longer than max_length"
    if over > 0.02 and headless > 0.05:
        draft.put("data.overlong", "split", f"{longer}, many with their answer behind it: they are cut into pieces")
    elif over > 0.02:
        draft.put("data.overlong", "truncate", f"{longer}: their ends are cut off")
    elif over:
        draft.put("data.overlong", "drop", f"{longer} and left out; truncate or split keeps them")


def _rounded(length: int) -> int:
    unit = 64 if length <= 1024 else 256 if length <= 8192 else 1024
    return max(64, ceil(length / unit) * unit)


def choose_weights(draft: Draft, hardware: Hardware, model: ModelFacts) -> None:
    """All weights or adapters, the engine, and the learning rate."""
    parameters = model.parameters or 0
    size = f"{parameters / 1e9:.2g} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.3g} million"
    names_engine = draft.has("train.deepspeed", "train.fsdp")
    if hardware.ranks > 1 and not names_engine:
        draft.put("train.parallel", "auto", "the cheapest engine that fits, on any number of GPUs")
    if hardware.gpu is None:
        full, why = parameters <= CPU_PARAMETERS, f"{size} weights on a CPU"
    else:
        full = _fits(draft, hardware, model)
        why = f"by arithmetic {hardware.device} cannot hold all {size} weights with their optimizer"
    if not full:
        draft.put("model.lora", {"r": 16, "lora_alpha": 32}, f"adapters: {why}")
    if not (full or _fits(draft, hardware, model)):
        _quantize(draft, hardware, model)
    if hardware.gpu is not None and not names_engine and not _fits(draft, hardware, model):
        draft.put("train.parallel", "auto", "moves to the CPU what the GPU cannot hold")
    if draft.recipe().model.lora is not None:
        draft.put("train.learning_rate", _LORA_RATE, "adapters usually take 1e-4 to 5e-4")
    else:
        rate = next(rate for least, rate in _FULL_RATES if parameters >= least)
        reason = f"all {size} weights are trained; models of a billion usually take 1e-6 to 5e-5, smaller ones more"
        draft.put("train.learning_rate", rate, reason)


def _quantize(draft: Draft, hardware: Hardware, model: ModelFacts) -> None:
    """Keep the base in 4 bits, if the adapters fit beside it then."""
    if draft.recipe().model.lora is None or model.quantization or not model.linear_parameters:
        return
    smaller = copy(draft)
    smaller.decisions = dict(draft.decisions)
    reason = "QLoRA: the base in 4 bits, since adapters beside it in 16 bits do not fit either"
    smaller.put("model.quantization", "nf4", reason)
    if _fits(smaller, hardware, model):
        draft.decisions = smaller.decisions


def _fits(draft: Draft, hardware: Hardware, model: ModelFacts) -> bool:
    """Whether the machine holds it without moving anything to the CPU; yes where that is not known."""
    if hardware.gpu is None or not model.parameters:
        return True
    name, _ = first_that_fits(draft.recipe(), hardware, model)
    return name is not None and "offload" not in name


def choose_steps(draft: Draft, size: Size, ranks: int) -> int:
    """Batch, epochs and packing, so that there are enough optimizer steps; and what is written on the way. Returns the steps."""
    data = draft.recipe().data
    used = np.minimum(size.sample.lengths, data.max_length)
    packs = max(1, round(len(pack(used, data.pack_length or data.max_length)[1]) * size.scale))
    epochs = 3 if size.rows < 10_000 else 2 if size.rows < 100_000 else 1
    draft.put("train.num_train_epochs", epochs, f"{size.words}; watch the eval loss: where it rises, fewer are better")
    passes = draft.recipe().train.num_train_epochs
    if packs * passes < FEW_STEPS * ranks < size.rows * passes * 2 and packs < size.rows:
        draft.put("data.packing", False, f"the rows fill only {packs} packs; one row a sequence gives more steps")
    packed = draft.recipe().data.packing
    sequences, unit = (
        (packs, f"packs of {data.pack_length or data.max_length:,} tokens") if packed else (size.rows, "rows")
    )
    batch = ranks
    while batch * 2 <= min(_LARGEST_BATCH, sequences * passes / _STEPS):
        batch *= 2
    if not draft.has("train.global_batch_size", "train.global_batch_tokens"):
        steps = ceil(passes * ceil(sequences / batch))
        few = "; the data is small, so there are few" if steps < FEW_STEPS else ""
        reason = f"{unit}; {sequences:,} of them x {passes:g} epochs / {batch} = about {steps:,} optimizer steps{few}"
        draft.put("train.global_batch_size", batch, reason)
    recipe = draft.recipe()
    steps = recipe.train.max_steps or ceil(passes * ceil(sequences / recipe.sequences_per_step))
    draft.put("train.warmup_steps", steps // 20, f"a twentieth of about {steps:,} steps")
    every = max(1, steps // 10)
    draft.put("train.save_steps", max(every, 50), "a checkpoint to resume from")
    if draft.recipe().data.held_out is not None:
        draft.put("train.eval_steps", every, "the eval loss about ten times")
    draft.put("train.logging_steps", max(1, min(10, steps // 20)))
    return steps


def choose_chat(draft: Draft, split: EvalSplit, rows: Rows, sample: Tokenized) -> None:
    """The prompts that base and tuned model answer after training: some of the held-out questions."""
    if rows.format in ("text", "tokens"):
        return
    questions = [pair.question for pair in pairs(split.rows, rows, draft.recipe().data)]
    short = [question for question in questions if "\n" not in question and len(question) <= _LONGEST_PROMPT]
    prompts = list(dict.fromkeys(short))[:_PROMPTS]
    longest = int(np.percentile(sample.trained, 95))
    chat: dict[str, Any] = {"prompts": prompts} if prompts else {}
    what = "held-out questions that base and tuned model answer after the training; " if chat else ""
    length = min(512, max(32, 2 * longest))
    draft.put(
        "eval.chat", chat | {"max_new_tokens": length}, f"{what}95 of 100 rows have at most {longest:,} tokens to train"
    )
