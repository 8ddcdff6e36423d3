"""Before a job of several processes: what must be alike on all of them, and whether they reach each other.

bash scripts/sft.sh RECIPE --preflight    all checks as a table, and stop; within a minute
each start of several processes           the comparisons and a sum; a difference ends the job with one message a machine
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from sft.data.prepared import data_key
from sft.errors import PreflightError, RecipeError
from sft.files import in_words
from sft.launch.host_comparison import Check, check_clocks, compare
from sft.launch.host_facts import HostFacts, host_facts, read_facts
from sft.launch.interconnect import bus_bandwidth, check_bandwidth, expected_link
from sft.launch.job import open_job
from sft.launch.opening import unfinished_run
from sft.parallel import process_group as distributed
from sft.plan.job import Job, bytes_per_parameter, checkpoints_to_come, trained_parameters
from sft.program import run_main

_MEASURED_BYTES = {True: 256 * 2**20, False: 16 * 2**20}
"""Of the all-reduce that is timed, by whether it is on GPUs."""


def main(argv: Sequence[str]) -> None:
    """The whole preflight, as one of the ranks."""
    if not argv:
        raise RecipeError("usage: python -m sft.launch.preflight RECIPE [key=value ...]")
    from sft.launch.rank import check_with_frameworks, join
    from sft.parallel.process_group import told_of_lost_ranks

    job = open_job(Path(argv[0]), list(argv[1:]), distributed.job_hardware())
    with told_of_lost_ranks(job.recipe, "the preflight ran"):
        join(job)
        check_with_frameworks(job)
        facts, *checks = all_checks(job)
    distributed.leave_group()
    if distributed.is_first_rank():
        show(facts, checks)
    refuse(checks)


def check_ranks(job: Job) -> None:
    """The short form, before anything is loaded: the ranks compared, in one exchange, and a sum.

    Raises:
        PreflightError: They differ, would wait for each other for ever, or would train each in its own way.
    """
    if job.hardware.ranks == 1:
        refuse([disk(job)])
        return
    refuse([*compare(_gathered(host_facts(job, distributed.rank()))), check_sum(job), distributed.gather(disk(job))[0]])


def _gathered(facts: HostFacts) -> list[HostFacts]:
    # As plain values: a program of another version has a class of another form.
    return [read_facts(values) for values in distributed.gather(asdict(facts))]


def all_checks(job: Job) -> Any:
    """The facts of every rank, and then each check."""
    facts = _gathered(host_facts(job, distributed.rank(), data_key(job.recipe, job.model)))
    now = distributed.gather(time.time())  # all leave the exchange before at about the same time
    checks = [
        *compare(facts),
        check_clocks([host.host for host in facts], [clock - now[0] for clock in now]),
        check_shared(job, facts),
        distributed.gather(disk(job))[0],  # the first rank's, which is the one that all share
        check_sum(job),
    ]
    if job.hardware.ranks > 1 and checks[-1].problem is None:
        checks[-1] = check_bandwidth(
            measure(job), expected_link(job.hardware.ranks, job.hardware.ranks_per_node, job.hardware.gpu is not None)
        )
    return [facts, *checks]


def refuse(checks: Sequence[Check]) -> None:
    """Stop where something is wrong.

    Raises:
        PreflightError: All of it, in one message.
    """
    failed = [check for check in checks if check.problem]
    if failed:
        title = "The processes of this job do not fit together:" if failed[0].name != "disk" else "There is no room:"
        raise PreflightError("\n".join([title, *(f"  {check.name}: {check.problem}" for check in failed)]))


def disk(job: Job) -> Check:
    """Room for the checkpoints to come, beside those that an unfinished run has."""
    run = unfinished_run(job)
    return check_disk(job, len(list(run.checkpoints.glob("checkpoint-*"))) if run else 0)


def check_disk(job: Job, there: int = 0) -> Check:
    """Whether checkpoints and final/ have room in output_dir.

    Args:
        job: What is trained and how.
        there: Checkpoints that the run has already.
    """
    folder = Path(job.recipe.output_dir).expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    parameters = trained_parameters(job)
    if parameters is None:
        return Check("disk", f"{in_words(free)} free in {folder}; what is needed is not known before the model loads")
    of_checkpoint, of_final = bytes_per_parameter(job)
    count = checkpoints_to_come(job.recipe, job.plan.max_steps.value, there)
    needed = parameters * (count * of_checkpoint + of_final)
    words = (
        f"{count} checkpoint{'s' if count > 1 else ''} of {in_words(parameters * of_checkpoint)} and final/ of "
        f"{in_words(parameters * of_final)} need {in_words(needed)}"
    )
    if needed <= free:
        return Check("disk", f"{words}; {in_words(free)} free")
    return Check(
        "disk",
        f"{in_words(free)} free",
        f"{words}, and {folder} has {in_words(free)} free. Free some space, set output_dir to another disk, or lower "
        "train.save_total_limit.",
    )


def _device(job: Job) -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if job.hardware.gpu else torch.device("cpu")


def check_sum(job: Job) -> Check:
    """An all-reduce over what the training uses gives the right sum."""
    import torch

    ranks = job.hardware.ranks
    if ranks == 1:
        return Check("all-reduce", "one process")
    total = torch.tensor([float(distributed.rank() + 1)], device=_device(job))
    torch.distributed.all_reduce(total)
    if total.item() == ranks * (ranks + 1) / 2:
        return Check("all-reduce", "the right sum")
    return Check(
        "all-reduce",
        "a wrong sum",
        f"the numbers 1 to {ranks}, one a rank, add up to {total.item():g} on rank {distributed.rank()}. The GPUs or the links between "
        "them corrupt data: check the machine, and try NCCL_P2P_DISABLE=1.",
    )


def measure(job: Job) -> float:
    """Bus bandwidth of an all-reduce, in GB/s."""
    import torch

    size = _MEASURED_BYTES[job.hardware.gpu is not None]
    tensor = torch.ones(size // 4, device=_device(job))
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if job.hardware.gpu is not None:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        tensor.fill_(1)
    return bus_bandwidth(job.hardware.ranks, size, min(seconds[1:]))  # the first one connects


def check_shared(job: Job, facts: Sequence[HostFacts]) -> Check:
    """Whether every rank sees in output_dir what the first one writes there."""
    folder = Path(job.recipe.output_dir).expanduser().resolve()
    token = folder / distributed.from_first_rank(lambda: write_token(folder))
    try:
        seen = distributed.gather(token.exists())
    finally:
        if distributed.is_first_rank():
            token.unlink(missing_ok=True)
    blind = [host.where for host, sees in zip(facts, seen, strict=True) if not sees]
    return shared(folder, facts[0].where, blind)


def write_token(folder: Path) -> str:
    """Leave a file that the other machines look for, and return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f".preflight-{uuid4().hex}"
    (folder / name).touch()
    return name


def shared(folder: Path, first: str, blind: Sequence[str]) -> Check:
    """What it means that some do not see the first one's file.

    Args:
        folder: output_dir.
        first: Who wrote the file.
        blind: Who does not see it.
    """
    if not blind:
        return Check("run's folder", f"{folder}, shared")
    return Check(
        "run's folder",
        f"not shared with {blind[0]}",
        f"{', '.join(blind)} does not see what {first} writes into {folder}. Set output_dir to a folder that all machines share (NFS, "
        "Lustre, ...).",
    )


def show(facts: Sequence[HostFacts], checks: Sequence[Check]) -> None:
    """Print the ranks and the table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=140)
    hosts = dict.fromkeys(host.host for host in facts)
    print(f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}:")
    for name in hosts:
        print(f"  {name}: {', '.join(str(host.rank) for host in facts if host.host == name)}")
    table = Table(box=SIMPLE, title="Preflight", title_justify="left", title_style="bold")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        state = "FAILED" if check.problem else "look" if check.remark else "ok"
        table.add_row(check.name, state, escape(check.found), style="red" if check.problem else None)
    console.print(table)
    for check in checks:
        if check.remark:
            console.print(escape(f"{check.name}: {check.remark}"), soft_wrap=True, highlight=False)
    sys.stdout.flush()


if __name__ == "__main__":
    run_main(main)
