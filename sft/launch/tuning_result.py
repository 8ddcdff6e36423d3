"""What the search for micro-batch and checkpointing tries, how it chooses, and where its answer waits. Imports no torch.

sft/launch/auto_tune.py measures. An answer is found by a hash over everything that moves time or memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
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

FORMAT = 1
"""Raised when what is measured, or how it is chosen, changes."""

EXIT_DID_NOT_FIT = 75
"""Exit status of a process that ran out of memory while it measured."""

PASSES = 4
"""Of a candidate: one to warm up, the last with the optimizer's step, and those between are timed."""

SECONDS = 300.0
"""No candidate is begun after so much measured time."""

LARGEST_SHARE = 0.92
"""Of a GPU's memory: the rest is for fragments, and for steps whose tokens fall differently."""

_FASTER = 0.02
"""Two times that differ by less are the same."""

_FOLLOWS = {
    "gradient_checkpointing",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "empty_sequences_per_step",
    "learning_rate",
    "memory",
    "documents_per_step",
    "trained_tokens_per_step",
    "steps_per_epoch",
    "max_steps",
}
"""Decisions of the plan that the search makes, or that move neither time nor memory of a forward and backward pass."""

_PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "liger-kernel", "flash-attn")


@dataclass(frozen=True)
class Candidate:
    """One way to compute a step."""

    gradient_checkpointing: bool | int | str
    micro_batch_size: int

    @property
    def words(self) -> str:
        """As a person reads it.

        >>> Candidate(2, 8).words
        'checkpointing every 2 layers, micro-batch 8'
        """
        mode = self.gradient_checkpointing
        which = f"{mode} checkpointing" if isinstance(mode, str) else f"checkpointing every {mode} layers"
        if isinstance(mode, bool):
            which = "checkpointing every layer" if mode else "no checkpointing"
        return f"{which}, micro-batch {self.micro_batch_size}"


@dataclass(frozen=True)
class Measurement:
    """What a candidate took on the rank that took most; memory in bytes."""

    candidate: Candidate
    seconds: float
    """Until it was measured, first pass included."""

    seconds_per_token: float | None = None
    """Of a forward and backward pass, for each token that is no padding, on one rank. None: it did not fit."""

    used: int = 0
    """On the device at most, by this process and everything else there."""

    allocated: int = 0
    """By tensors at most."""

    at_rest: int = 0
    """By tensors between two steps: weights, gradients, the optimizer's state."""


def is_searched(job: Job) -> bool:
    """Whether the recipe leaves one of the two open, and no DeepSpeed file decides it."""
    train, config = job.recipe.train, job.deepspeed.config if job.deepspeed else {}
    decided = {config.get(key, "auto") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    return "auto" in (train.micro_batch_size, train.gradient_checkpointing) and decided == {"auto"}


def candidates(job: Job) -> tuple[list[bool | int | str], list[int]]:
    """Ways to checkpoint, those of least memory first, and micro-batches from the smallest."""
    train, share = job.recipe.train, ceil(job.plan.global_batch_size.value / job.plan.data_parallel_ranks.value)
    modes: list[bool | int | str] = [True, 2, False]
    if train.gradient_checkpointing != "auto":
        modes = [train.gradient_checkpointing]
    return modes, divisors(share) if train.micro_batch_size == "auto" else [train.micro_batch_size]


def next_candidate(
    modes: Sequence[bool | int | str], sizes: Sequence[int], measured: Sequence[Measurement], limit: float
) -> Candidate | None:
    """What to measure next, or None where the search is over.

    A way to checkpoint is left when a larger micro-batch does not fit, would not by what the smaller ones took, or is no
    faster.

    Args:
        modes: From candidates.
        sizes: Likewise.
        measured: So far.
        limit: Bytes that may be used on the device.
    """
    if sum(one.seconds for one in measured) > SECONDS:
        return None
    known = {_name(one.candidate): one for one in measured}
    for place, mode in enumerate(modes):
        before: list[Measurement] = []
        for size in sizes:
            candidate = Candidate(mode, size)
            found = known.get(_name(candidate))
            if found is None:
                lighter = [known.get(_name(Candidate(other, size))) for other in modes[:place]]
                if _expected(candidate, before, lighter, limit) > limit:
                    break
                return candidate
            if not _fits(found, limit) or (before and not _is_faster(found, before[-1])):
                break
            before.append(found)
    return None


def _name(candidate: Candidate) -> str:
    # As dictionary keys, True and 1 are the same.
    return f"{candidate.gradient_checkpointing!r} {candidate.micro_batch_size}"


def _is_faster(one: Measurement, other: Measurement) -> bool:
    assert one.seconds_per_token is not None and other.seconds_per_token is not None
    return one.seconds_per_token <= other.seconds_per_token * (1 - _FASTER)


def _fits(one: Measurement, limit: float) -> bool:
    return one.seconds_per_token is not None and one.used <= limit


def _expected(
    candidate: Candidate, smaller: Sequence[Measurement], lighter: Sequence[Measurement | None], limit: float
) -> float:
    """Bytes that a candidate should use; 0 where nothing is known of it.

    Activations grow with the sequences of a micro-batch, and with the layers that keep theirs.

    Args:
        candidate: Not measured yet.
        smaller: Measured with the same checkpointing and smaller micro-batches.
        lighter: With the same micro-batch, and checkpointing that keeps less; None where it was not measured.
        limit: Bytes that may be used.
    """
    if any(one is not None and not _fits(one, limit) for one in lighter):
        return float("inf")
    if smaller:
        last = smaller[-1]
        more = (last.allocated - last.at_rest) * (candidate.micro_batch_size / last.candidate.micro_batch_size - 1)
        return last.used + more
    if len(lighter) == 2 and lighter[0] is not None and lighter[1] is not None:
        # Every layer, every second, none: by the same step again.
        return 2 * lighter[1].used - lighter[0].used
    return 0.0


def choose(measured: Sequence[Measurement], limit: float) -> Measurement | None:
    """The fastest candidate that fits; of several as fast, the one that takes least memory."""
    fitting = [one for one in measured if _fits(one, limit)]
    best = min((one.seconds_per_token or 0.0 for one in fitting), default=0.0)
    as_fast = [one for one in fitting if (one.seconds_per_token or 0.0) <= best * (1 + _FASTER)]
    return min(as_fast, key=lambda one: one.used, default=None)


def worst(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One measurement of each candidate: that it did not fit is said by any rank alone."""
    found: dict[str, Measurement] = {}
    for one in measurements:
        name = _name(one.candidate)
        if name not in found or one.seconds_per_token is None:
            found[name] = one
    return list(found.values())


def read_journal(file: Path) -> list[Measurement]:
    """What the ranks have measured so far, in order."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, TypeError):  # a line that was being written when its process ended
            values = json.loads(line)
            found.append(Measurement(Candidate(**values.pop("candidate")), **values))
    return found


def longest_first(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The sequences that take most memory and time.

    Args:
        folder: Of the prepared data.

    Returns:
        Numbers of sequences, most tokens first and of those the most squares of document lengths; and their tokens.
    """
    index, documents = SequenceIndex.load(folder / "train.npz"), DocumentStore.open(folder).documents
    lengths = documents["length"][index.members].astype(np.int64)
    starts = np.concatenate([[0], index.ends[:-1]])
    tokens, squares = np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts)
    order = np.lexsort((-squares, -tokens))
    return order, tokens[order]


def answer_file(job: Job, prepared: Prepared, memory_gib: float | None = None) -> Path:
    """<output_dir>/.prepared/search/<key>.json; a search with a limit of its own leaves its answer under another name."""
    plan = {one["name"]: one["value"] for one in job.plan.decisions() if one["name"] not in _FOLLOWS}
    recipe, model = job.recipe, Path(job.model.path)
    config = model / "config.json"
    parts = {
        "format": FORMAT,
        "model": [job.model.path, job.model.commit, config.read_text() if config.is_file() else None],
        "lora": recipe.model.lora.model_dump(mode="json") if recipe.model.lora else None,
        "new_tokens": len(recipe.model.new_tokens),
        "plan": plan,
        "deepspeed": job.deepspeed.config if job.deepspeed else None,
        # Among the parts only where there is one, so that other jobs find the answers that they have.
        **({"fsdp": job.fsdp.model_dump(mode="json")} if job.fsdp else {}),
        "wanted": [recipe.train.micro_batch_size, recipe.train.gradient_checkpointing],
        "trainer_args": recipe.train.trainer_args,
        "lengths": [recipe.data.packing, recipe.sequence_length, int(longest_first(prepared.folder)[1][0])],
        "gpu": asdict(job.hardware.gpu) if job.hardware.gpu else [job.hardware.cpu_cores, job.hardware.cpu_memory_gib],
        "ranks": [job.hardware.ranks, job.hardware.ranks_per_node],
        "packages": {name: _version(name) for name in _PACKAGES},
    } | ({} if memory_gib is None else {"memory_gib": memory_gib})
    key = sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return prepared.folder.parent / "search" / f"{key}.json"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_answer(file: Path, device: str, limit: float, measured: Sequence[Measurement], failed: str = "") -> None:
    """Write what was chosen, and all that was measured; complete or absent."""
    chosen = choose(measured, limit) if not failed else None
    why = failed or ("" if chosen else "nothing that was tried fits")
    content = {"device": device, "limit": int(limit), "chosen": asdict(chosen) if chosen else None, "failed": why}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content | {"measured": [asdict(one) for one in measured]})


def find_answer(job: Job, prepared: Prepared, memory_gib: float | None = None) -> TuningResult | None:
    """The answer for this job on this machine, or None where nobody has searched.

    Args:
        job: The recipe on this machine.
        prepared: Its data.
        memory_gib: The limit that the search was given; None for the machine's own, which is what a training goes by.
    """
    if not is_searched(job):
        return None
    try:
        content: dict[str, Any] = json.loads(answer_file(job, prepared, memory_gib).read_text(encoding="utf-8"))
        chosen, tried = content["chosen"], len(content["measured"])
        if chosen is None:
            return TuningResult(None, None, f"the search on this machine found no answer ({content['failed']})")
        used, limit = chosen["used"] / 2**30, content["limit"] / 2**30
        speed = round(1 / chosen["seconds_per_token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TuningResult(
        chosen["candidate"]["gradient_checkpointing"],
        chosen["candidate"]["micro_batch_size"],
        f"auto: measured on this machine, the fastest of {tried} that were tried: {speed} tokens/s on the longest sequences, "
        f"{used:.1f} GiB used where {limit:.1f} may be",
    )
