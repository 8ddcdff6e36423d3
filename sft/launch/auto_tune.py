"""Choose gradient checkpointing and micro-batch size by measuring: the fastest that fits, on this machine, with the real engine.

    python -m sft.launch.auto_tune recipes/tiny.yaml      by hand, on as many processes as the launcher starts (NPROC)

A start does it if the recipe leaves one of the two `auto` and there is a GPU. Each trial is a short training in processes of its own,
since no engine can be trusted after it ran out of memory.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import join
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.errors import EXIT_USER_ERROR, PlanError
from sft.files import write_json
from sft.hub.pins import pinned
from sft.launch.checks import checked_recipe_and_topology
from sft.launch.job import command_of, open_job, parse_command_line, plan_job
from sft.launch.prepare import prepared_data
from sft.launch.rank import check_with_frameworks, enter
from sft.launch.topology import read_topology
from sft.launch.tuning_result import find_result, is_tuned, longest_sequence, result_file
from sft.parallel import process_group as distributed
from sft.parallel.environment import settle_allocator
from sft.plan.batch import divisors
from sft.plan.job import Job
from sft.plan.plan import Decision, TuningResult
from sft.plan.precision import resolve_gradients
from sft.program import run_main
from sft.run.directory import Run

TRIAL = "--trial"  # on the command line, before its settings and the file for what it measures: this process is one of its ranks
EXIT_DID_NOT_FIT = 75  # exit status of a rank that ran out of memory
PASSES = 4  # micro-batches of a step: those between the first and the last are timed
_STEPS = 2  # in the first the optimizer makes its state
_LARGEST_SHARE = 0.92  # of a device's memory; the rest is for fragments, and for steps whose tokens fall differently
_SECONDS = 300.0  # no trial begins later
_FASTER = 0.02  # times that differ by less count as equal


@dataclass(frozen=True)
class Trial:
    """One way to compute a step."""

    gradient_checkpointing: bool | int | str
    """A value of train.gradient_checkpointing: true, false, every so many layers, or `selective`."""
    micro_batch_size: int

    def __str__(self) -> str:
        return f"gradient_checkpointing={self.gradient_checkpointing} micro_batch_size={self.micro_batch_size}"


@dataclass(frozen=True)
class Measured:
    """What a trial took on the rank that took most."""

    seconds_per_token: float
    """Of a forward and backward pass, on one rank."""
    used: float
    """GiB on the device at most, by this process and everything else there."""
    share: float
    """Of the device's memory."""


# The launcher.


def auto_tune(job: Job, prepared: Prepared) -> None:
    """Measure, and leave the result for the plan.

    Where a trial fails, the plan goes by arithmetic. Raises PlanError if memory runs out in each.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, job.hardware.cpu_cores // job.hardware.ranks_per_node)))
    print("Measuring which micro-batch and checkpointing are fastest here; the result is kept.", flush=True)
    found: dict[Trial, Measured] = {}
    tight: dict[Trial, Measured] = {}
    began = time.monotonic()
    for sizes in choices(job):
        for trial in sizes:
            if found and time.monotonic() - began > _SECONDS:
                break
            status, measured = _measured(trial, job)
            if status not in (0, EXIT_DID_NOT_FIT):
                print(f"Auto-tuning failed: its processes ended with status {status}. Arithmetic decides.", flush=True)
                return
            if measured is not None and measured.share <= _LARGEST_SHARE:
                found[trial] = measured
                break
            if measured is not None:
                tight[trial] = measured
        if not (found or tight):
            raise PlanError(_nothing_fits(job))
    if not found:
        found = dict([min(tight.items(), key=lambda one: one[1].used)])
    file = result_file(job, prepared)
    file.parent.mkdir(exist_ok=True)
    write_json(file, asdict(choose(found)))


def choices(job: Job) -> list[list[Trial]]:
    """For each way to checkpoint, least memory first: a trial of the plan's micro-batch, then of smaller ones in case it does not fit."""
    train, micro = job.recipe.train, job.plan.micro_batch_size.value
    sizes = divisors(micro)[::-1] if train.micro_batch_size == "auto" else [micro]
    modes: list[bool | int | str] = [True, 2, False]
    if train.gradient_checkpointing != "auto":
        modes = [train.gradient_checkpointing]
    elif job.recipe.model.trust_remote_code:
        modes = [True, False]  # code that a model ships may have one flag for all its layers
    return [[Trial(mode, size) for size in sizes] for mode in modes]


def choose(found: dict[Trial, Measured]) -> TuningResult:
    """The fastest trial; of several as fast, the one that takes least memory."""
    best = min(one.seconds_per_token for one in found.values())
    as_fast = [trial for trial, one in found.items() if one.seconds_per_token <= best * (1 + _FASTER)]
    trial = min(as_fast, key=lambda one: found[one].used)
    reason = (
        f"auto: measured on this machine, the fastest of {len(found)} trials: {1 / found[trial].seconds_per_token:.0f} tokens/s on the "
        f"longest sequences, {found[trial].used:.1f} GiB"
    )
    return TuningResult(trial.gradient_checkpointing, trial.micro_batch_size, reason)


def _nothing_fits(job: Job) -> str:
    train = job.recipe.train
    return (
        f"train.micro_batch_size={train.micro_batch_size}, train.gradient_checkpointing={train.gradient_checkpointing}: memory ran out "
        f"in each trial of auto-tuning, so this training does not fit on {job.hardware.device}. `sft plan {join(command_of(job))} --fit` "
        "lists the smallest changes that make it fit; docs/memory.md."
    )


def _measured(trial: Trial, job: Job) -> tuple[int, Measured | None]:
    """Run a trial: the exit status of its processes, and what it took; None if it did not fit."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        settings = json.dumps([trial.gradient_checkpointing, trial.micro_batch_size])
        status = _run_ranks(["-m", "sft.launch.auto_tune", TRIAL, settings, str(file), *command_of(job)])
        if status == EXIT_USER_ERROR:  # a rank has reported it
            raise SystemExit(status)
        one = Measured(**json.loads(file.read_text())) if status == 0 else None
    if one is not None:
        print(f"  {trial}: {1 / one.seconds_per_token:.0f} tokens/s a rank, {one.used:.1f} GiB", flush=True)
    elif status == EXIT_DID_NOT_FIT:
        print(f"  {trial}: does not fit", flush=True)
    return status, one


def _run_ranks(program: Sequence[str]) -> int:
    """Start the ranks as a training does, and wait for them; they end with this process."""
    topology = json.dumps(asdict(read_topology()) | {"slurm": None})
    command = [sys.executable, "-m", "sft.launch.torchrun", topology, "0", "0", *program]
    with subprocess.Popen(command, env=os.environ | {"SFT_PARENT": str(os.getpid())}) as process:
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise


# A rank.


def measure(job: Job, trial: Trial, file: Path) -> None:
    """Train a few micro-batches of the longest sequence as one of the ranks, and write what they took."""
    import torch

    from sft.data.tokenizer import load_tokenizer
    from sft.train.out_of_memory import is_out_of_memory

    enter(job)
    tokenizer = load_tokenizer(pinned(job.recipe, job.model))
    check_with_frameworks(job)
    prepared = distributed.from_rank_0(lambda: prepared_data(job.recipe, job.model, command_of(job)))
    try:
        seconds = _train(to_measure(job, trial), prepared, tokenizer)
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or "can't allocate memory" in str(error) or is_out_of_memory(error)):
            raise
        # The other ranks wait for this one inside the engine; the launcher ends them.
        os._exit(EXIT_DID_NOT_FIT)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = max(total - free, torch.cuda.max_memory_reserved())
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        total = psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    slowest, most = max(distributed.gather(seconds)), max(distributed.gather(used))
    share = max(distributed.gather(used / total))
    with distributed.barrier_at_end():
        if distributed.is_rank_0():
            tokens = longest_sequence(prepared.folder)[1] * trial.micro_batch_size
            write_json(file, asdict(Measured(slowest / tokens, most / 2**30, share)))
    distributed.leave_group()


def to_measure(job: Job, trial: Trial) -> Job:
    """The job as it is measured: with the trial's settings, a few micro-batches, and no checkpoints, logs or trackers."""
    train = job.recipe.train.model_copy(update={"save_steps": 10**9, "logging_steps": 10**9})
    tracking = job.recipe.tracking.model_copy(update={"report_to": ()})
    why, precision = "auto-tuning", job.plan.precision.value
    plan = replace(
        job.plan,
        micro_batch_size=Decision(trial.micro_batch_size, why),
        gradient_accumulation_steps=Decision(PASSES, why),
        # A step of several micro-batches may need larger gradients than a step of one.
        gradients=resolve_gradients(job.recipe, job.hardware, job.deepspeed, precision, PASSES),
        gradient_checkpointing=Decision(trial.gradient_checkpointing, why),
        max_steps=Decision(_STEPS, why),
    )
    deepspeed = job.deepspeed
    if deepspeed is not None:
        deepspeed = replace(deepspeed, config=deepspeed.config | {"train_batch_size": "auto"})
    recipe = job.recipe.model_copy(update={"train": train, "tracking": tracking})
    return replace(job, recipe=recipe, plan=plan, deepspeed=deepspeed)


def _train(job: Job, prepared: Prepared, tokenizer: Any) -> float:
    """Seconds of a forward and backward pass."""
    import torch
    from transformers.trainer_callback import TrainerCallback

    from sft.model.load import load_model
    from sft.train.arguments import training_arguments
    from sft.train.batches import Sequences
    from sft.train.build import build_trainer, engine_callbacks

    longest, times = longest_sequence(prepared.folder)[0], list[float]()

    class OnlyTheLongest(Sequences):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return super().__getitem__(longest)

    class Stopwatch(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    per_step = job.plan.micro_batch_size.value * PASSES * job.plan.data_parallel_ranks.value
    sequences = OnlyTheLongest(store, index, per_step, tokenizer.pad_token_id, job.recipe.data.packing)
    with TemporaryDirectory() as folder:
        arguments = training_arguments(job, Run(Path(folder) / "search" / "run"))
        trainer = build_trainer(job, arguments, load_model(job, tokenizer), tokenizer, sequences)
        for callback in (*engine_callbacks(job), Stopwatch()):
            trainer.add_callback(callback)
        trainer.train()
    of_step = times[1 - PASSES :]  # transformers announces no end of a step's last micro-batch
    return (of_step[-1] - of_step[0]) / (len(of_step) - 1)


def main(argv: Sequence[str]) -> None:
    """Tune for a recipe and print the result; or measure, as one of the ranks."""
    settle_allocator()
    if TRIAL in argv:
        _, settings, file, *words = argv
        job = open_job(*parse_command_line(words, "sft.launch.auto_tune"), distributed.job_hardware())
        measure(job, Trial(*json.loads(settings)), Path(file))
        return
    job = plan_job(checked_recipe_and_topology(*parse_command_line(argv, "sft.launch.auto_tune"))[0])
    if not is_tuned(job):
        print("Nothing to tune: the recipe or its DeepSpeed file gives micro-batch and checkpointing.")
        return
    prepared = prepared_data(job.recipe, job.model, command_of(job))
    auto_tune(job, prepared)
    found = find_result(job, prepared)
    if found is not None:
        print(f"{Trial(found.gradient_checkpointing, found.micro_batch_size)}; {found.reason}.")


if __name__ == "__main__":
    run_main(main)
