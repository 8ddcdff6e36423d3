"""Compare the ranks of a job before anything is loaded: one exchange of facts, and one sum. A difference ends the job with one message.

Each start of several processes does it; `sft train RECIPE --preflight` also measures the bandwidth, shows a table, and stops.
"""

from __future__ import annotations

import os
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
from sft.launch.open_run import unfinished_run
from sft.parallel import process_group as distributed
from sft.plan.disk import estimate_disk
from sft.plan.job import Job
from sft.recipe.changes import differences
from sft.recipe.schema import REPOSITORY, SHIPPED
from sft.run.record import installed_versions

REMEDIES = {
    "packages": "Install requirements.lock on {host}, or share one environment.",
    "code": "Check out the same commit on {host}, without changes.",
    "recipe": "Start the same file with the same overrides on {host}.",
    "plan": "{host} is another kind of machine: write these into the recipe instead of auto, or use machines of one kind.",
    "GPUs": "Use machines with one kind of GPU: the slowest sets the pace of all.",
    "dataset": "Put the files on a folder that all machines share, or copy them to {host} again.",
}
"""Sections of a rank's facts, and what to do if they differ."""
_VARIABLES = "variables"  # the section that may differ, which is shown
_CODE = [(REPOSITORY, pattern) for pattern in ("sft/**/*.py", "sft/**/*.jinja", "eval/**/*.py")]
_CODE.append((SHIPPED, "ds_configs/*.json"))
# Of environment variables that change how ranks communicate; names of network interfaces may differ from node to node.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DIST", "TORCH_CPP_LOG", "FI_", "UCX_")
_MEASURED_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # of the all-reduce that is timed

Facts = Mapping[str, Any]
"""Of one rank: `rank`, `host`, and each section as names and values."""


@dataclass(frozen=True)
class Check:
    """A row of the table; a problem (what is wrong, where, and what to do) stops the job."""

    name: str
    found: str
    problem: str | None = None


def check_ranks(job: Job) -> None:
    """Refuse ranks that differ, before anything is loaded (PreflightError): they would wait for ever, or train each in its own way."""
    refuse(_all_checks(job)[1] if job.hardware.ranks > 1 else [disk(job)])


def preflight(job: Job) -> None:
    """Run every check, show the table, and refuse what is wrong. Raises PreflightError if something is."""
    facts, checks = _all_checks(job, measure=True)
    if distributed.is_rank_0():
        _show(facts, checks)
    refuse(checks)


def _all_checks(job: Job, measure: bool = False) -> tuple[list[Facts], list[Check]]:
    """The facts of every rank, and the checks; the same on every rank."""
    facts = distributed.gather(rank_facts(job, distributed.rank()))
    disk_of_rank_0 = distributed.gather(disk(job))[0]
    return facts, [*compare(facts), _check_shared(job, facts), disk_of_rank_0, _check_all_reduce(job, measure)]


def rank_facts(job: Job, rank: int) -> Facts:
    """What this rank brings to the comparison; plain values, since another version of the program may read them."""
    folder = str(Path(job.recipe.output_dir).expanduser().resolve() / job.name)
    files = {str(file.relative_to(root)): file for root, pattern in _CODE for file in sorted(root.glob(pattern))}
    variables = {
        name: one
        for name, one in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and not name.endswith("_IFNAME")
    }
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "packages": installed_versions(),
        "code": {name: sha256(file.read_bytes()).hexdigest()[:12] for name, file in files.items()},
        "recipe": job.recipe.model_dump(mode="json")
        | {"the run's folder": folder, "the model's commit": job.model.commit},
        "plan": job.plan.settings() | {"processes of the machine": job.hardware.ranks_per_node},
        "GPUs": {"GPU": job.hardware.gpu.name if job.hardware.gpu else "none"},
        # Each file's size, the tokenizer and the template.
        "dataset": {"fingerprint": str(data_key(job.recipe, job.model))[:12]},
        _VARIABLES: variables,
    }


def compare(facts: Sequence[Facts]) -> list[Check]:
    """A row for each section: identical on all ranks, or what differs on the first rank that does."""
    rows = []
    for section in (*REMEDIES, _VARIABLES):
        first, values = facts[0], facts[0].get(section, {})
        other = next((one for one in facts if one.get(section, {}) != values), None)
        if other is None:
            shown = ", ".join(f"{name} {value}" for name, value in values.items()) or "none"
            rows.append(Check(section, shown if len(values) <= 3 else "identical on all ranks"))
            continue
        changes = differences(values, other.get(section, {}))[:3]
        places = _where(first), _where(other)
        found = "; ".join(f"{one.key} is {one.old} on {places[0]} and {one.new} on {places[1]}" for one in changes)
        remedy = REMEDIES.get(section, "").format(host=other["host"])
        rows.append(Check(section, found, f"{found}. {remedy}" if remedy else None))
    return rows


def _where(facts: Facts) -> str:
    return f"{facts['host']} (rank {facts['rank']})"


def _check_shared(job: Job, facts: Sequence[Facts]) -> Check:
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
    """Whether what is still to be written has room in output_dir, beside the checkpoints that an unfinished run has."""
    run = unfinished_run(job)
    there = len(list(run.checkpoints.glob("checkpoint-*"))) if run else 0
    folder = Path(job.recipe.output_dir).expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = estimate_disk(job, there)
    if needed is None:
        return Check("disk", f"{in_words(free)} free in {folder}; what is needed is not known before the model loads")
    words = f"{needed.words}: {in_words(needed.total)}"
    if needed.total <= free:
        return Check("disk", f"{words}; {in_words(free)} free")
    remedy = "Free some space, set output_dir to another disk, or lower train.save_total_limit."
    return Check(
        "disk", f"{in_words(free)} free", f"needed are {words}, and {folder} has {in_words(free)} free. {remedy}"
    )


def _check_all_reduce(job: Job, measure: bool) -> Check:
    """Whether an all-reduce over the backend of the training gives the right sum; with `measure`, also how fast."""
    import torch

    ranks, rank = job.hardware.ranks, distributed.rank()
    if ranks == 1:
        return Check("all-reduce", "one process")
    device = "cuda" if job.hardware.gpu else "cpu"
    tensor = torch.empty(_MEASURED_BYTES[device] // 4 if measure else 1, device=device)
    seconds = []
    for _ in range(4 if measure else 1):
        tensor.fill_(rank + 1)
        started = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    total = tensor.max().item()
    if total != ranks * (ranks + 1) / 2 or tensor.min().item() != total:
        return Check(
            "all-reduce",
            "a wrong sum",
            f"the numbers 1 to {ranks}, one a rank, add up to {total:g} on rank {rank}. The GPUs or the links between them corrupt data: "
            "check the machine, and try NCCL_P2P_DISABLE=1.",
        )
    # A ring moves 2 (n - 1) / n of the tensor over each link. The first all-reduce connects.
    speed = 2 * (ranks - 1) / ranks * tensor.nbytes / min(seconds[1:] or seconds) / 1e9
    if not measure:
        return Check("all-reduce", "the right sum")
    return Check("all-reduce", f"the right sum; {speed:.2f} GB/s")


def refuse(checks: Sequence[Check]) -> None:
    """Raise PreflightError with all that is wrong, in one message."""
    failed = [check for check in checks if check.problem]
    if failed:
        title = "The processes of this job differ:" if failed[0].name != "disk" else "There is no room:"
        raise PreflightError("\n".join([title, *(f"  {check.name}: {check.problem}" for check in failed)]))


def _show(facts: Sequence[Facts], checks: Sequence[Check]) -> None:
    hosts = dict.fromkeys(one["host"] for one in facts)
    print(f"Ranks: {len(facts)}, hosts: {len(hosts)}")
    for host in hosts:
        print(f"  {host}: {', '.join(str(one['rank']) for one in facts if one['host'] == host)}")
    for check in checks:
        print(f"  {check.name:<12} {'FAILED' if check.problem else 'ok':<8} {check.found}")
    sys.stdout.flush()
