"""Choose the next trial of auto-tuning and the fastest that fits, and keep the result for the plan. Imports no torch.

sft/launch/auto_tune.py starts the ranks that measure. A result is found again by a hash over what moves time or memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.files import write_json
from sft.plan.batch import divisors
from sft.plan.job import Job
from sft.plan.plan import TuningResult
from sft.run.record import installed_versions

EXIT_DID_NOT_FIT = 75  # exit status of a rank that ran out of memory
PASSES = 4  # micro-batches of a trial: one to warm up, the last with the optimizer's step, and those between are timed
LARGEST_SHARE = 0.92  # of a device's memory; the rest is for fragments, and for steps whose tokens fall differently
_SECONDS = 300.0  # no trial begins after so much measured time
_FASTER = 0.02  # times that differ by less count as equal

_FOLLOWS = """
    gradient_checkpointing micro_batch_size gradient_accumulation_steps empty_sequences_per_step learning_rate memory
    documents_per_step trained_tokens_per_step steps_per_epoch max_steps warmup_steps time disk
""".split()
"""Decisions of the plan that are tuned, or that move neither time nor memory of a forward and backward pass."""

Mode = bool | int | str
"""A value of train.gradient_checkpointing: true, false, every so many layers, or `selective`."""


@dataclass(frozen=True)
class Trial:
    """One way to compute a step, and what it took on the rank that took most."""

    gradient_checkpointing: Mode
    micro_batch_size: int
    seconds: float = 0.0
    """Until it was measured, first pass included."""
    seconds_per_token: float | None = None
    """Of a forward and backward pass, for each token that is no padding, on one rank. None: it did not fit, or was not measured."""
    used: int = 0
    """Bytes on the device at most, by this process and everything else there."""

    @property
    def name(self) -> str:
        """As a person reads it.

        >>> Trial(2, 8).name
        'checkpointing every 2 layers, micro-batch 8'
        """
        mode = self.gradient_checkpointing
        if isinstance(mode, bool):
            which = "checkpointing every layer" if mode else "no checkpointing"
        else:
            which = f"{mode} checkpointing" if isinstance(mode, str) else f"checkpointing every {mode} layers"
        return f"{which}, micro-batch {self.micro_batch_size}"

    def fits(self, limit: float) -> bool:
        """Whether it ran within so many bytes."""
        return self.seconds_per_token is not None and self.used <= limit


def is_tuned(job: Job) -> bool:
    """Whether the recipe leaves one of the two `auto`, and neither a DeepSpeed file nor the number of stages decides it."""
    train, config = job.recipe.train, job.deepspeed.config if job.deepspeed else {}
    if train.pipeline_parallel_size > 1:
        return False
    decided = (config.get(key, "auto") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    return "auto" in (train.micro_batch_size, train.gradient_checkpointing) and {*decided} == {"auto"}


def choices(job: Job) -> tuple[list[Mode], list[int]]:
    """Ways to checkpoint, those of least memory first, and micro-batch sizes from the smallest."""
    train, share = job.recipe.train, ceil(job.plan.global_batch_size.value / job.plan.data_parallel_ranks.value)
    modes: list[Mode] = [True, 2, False]
    if train.gradient_checkpointing != "auto":
        modes = [train.gradient_checkpointing]
    return modes, divisors(share) if train.micro_batch_size == "auto" else [train.micro_batch_size]


def next_trial(modes: Sequence[Mode], sizes: Sequence[int], measured: Sequence[Trial], limit: float) -> Trial | None:
    """What to measure next, or None when the search is over.

    A way to checkpoint is given up when a larger micro-batch does not fit, is not expected to, or is no faster.
    """
    if sum(one.seconds for one in measured) > _SECONDS:
        return None
    known = {one.name: one for one in measured}
    for place, mode in enumerate(modes):
        before: list[Trial] = []
        for size in sizes:
            trial = Trial(mode, size)
            found = known.get(trial.name)
            if found is None:
                lighter = [known.get(Trial(other, size).name) for other in modes[:place]]
                if any(one and not one.fits(limit) for one in lighter) or _expected_use(before, size) > limit:
                    break
                return trial
            if not found.fits(limit) or (before and not _is_faster(found, before[-1])):
                break
            before.append(found)
    return None


def _is_faster(one: Trial, other: Trial) -> bool:
    return (one.seconds_per_token or 0.0) <= (other.seconds_per_token or 0.0) * (1 - _FASTER)


def _expected_use(smaller: Sequence[Trial], size: int) -> float:
    """Bytes on the line through the last two smaller micro-batches; 0 if nothing is known."""
    if len(smaller) < 2:
        return 0.0
    one, two = smaller[-2:]
    growth = (two.used - one.used) / (two.micro_batch_size - one.micro_batch_size)
    return two.used + growth * (size - two.micro_batch_size)


def choose(measured: Sequence[Trial], limit: float) -> Trial | None:
    """The fastest trial that fits; of several as fast, the one that takes least memory. If none fits, the one that used least."""
    fitting = [one for one in measured if one.fits(limit)]
    if not fitting:
        return min(
            (one for one in measured if one.seconds_per_token is not None), key=lambda one: one.used, default=None
        )
    best = min((one.seconds_per_token or 0.0 for one in fitting), default=0.0)
    as_fast = [one for one in fitting if (one.seconds_per_token or 0.0) <= best * (1 + _FASTER)]
    return min(as_fast, key=lambda one: one.used, default=None)


def read_journal(file: Path) -> list[Trial]:
    """What the ranks have measured so far, in order; a trial that any rank had no memory for did not fit."""
    found: dict[str, Trial] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with suppress(ValueError, TypeError):  # a line that was being written when its process ended
            trial = Trial(**json.loads(line))
            if trial.name not in found or trial.seconds_per_token is None:
                found[trial.name] = trial
    return list(found.values())


def longest_first(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the prepared sequences, most tokens first and of those the most squares of document lengths; and their tokens."""
    index, documents = SequenceIndex.load(folder / "train.npz"), DocumentStore.open(folder).documents
    lengths = documents["length"][index.members].astype(np.int64)
    starts = np.concatenate([[0], index.ends[:-1]])
    tokens, squares = np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts)
    order = np.lexsort((-squares, -tokens))
    return order, tokens[order]


def result_file(job: Job, prepared: Prepared) -> Path:
    """<output_dir>/.prepared/search/<key>.json; the key is a hash over what moves time or memory."""
    recipe, gpu = job.recipe, job.hardware.gpu
    config = Path(job.model.path) / "config.json"
    parts = {
        "model": [job.model.path, job.model.commit, config.read_text() if config.is_file() else None],
        "lora": recipe.model.lora.model_dump(mode="json") if recipe.model.lora else None,
        "new_tokens": len(recipe.model.new_tokens),
        "plan": {one["name"]: one["value"] for one in job.plan.decisions() if one["name"] not in _FOLLOWS},
        "deepspeed": job.deepspeed.config if job.deepspeed else None,
        "fsdp": job.fsdp.model_dump(mode="json") if job.fsdp else None,
        "stated": [recipe.train.micro_batch_size, recipe.train.gradient_checkpointing, recipe.train.trainer_args],
        "lengths": [recipe.data.packing, recipe.sequence_length, int(longest_first(prepared.folder)[1][0])],
        "device": asdict(gpu) if gpu else [job.hardware.cpu_cores, job.hardware.cpu_memory_gib],
        "ranks": [job.hardware.ranks, job.hardware.ranks_per_node],
        "packages": installed_versions(),
    }
    key = sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return prepared.folder.parent / "search" / f"{key}.json"


def write_result(file: Path, device: str, limit: float, measured: Sequence[Trial], failed: str = "") -> None:
    """Write what was chosen, and all that was measured."""
    chosen = choose(measured, limit) if not failed else None
    why = failed or ("" if chosen else "nothing that was tried fits")
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "limit": int(limit), "chosen": asdict(chosen) if chosen else None, "failed": why}
    write_json(file, content | {"measured": [asdict(one) for one in measured]})


def find_result(job: Job, prepared: Prepared) -> TuningResult | None:
    """What was tuned for this job on this machine, or None if nothing was."""
    if not is_tuned(job):
        return None
    try:
        content: dict[str, Any] = json.loads(result_file(job, prepared).read_text(encoding="utf-8"))
        if content["chosen"] is None:
            return TuningResult(None, None, f"auto-tuning on this machine found no setting ({content['failed']})")
        chosen, tried = Trial(**content["chosen"]), len(content["measured"])
        speed, limit = round(1 / chosen.seconds_per_token), content["limit"] / 2**30  # type: ignore[operator]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TuningResult(
        chosen.gradient_checkpointing,
        chosen.micro_batch_size,
        f"auto: measured on this machine, the fastest of {tried} trials: {speed} tokens/s on the longest sequences, "
        f"{chosen.used / 2**30:.1f} GiB of the {limit:.1f} GiB that may be used",
    )
