"""Compare the ranks of a job, before anything is loaded: one exchange of facts, and one sum.

Each start of several processes does it, and a difference ends the job with one message on each machine. `sft train RECIPE --preflight`
also measures the bandwidth, shows all of it as a table, and stops.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from sft.data.prepared import data_key
from sft.errors import PreflightError
from sft.files import in_words
from sft.launch.run_directory import unfinished_run
from sft.parallel import process_group as distributed
from sft.plan.job import Job, bytes_per_parameter, checkpoints_to_come, trained_parameters
from sft.recipe.schema import REPOSITORY
from sft.run.record import installed_versions

MUST_BE_IDENTICAL = {
    "packages": "Install requirements.lock on {host}, or share one environment.",
    "code": "Check out the same commit on {host}, without changes.",
    "recipe": "Start the same file with the same overrides on {host}.",
    "plan": "{host} is another kind of machine: write these into the recipe instead of auto, or use machines of one kind.",
    "GPUs": "Use machines with one kind of GPU: the slowest sets the pace of all.",
    "dataset": "Put the files on a folder that all machines share, or copy them to {host} again.",
}
"""Sections of a rank's facts, and what to do where they differ."""
MAY_DIFFER = ("driver", "variables")
"""Sections whose differences are shown, and stop nothing."""
_CODE = ("sft/**/*.py", "sft/**/*.jinja", "eval/**/*.py", "ds_configs/*.json")
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DIST", "TORCH_CPP_LOG", "FI_", "UCX_")
"""Prefixes of the environment variables that change how ranks communicate."""
_MEASURED_BYTES = {True: 256 * 2**20, False: 16 * 2**20}
"""Of the all-reduce that is timed, by whether it is on GPUs."""

Facts = Mapping[str, Any]
"""Of one rank: `rank`, `host`, and each section as names and values."""


@dataclass(frozen=True)
class Check:
    """A row of the table."""

    name: str
    found: str
    problem: str | None = None
    """What is wrong, where, and what to do; it stops the job."""

    remark: str | None = None
    """Worth a look; it stops nothing."""


def check_ranks(job: Job) -> None:
    """Refuse ranks that differ, before anything is loaded.

    Raises:
        PreflightError: They would wait for each other for ever, or train each in its own way; or the disk is too small.
    """
    refuse(all_checks(job)[1] if job.hardware.ranks > 1 else [disk(job)])


def preflight(job: Job) -> None:
    """Run every check, show the table, and refuse what is wrong.

    Raises:
        PreflightError: Something is.
    """
    facts, checks = all_checks(job)
    if job.hardware.ranks > 1 and checks[-1].problem is None:
        checks[-1] = Check("all-reduce", f"the right sum; {bus_bandwidth(job):.2f} GB/s")
    if distributed.is_rank_0():
        show(facts, checks)
    refuse(checks)


def all_checks(job: Job) -> tuple[list[Facts], list[Check]]:
    """The facts of every rank, and the checks; the same on every rank."""
    facts = distributed.gather(rank_facts(job, distributed.rank()))
    return facts, [*compare(facts), check_shared(job, facts), distributed.gather(disk(job))[0], check_sum(job)]


def rank_facts(job: Job, rank: int) -> Facts:
    """What this rank brings to the comparison; plain values, since another version of the program reads them."""
    recipe = _flat(job.recipe.model_dump(mode="json"))
    folder = str(Path(job.recipe.output_dir).expanduser().resolve() / job.name)
    files = sorted(file for pattern in _CODE for file in REPOSITORY.glob(pattern))
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "packages": installed_versions(),
        "code": {str(file.relative_to(REPOSITORY)): sha256(file.read_bytes()).hexdigest()[:12] for file in files},
        "recipe": recipe | {"the run's folder": folder, "the model's commit": str(job.model.commit)},
        "plan": {
            **{name: str(value) for name, value in job.plan.settings().items()},
            "processes of the machine": str(job.hardware.ranks_per_node),
        },
        "GPUs": {"GPU": job.hardware.gpu.name if job.hardware.gpu else "none"},
        # Each file's size and both ends, the tokenizer and the template.
        "dataset": {"fingerprint": str(data_key(job.recipe, job.model))[:12]},
        "driver": {"driver": driver_version(Path("/proc/driver/nvidia/version"))},
        # Names of network interfaces may differ from machine to machine.
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.endswith("_IFNAME")
        },
    }


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in section.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: str(value)}
    return flat


def driver_version(file: Path) -> str:
    """The version of NVIDIA's kernel module; `none` where there is none."""
    try:
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", file.read_text())
    except OSError:
        return "none"
    return match[1] if match else "unknown"


def compare(facts: Sequence[Facts]) -> list[Check]:
    """A row for each section: identical on all ranks, or what differs on the first rank that does.

    Args:
        facts: By rank.
    """
    rows = []
    for section in (*MUST_BE_IDENTICAL, *MAY_DIFFER):
        other, lines = _first_difference(facts, section)
        values = facts[0].get(section, {})
        shown = ", ".join(f"{name} {value}" for name, value in list(values.items())[:3]) or "none"
        found = shown if len(values) <= 3 else f"identical on all ranks ({len(values)})"
        if other is None:
            rows.append(Check(section, found))
            continue
        told = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
        if section in MUST_BE_IDENTICAL:
            rows.append(Check(section, lines[0], f"{told}. {MUST_BE_IDENTICAL[section].format(host=other['host'])}"))
        else:
            rows.append(Check(section, found, remark=told))
    return rows


def _first_difference(facts: Sequence[Facts], section: str) -> tuple[Facts | None, list[str]]:
    first = facts[0]
    for other in facts[1:]:
        here, there = first.get(section, {}), other.get(section, {})
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            return other, [
                f"{name} is {here.get(name, 'missing')} on {_where(first)} and {there.get(name, 'missing')} on {_where(other)}"
                for name in names
            ]
    return None, []


def _where(facts: Facts) -> str:
    return f"{facts['host']} (rank {facts['rank']})"


def check_shared(job: Job, facts: Sequence[Facts]) -> Check:
    """Whether every rank sees in output_dir what rank 0 writes there."""
    folder = Path(job.recipe.output_dir).expanduser().resolve()

    def write_token() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".preflight-{uuid4().hex}"
        (folder / name).touch()
        return name

    token = folder / distributed.from_rank_0(write_token)
    try:
        seen = distributed.gather(token.exists())
    finally:
        if distributed.is_rank_0():
            token.unlink(missing_ok=True)
    blind = [_where(one) for one, sees in zip(facts, seen, strict=True) if not sees]
    if not blind:
        return Check("output_dir", f"{folder}, shared")
    return Check(
        "output_dir",
        f"not shared with {blind[0]}",
        f"{', '.join(blind)} does not see what {_where(facts[0])} writes into {folder}. Set output_dir to a folder that all machines "
        "share (NFS, Lustre, ...).",
    )


def disk(job: Job) -> Check:
    """Whether the checkpoints to come and final/ have room in output_dir, beside those that an unfinished run has."""
    run = unfinished_run(job)
    there = len(list(run.checkpoints.glob("checkpoint-*"))) if run else 0
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


def bus_bandwidth(job: Job) -> float:
    """GB/s that each rank's link carries in an all-reduce, whatever the number of ranks."""
    import torch

    on_gpu, ranks = job.hardware.gpu is not None, job.hardware.ranks
    tensor = torch.ones(_MEASURED_BYTES[on_gpu] // 4, device=_device(job))
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        tensor.fill_(1)
    # A ring moves 2 (n - 1) / n of the tensor over each link. The first one connects.
    return 2 * (ranks - 1) / ranks * _MEASURED_BYTES[on_gpu] / min(seconds[1:]) / 1e9


def _device(job: Job) -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if job.hardware.gpu else torch.device("cpu")


def refuse(checks: Sequence[Check]) -> None:
    """Stop where something is wrong.

    Raises:
        PreflightError: All of it, in one message.
    """
    failed = [check for check in checks if check.problem]
    if failed:
        title = "The processes of this job differ:" if failed[0].name != "disk" else "There is no room:"
        raise PreflightError("\n".join([title, *(f"  {check.name}: {check.problem}" for check in failed)]))


def show(facts: Sequence[Facts], checks: Sequence[Check]) -> None:
    """Print the ranks and the table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=140)
    hosts = dict.fromkeys(one["host"] for one in facts)
    print(f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}:")
    for host in hosts:
        print(f"  {host}: {', '.join(str(one['rank']) for one in facts if one['host'] == host)}")
    table = Table(box=SIMPLE, title="Preflight", title_justify="left", title_style="bold")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        state = "FAILED" if check.problem else "look" if check.remark else "ok"
        table.add_row(check.name, state, escape(check.remark or check.found), style="red" if check.problem else None)
    console.print(table)
    sys.stdout.flush()
