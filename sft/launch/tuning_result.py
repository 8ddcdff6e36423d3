"""Says what auto-tuning decides, and finds what it decided. Imports no torch; sft/launch/auto_tune.py measures.

A result is found again by a hash over what moves time or memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np

from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.plan.job import Job
from sft.plan.plan import TuningResult
from sft.run.record import installed_versions

_FOLLOWS = """
    gradient_checkpointing micro_batch_size gradient_accumulation_steps empty_sequences_per_step learning_rate memory
    steps_per_epoch max_steps warmup_steps time disk
""".split()
"""Decisions of the plan that are tuned, or that move neither time nor memory of a forward and backward pass."""


def is_tuned(job: Job) -> bool:
    """Whether the recipe leaves micro-batch or checkpointing `auto`, and neither a DeepSpeed file nor the number of stages decides it."""
    train, config = job.recipe.train, job.deepspeed.config if job.deepspeed else {}
    decided = {config.get(key, "auto") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    is_open = "auto" in (train.micro_batch_size, train.gradient_checkpointing)
    return is_open and decided == {"auto"} and train.pipeline_parallel_size == 1


def longest_sequence(folder: Path) -> tuple[int, int]:
    """The prepared sequence with most tokens, and of those with the most squares of document lengths: its number and its tokens."""
    index, documents = SequenceIndex.load(folder / "train.npz"), DocumentStore.open(folder).documents
    lengths = documents["length"][index.members].astype(np.int64)
    starts = np.concatenate([[0], index.ends[:-1]])
    tokens, squares = np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts)
    longest = int(np.lexsort((squares, tokens))[-1])
    return longest, int(tokens[longest])


def result_file(job: Job, prepared: Prepared) -> Path:
    """<output_dir>/.prepared/search/<key>.json; the key is a hash over what moves time or memory."""
    recipe, config = job.recipe, Path(job.model.path) / "config.json"
    parts = {
        "model": [job.model.path, job.model.commit, config.read_text() if config.is_file() else None],
        "recipe": [recipe.model.model_dump(mode="json"), recipe.train.trainer_args, recipe.sequence_length],
        "stated": [recipe.train.micro_batch_size, recipe.train.gradient_checkpointing],
        "plan": {one["name"]: one["value"] for one in job.plan.decisions() if one["name"] not in _FOLLOWS},
        "engine": [job.deepspeed.config if job.deepspeed else None, recipe.train.model_dump(mode="json")["fsdp"]],
        "longest": longest_sequence(prepared.folder)[1],
        "hardware": asdict(job.hardware),
        "packages": installed_versions(),
    }
    key = sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return prepared.folder.parent / "search" / f"{key}.json"


def find_result(job: Job, prepared: Prepared) -> TuningResult | None:
    """What was tuned for this job on this machine, or None if nothing was."""
    if not is_tuned(job):
        return None
    try:
        return TuningResult(**json.loads(result_file(job, prepared).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
