"""Decides which checkpoint a run resumes from, and how: as its engine loads it, or resharded from full tensors. Imports no torch.

An engine's own checkpoint fits the same engine on the same number of ranks, and resumes bit for bit. For any other, weights and AdamW's
moments are read as full tensors, one parameter at a time, and each rank takes its shard: sft/checkpoint/reshard.py. The checkpoint's
manifest says what wrote it; run.json knows only the last start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft.checkpoint.manifest import fault, read_manifest, size
from sft.errors import RunError
from sft.files import in_words, read_json, remove
from sft.plan.job import Job
from sft.plan.parallelism import FSDP2
from sft.run.directory import Run, read_lines


@dataclass(frozen=True)
class Choice:
    """Where a run resumes."""

    checkpoint: Path | None
    """None: at the first step."""

    skipped: dict[str, str]
    """Names of newer checkpoints, and what is wrong with each."""

    @property
    def step(self) -> int:
        """Optimizer steps that are done; 0 for none."""
        return step_of(self.checkpoint) if self.checkpoint else 0

    def lines(self) -> list[str]:
        """What the user reads."""
        if self.checkpoint is None:
            return []
        name = self.checkpoint.name
        rejected = [f"Skipped {other}, now {other}.unusable: {why}" for other, why in self.skipped.items()]
        return [*rejected, f"This run is unfinished: it resumes from {name}. train.resume=never starts a new one."]


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written.

    >>> step_of(Path("checkpoints/checkpoint-20"))
    20
    """
    return int(checkpoint.name.rpartition("-")[2])


def choose_checkpoint(run: Run) -> Choice:
    """Find the newest checkpoint that verifies, and rename newer ones to .unusable. Reads every byte of each: call it on rank 0.

    Raises:
        RunError: There are checkpoints, and none of them verifies.
    """
    skipped: dict[str, str] = {}
    for checkpoint in run.all_checkpoints():
        why = checkpoint_fault(checkpoint)
        if why is None:
            for name in skipped:
                unusable = run.checkpoints / f"{name}.unusable"
                remove(unusable)
                (run.checkpoints / name).rename(unusable)
            return Choice(checkpoint, skipped)
        skipped[checkpoint.name] = why
    if skipped:
        reasons = "\n".join(f"  {name}: {why}" for name, why in skipped.items())
        raise RunError(
            f"{run.path} is unfinished, and none of its checkpoints can be used:\n{reasons}\n"
            "Restore one from a copy. Or start over, which never happens unasked: train.resume=never makes a new run and leaves this one "
            "as it is."
        )
    return Choice(None, {})


def checkpoint_fault(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used; None where every byte of it verifies."""
    if why := fault(checkpoint):
        return why
    step = read_manifest(checkpoint).get("step", step_of(checkpoint))
    return None if step == step_of(checkpoint) else f"it is of step {step}: rename it back to checkpoint-{step}"


def lost_lines(run: Run, checkpoint: Path) -> str | None:
    """Which lines metrics.jsonl lacks of those the checkpoint says were logged; None where it lacks none."""
    history = read_json(checkpoint / "trainer_state.json").get("log_history", [])
    logged = {entry["step"] for entry in history if "loss" in entry}
    missing = logged - {line["step"] for line in read_lines(run.metrics_file)}
    if not missing:
        return None
    return (
        f"{run.metrics_file} lacks {len(missing)} of the {len(logged)} lines up to {checkpoint.name} (first: step {min(missing)}): it was "
        "edited or damaged. The curve and the mean loss leave them out. To keep them, restore the file from a copy before you resume."
    )


@dataclass(frozen=True)
class Writer:
    """What wrote a checkpoint, as far as its format depends on it."""

    engine: str
    ranks: int
    weights: str
    """What they are kept in: the plan's word."""

    precision: str
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's configuration, its buffers sized."""

    state_dict_type: str | None = None
    """FSDP2's: `sharded` or `full`."""

    tensor_parallel: int = 1
    sequence_parallel: int = 1
    pipeline_parallel: int = 1
    parameters: tuple[str, ...] = field(default=(), compare=False)
    """The trained ones in the optimizer's order, where its state is by number and not by name; known when it is written."""

    @property
    def zero_stage(self) -> int | None:
        """0 to 3; None without DeepSpeed."""
        return int(self.engine.removeprefix("ZeRO-")) if self.deepspeed is not None else None

    @property
    def uses_nvme(self) -> bool:
        """Whether DeepSpeed keeps part of the state in files of its own, which no checkpoint holds."""
        zero = (self.deepspeed or {}).get("zero_optimization", {})
        return any(zero.get(key, {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))

    def __str__(self) -> str:
        if self.engine == "one process":
            return self.engine
        split = {"sequence parallel ranks": self.sequence_parallel, "stages": self.pipeline_parallel}
        parts = "".join(f", {size} {what}" for what, size in split.items() if size > 1)
        return f"{self.ranks} ranks under {self.engine}{parts}"


@dataclass(frozen=True)
class ResumePlan:
    """How a checkpoint is resumed."""

    checkpoint: Path
    writer: Writer
    reshards: bool
    """From full tensors; else the engine loads its own files."""

    random_state: bool
    """Each rank has a file with its own random state, and restores it."""

    words: str
    """One line for the user; empty where everything is as it was."""


def writer_here(job: Job) -> Writer:
    """What writes the checkpoints of this start."""
    train, plan = job.recipe.train, job.plan
    return Writer(
        engine=plan.engine.value,
        ranks=job.hardware.ranks,
        weights=plan.weights.value,
        precision=plan.precision.value,
        deepspeed=job.deepspeed.config if job.deepspeed else None,
        state_dict_type=job.fsdp.state_dict_type if job.fsdp else None,
        tensor_parallel=train.tensor_parallel_size,
        sequence_parallel=train.sequence_parallel_size,
        pipeline_parallel=train.pipeline_parallel_size,
    )


def writer_of(checkpoint: Path) -> Writer:
    """What wrote a checkpoint; a ValueError says how it is damaged."""
    try:
        values = read_manifest(checkpoint)["writer"]
        return Writer(**values | {"parameters": tuple(values["parameters"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"it does not say what wrote it: {error}") from None


def resolve_resume(checkpoint: Path, job: Job) -> ResumePlan:
    """Decide how a checkpoint is resumed by this job.

    Raises:
        RunError: It cannot be resumed.
        ValueError: The checkpoint is damaged.
    """
    writer, here = writer_of(checkpoint), writer_here(job)
    # torch finds FSDP2's shards by name, whoever wrote them.
    sharded = writer.engine == here.engine == FSDP2 and writer.state_dict_type == here.state_dict_type
    optim = job.recipe.train.optim
    # One process and DDP write the same files, and resharding knows the moments of AdamW only.
    alike = {writer.engine, here.engine} <= {"one process", "DDP"}
    alike &= (writer.weights, writer.precision) == (here.weights, here.precision)
    sharded |= optim != "adamw" and alike
    reshards = not sharded and writer != here
    if problem := _why_not(writer, here, reshards, optim):
        raise RunError(
            f"{checkpoint} was written by {writer}, and cannot be resumed with {here}: {problem}. Resume it as it was written, or start a "
            "new run with train.resume=never."
        )
    # One process keeps its random state differently under different engines.
    random_state = writer.ranks == here.ranks and (here.ranks > 1 or not reshards)
    how = f", resharded from full tensors ({in_words(size(checkpoint))})" if reshards else ""
    random = "" if random_state else " Dropout, if any, starts a new random stream on each rank."
    words = f"{checkpoint.name} was written by {writer}; it resumes with {here}{how}.{random}"
    return ResumePlan(checkpoint, writer, reshards, random_state, words if how or random else "")


def _why_not(writer: Writer, here: Writer, reshards: bool, optim: str) -> str | None:
    """Why a checkpoint cannot be resumed; None where it can."""
    if writer.uses_nvme or here.uses_nvme:
        return "with offload to NVMe DeepSpeed does not save the optimizer's state"
    if not reshards:
        return None
    if optim != "adamw":
        return f"with train.optim={optim} the optimizer's state is not resharded"
    if 0 in (writer.zero_stage, here.zero_stage):
        return "DeepSpeed without ZeRO has a format of its own, which only it reads"
    if "fp16" in (writer.precision, here.precision):
        return "with fp16 the state of the loss scale belongs to the engine"
    return None
