"""Find micro-batch and checkpointing by measuring: the fastest that fits, on this machine, with the real engine.

Started by the launcher where the recipe leaves one of them `auto` and there is a GPU; by hand anywhere:

python -m sft.launch.auto_tune recipes/tiny.yaml                      as many processes as the launcher starts (NPROC)
python -m sft.launch.auto_tune recipes/tiny.yaml --memory-gib 2       what if one process might use so much: told, and not gone by

What does not fit ends the process that finds it out: an engine is not to be trusted after that, and the other ranks wait for
one that will not come. The next process goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sft.data.prepared import Prepared
from sft.errors import EXIT_USER_ERROR
from sft.launch.checks import job_and_topology
from sft.launch.job import open_job
from sft.launch.prepare import prepared_data
from sft.launch.topology import read_topology
from sft.launch.tuning_result import (
    PASSES,
    Candidate,
    answer_file,
    candidates,
    find_answer,
    is_searched,
    read_journal,
    worst,
    write_answer,
)
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.plan.plan import Decision
from sft.plan.precision import resolve_gradients
from sft.program import run_main


def main(argv: Sequence[str]) -> None:
    """Search, with processes of its own; or, as one of them, measure."""
    arguments = parse_command_line(argv)
    hardware = distributed.job_hardware() if arguments.rank else None
    if hardware is None:
        job, _ = job_and_topology(Path(arguments.recipe), arguments.overrides)
        prepared = prepared_data(job.recipe, job.model, [str(job.recipe_path), *job.overrides])
        if not is_searched(job):
            print("Nothing to search: the recipe or its DeepSpeed file gives micro-batch and checkpointing.")
            return
        search(job, prepared, arguments.memory_gib)
        found = find_answer(job, prepared, arguments.memory_gib)
        assert found is not None
        if found.micro_batch_size is None or found.gradient_checkpointing is None:
            print(f"Arithmetic decides: {found.reason}.")
        else:
            print(f"{Candidate(found.gradient_checkpointing, found.micro_batch_size).words}; {found.reason}.")
        return
    measure(open_job(Path(arguments.recipe), arguments.overrides, hardware), arguments.memory_gib)


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Recipe, overrides and switches."""
    parser = argparse.ArgumentParser(
        prog="python -m sft.launch.auto_tune", description="Measure what fits and is fastest here."
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--memory-gib", type=float, help="what one process may use (default: 92 %% of what there is)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args([word for word in argv if not word.startswith("--local_rank")])
    if arguments.memory_gib is not None and not arguments.memory_gib > 0:
        parser.error(f"--memory-gib {arguments.memory_gib:g}: give a number of GiB greater than 0")
    return arguments


def search(job: Job, prepared: Prepared, memory_gib: float | None = None) -> None:
    """Have as many processes as the training measure, and leave the answer for the plan.

    A search that fails says so in its answer, and the plan goes by arithmetic.

    Args:
        job: The recipe on this machine.
        prepared: Its data.
        memory_gib: What one process may use; None for nearly all there is.
    """
    answer = answer_file(job, prepared, memory_gib)
    journal = answer.with_suffix(".jsonl")
    answer.parent.mkdir(parents=True, exist_ok=True)
    journal.unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, job.hardware.cpu_cores // job.hardware.ranks_per_node)))
    print("Measuring which micro-batch and checkpointing are fastest here; the answer is kept.", flush=True)
    program = ["-m", "sft.launch.auto_tune", "--rank", str(job.recipe_path), *job.overrides]
    program += [] if memory_gib is None else ["--memory-gib", str(memory_gib)]
    while True:
        before = len(worst(read_journal(journal)))
        status = _run(program)
        if status == 0:
            return
        measured = worst(read_journal(journal))
        if status == EXIT_USER_ERROR:  # told by the rank; the training would tell it again
            raise SystemExit(status)
        if len(measured) > before and measured[-1].seconds_per_token is None:
            continue
        reason = f"its processes ended with status {status}"
        print(f"The search failed: {reason}. Micro-batch and checkpointing follow from arithmetic.", flush=True)
        write_answer(answer, job.hardware.device, 0.0, measured, reason)
        return


def _run(program: Sequence[str]) -> int:
    """Start the ranks as a training does, and wait for them; they end with this process."""
    topology = json.dumps(asdict(read_topology()) | {"slurm": None})
    command = [sys.executable, "-m", "sft.launch.torchrun", topology, "0", "0", *program]
    with subprocess.Popen(command, env=os.environ | {"SFT_PARENT": str(os.getpid())}) as process:
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise


def measure(job: Job, memory_gib: float | None) -> None:
    """One rank's part: train on the longest sequences, a candidate each step, until there is none left."""
    from sft.data.tokenizer import load_tokenizer
    from sft.hub.pins import pinned
    from sft.launch.rank import check_with_frameworks, enter

    enter(job)
    from sft.launch.trials import Steps

    tokenizer = load_tokenizer(pinned(job.recipe, job.model))
    check_with_frameworks(job)
    prepared = distributed.from_rank_0(lambda: prepared_data(job.recipe, job.model, list(job.overrides)))
    answer = answer_file(job, prepared, memory_gib)
    steps = Steps(to_measure(job), prepared, tokenizer, memory_gib, answer.with_suffix(".jsonl"), candidates(job))
    steps.run()
    with distributed.barrier_at_end():
        if distributed.is_rank_0():
            write_answer(answer, job.hardware.device, steps.limit, steps.measured)
    distributed.leave_group()


def to_measure(job: Job) -> Job:
    """The job as it is measured: no checkpoints, logs or trackers, and passes that follow one another without end."""
    modes, _ = candidates(job)
    train = job.recipe.train.model_copy(update={"save_steps": 10**9, "logging_steps": 10**9})
    tracking = job.recipe.tracking.model_copy(update={"report_to": ()})
    plan = replace(
        job.plan,
        micro_batch_size=Decision(1, "the search"),
        gradient_accumulation_steps=Decision(PASSES, "the search"),
        # What gradients take where a step has several micro-batches; a step of one may take less.
        gradients=resolve_gradients(
            job.recipe, job.hardware, job.model, job.deepspeed, job.plan.precision.value, PASSES
        ),
        gradient_checkpointing=Decision(modes[0], "the search"),
        max_steps=Decision(10**6, "the search"),
    )
    deepspeed = job.deepspeed
    if deepspeed is not None:
        deepspeed = replace(deepspeed, config=deepspeed.config | {"train_batch_size": "auto"})
    recipe = job.recipe.model_copy(update={"train": train, "tracking": tracking})
    return replace(job, recipe=recipe, plan=plan, deepspeed=deepspeed)


if __name__ == "__main__":
    run_main(main)
