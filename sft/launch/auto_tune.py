"""Choose micro-batch size and gradient checkpointing by measuring: the fastest that fits, on this machine, with the real engine.

    python -m sft.launch.auto_tune recipes/tiny.yaml      by hand, on as many processes as the launcher starts (NPROC)

A start does it if the recipe leaves one of the two `auto` and there is a GPU. Running out of memory ends the processes that measure, since
no engine can be trusted after that; the next processes read the journal and try what is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from shlex import join

from sft.data.prepared import Prepared
from sft.errors import EXIT_USER_ERROR, PlanError
from sft.hub.pins import pinned
from sft.launch.checks import checked_recipe_and_topology
from sft.launch.job import command_of, open_job, parse_command_line, plan_job
from sft.launch.prepare import prepared_data
from sft.launch.rank import check_with_frameworks, enter
from sft.launch.topology import read_topology
from sft.launch.tuning_result import Trial, find_result, is_tuned, read_journal, result_file, write_result
from sft.parallel import process_group as distributed
from sft.parallel.environment import settle_allocator
from sft.plan.job import Job
from sft.program import run_main

RANK = "--rank"  # on the command line: this process is one of those that measure


def auto_tune(job: Job, prepared: Prepared) -> None:
    """Have as many processes as the training measure, and leave the result for the plan.

    A search that fails says so in its result, and the plan goes by arithmetic. Raises PlanError if memory runs out in each trial.
    """
    file = result_file(job, prepared)
    journal = file.with_suffix(".jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    journal.unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, job.hardware.cpu_cores // job.hardware.ranks_per_node)))
    print("Measuring which micro-batch and checkpointing are fastest here; the result is kept.", flush=True)
    failures = 0
    while status := _run_ranks(["-m", "sft.launch.auto_tune", RANK, *command_of(job)]):
        if status == EXIT_USER_ERROR:  # a rank has reported it
            raise SystemExit(status)
        measured, before = read_journal(journal), failures
        failures = sum(one.seconds_per_token is None for one in measured)
        if failures == before:
            reason = f"its processes ended with status {status}"
            print(f"Auto-tuning failed: {reason}. Micro-batch and checkpointing follow from arithmetic.", flush=True)
            write_result(file, job.hardware.device, 0.0, measured, reason)
            return
    tried, train = read_journal(journal), job.recipe.train
    if not any(one.seconds_per_token for one in tried):
        raise PlanError(
            f"train.micro_batch_size={train.micro_batch_size}, train.gradient_checkpointing={train.gradient_checkpointing}: memory ran out "
            f"in each trial of auto-tuning ({'; '.join(one.name for one in tried)}), so this training does not fit on "
            f"{job.hardware.device}. `sft plan {join(command_of(job))} --fit` lists the smallest changes that make it fit; docs/memory.md."
        )


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


def measure(job: Job) -> None:
    """Train on the longest sequences as one of the ranks, a trial each step, until none is left."""
    enter(job)
    from sft.data.tokenizer import load_tokenizer
    from sft.launch.trials import Trials

    tokenizer = load_tokenizer(pinned(job.recipe, job.model))
    check_with_frameworks(job)
    prepared = distributed.from_rank_0(lambda: prepared_data(job.recipe, job.model, command_of(job)))
    file = result_file(job, prepared)
    trials = Trials(job, prepared, tokenizer, file.with_suffix(".jsonl"))
    trials.run()
    with distributed.barrier_at_end():
        if distributed.is_rank_0():
            write_result(file, job.hardware.device, trials.limit, trials.measured)
    distributed.leave_group()


def main(argv: Sequence[str]) -> None:
    """Tune for a recipe and print the result; or measure, as one of the ranks."""
    settle_allocator()
    if RANK in argv:
        words = [word for word in argv if word != RANK]
        measure(open_job(*parse_command_line(words, "sft.launch.auto_tune"), distributed.job_hardware()))
        return
    job = plan_job(checked_recipe_and_topology(*parse_command_line(argv, "sft.launch.auto_tune"))[0])
    if not is_tuned(job):
        print("Nothing to tune: the recipe or its DeepSpeed file gives micro-batch and checkpointing.")
        return
    prepared = prepared_data(job.recipe, job.model, command_of(job))
    auto_tune(job, prepared)
    found = find_result(job, prepared)
    assert found is not None
    if found.micro_batch_size is None or found.gradient_checkpointing is None:
        print(f"Arithmetic decides: {found.reason}.")
    else:
        print(f"{Trial(found.gradient_checkpointing, found.micro_batch_size).name}; {found.reason}.")


if __name__ == "__main__":
    run_main(main)
