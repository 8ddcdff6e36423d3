"""Whether a checkpoint goes on here, and how: as the engine itself loads it, or through whole tensors. Imports no torch.

An engine's own checkpoint fits the same engine on the same number of ranks, and goes on from it bit by bit. For any other, the
weights and the optimizer's moments are read whole, one parameter at a time, and each rank takes its part: sft/checkpoint/portable.py. What
wrote a checkpoint is told by the checkpoint itself, because the run's record tells of the last start only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft.errors import RunError
from sft.files import read_json
from sft.plan.job import Job
from sft.plan.parallelism import FSDP2 as FSDP2
from sft.run.directory import Run

FILE = "written_by.json"
UNKNOWN = "unknown"
ANEW = "start anew with train.resume=never"


@dataclass(frozen=True)
class Writer:
    """What wrote a checkpoint, as far as its form depends on it."""

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
    parameters: tuple[str, ...] = ()
    """The trained ones in the optimizer's order, where its state is by number and not by name; known when it is written."""

    @property
    def zero_stage(self) -> int | None:
        """0 to 3; None without DeepSpeed."""
        return int(self.engine.removeprefix("ZeRO-")) if self.deepspeed is not None else None

    @property
    def uses_nvme(self) -> bool:
        """Whether DeepSpeed keeps a part of the state in files of its own, which no checkpoint holds."""
        zero = (self.deepspeed or {}).get("zero_optimization", {})
        return any(zero.get(key, {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))

    def __str__(self) -> str:
        sharing = {"tensor": self.tensor_parallel, "sequence": self.sequence_parallel}
        groups = "".join(f", {name} parallel over {size}" for name, size in sharing.items() if size > 1)
        if self.engine == "one process":
            return "one process"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.engine == UNKNOWN:
            return ranks
        return f"{ranks} under {self.engine}{groups if self.engine != 'tensor parallel' else ''}"


@dataclass(frozen=True)
class Continuation:
    """How a checkpoint goes on."""

    checkpoint: Path
    writer: Writer
    whole: bool
    """Through whole tensors; else the engine loads its own."""

    random_state: bool
    """Each rank has a file of its own random state, and takes it up."""

    words: str
    """One line for the user; empty where the checkpoint goes on as it was."""


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
    )


def write_writer(folder: Path, writer: Writer) -> None:
    """Write beside the engine's files what wrote them."""
    folder.mkdir(parents=True, exist_ok=True)  # the engines make it when they write, which may be later
    (folder / FILE).write_text(json.dumps(asdict(writer), indent=2) + "\n", encoding="utf-8")


def writer_of(checkpoint: Path, run: Run) -> Writer:
    """What wrote a checkpoint.

    Args:
        checkpoint: Complete.
        run: Tells of a checkpoint from before checkpoints told it themselves.

    Raises:
        RunError: The checkpoint's file is damaged.
    """
    if not (checkpoint / FILE).exists():
        plan = read_json(run.plan_file)
        decided = {row["name"]: row["value"] for row in plan.get("decisions", [])}
        words = {name: decided.get(name, UNKNOWN) for name in ("engine", "weights", "precision")}
        return Writer(ranks=run.record["ranks"], deepspeed=plan.get("deepspeed"), **words)
    try:
        values = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
        return Writer(**values | {"parameters": tuple(values["parameters"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{checkpoint / FILE} is damaged: {error}. Remove {checkpoint.name} to go on from the one before."
        ) from None


def resolve_continuation(checkpoint: Path, run: Run, job: Job) -> Continuation:
    """Decide how a checkpoint goes on under this job.

    Args:
        checkpoint: Complete and verified.
        run: The run that it belongs to.
        job: This start.

    Raises:
        RunError: It cannot go on.
    """
    writer, here = writer_of(checkpoint, run), writer_here(job)
    told = (checkpoint / FILE).exists()
    whole = _needs_whole_tensors(writer, here) if told else _differs_as_far_as_known(writer, here)
    problem = _why_not(writer, here, whole, told)
    if problem:
        raise RunError(
            f"{checkpoint} was written by {writer}, and cannot go on with {here}: {problem}. Go on as it was written, or {ANEW}."
        )
    # One process keeps its random state otherwise under one engine than under another.
    same_streams = writer.ranks == here.ranks and (here.ranks > 1 or not whole)
    return Continuation(checkpoint, writer, whole, same_streams, _words(checkpoint, writer, here, whole, same_streams))


def _needs_whole_tensors(writer: Writer, here: Writer) -> bool:
    if writer.engine == here.engine == FSDP2:
        # Its shares are found by name and place, whoever wrote them.
        return writer.state_dict_type != here.state_dict_type
    return _form(writer) != _form(here)


def _differs_as_far_as_known(writer: Writer, here: Writer) -> bool:
    if writer.engine == here.engine == FSDP2:
        return False
    known = ("engine", "ranks", "weights", "deepspeed")
    return any(getattr(writer, name) not in (getattr(here, name), UNKNOWN) for name in known)


def _form(writer: Writer) -> tuple[Any, ...]:
    groups = (writer.tensor_parallel, writer.sequence_parallel)
    return (writer.engine, writer.ranks, writer.weights, writer.precision, writer.deepspeed, *groups)


def _why_not(writer: Writer, here: Writer, whole: bool, told: bool) -> str | None:
    """Why a checkpoint cannot go on; None where it can."""
    if writer.uses_nvme:
        return "with offload to NVMe DeepSpeed does not save the optimizer's state"
    if not whole:
        return None
    if not told:
        return f"it is of an older version of this program, whose checkpoints hold no {FILE}"
    if here.uses_nvme:
        return "whole tensors have not been tried with offload to NVMe"
    if 0 in (writer.zero_stage, here.zero_stage):
        return "DeepSpeed without ZeRO has a form of its own, which only it reads"
    if "fp16" in (writer.precision, here.precision):
        return "with fp16 the state of the loss scale belongs to the engine"
    return None


def _words(checkpoint: Path, writer: Writer, here: Writer, whole: bool, same_streams: bool) -> str:
    if not whole and same_streams:
        return ""
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    how = f", through whole tensors ({_megabytes(size)})" if whole else ""
    streams = "" if same_streams else " Dropout, where there is any, begins a new random stream on each rank."
    return f"{checkpoint.name} was written by {writer}; it goes on with {here}{how}.{streams}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size < 1e10 else f"{size / 1e9:.0f} GB"
