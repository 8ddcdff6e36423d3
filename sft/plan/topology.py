"""Reads from the environment how many processes a job has, and on which nodes.

| who says it | machines | this machine | the first machine | processes here |
|---|---|---|---|---|
| the user | NNODES | NODE_RANK | MASTER_ADDR, MASTER_PORT | NPROC |
| Slurm | SLURM_STEP_NUM_NODES, SLURM_NNODES | SLURM_NODEID | the first of SLURM_JOB_NODELIST | one a GPU |
| PyTorchJob, TrainJob (Kubernetes) | PET_NNODES | PET_NODE_RANK | PET_MASTER_ADDR, PET_MASTER_PORT | PET_NPROC_PER_NODE |
| SkyPilot | SKYPILOT_NUM_NODES | SKYPILOT_NODE_RANK | the first of SKYPILOT_NODE_IPS | one a GPU |

The first row that is set counts; NPROC, MASTER_ADDR and MASTER_PORT are the user's in every row.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from sft.errors import PlanError
from sft.plan.hardware import visible_gpus

DEFAULT_PORT = 29500

UNSET_SLURM = "unset ${!SLURM_*}"
"""Bash: removes every variable that Slurm has set."""


@dataclass(frozen=True)
class Topology:
    """The processes of the job."""

    per_node: int
    nodes: int = 1
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    slurm: str | None = field(default=None, compare=False)
    """What Slurm's variables say, for messages; None where the nodes come from elsewhere."""

    @property
    def ranks(self) -> int:
        """Processes of the whole job."""
        return self.per_node * self.nodes


@dataclass(frozen=True)
class _Source:
    """Names of the variables in which somebody says where this machine stands among the others."""

    nodes: str
    node_rank: str
    address: str | None = None
    port: str = "MASTER_PORT"
    per_node: str = "NPROC"


_USER = _Source("NNODES", "NODE_RANK")
_SLURM = _Source("SLURM_NNODES", "SLURM_NODEID")
_SLURM_STEP = _Source("SLURM_STEP_NUM_NODES", "SLURM_NODEID")
_KUBERNETES = _Source("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE")
_SKYPILOT = _Source("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")


def read_topology() -> Topology:
    """The processes that the environment asks for: one for each visible GPU, or one where there is none.

    Raises:
        PlanError: A value that makes no sense, or several machines without the address of the first.
    """
    source = _source()
    per_node = _per_node(source)
    nodes = whole_number(source.nodes, 1, 1)
    if source in (_SLURM, _SLURM_STEP):
        _check_tasks(nodes)
    port = whole_number("MASTER_PORT", whole_number(source.port, _default_port(source), 1, 65535), 1, 65535)
    if nodes == 1:
        return Topology(per_node, master_port=port)
    node_rank = whole_number(source.node_rank, -1, 0)
    if node_rank < 0:
        raise PlanError(
            f"{source.nodes}={nodes}, and {source.node_rank} is not set. Set it to 0 on the first machine, 1 on the second, and so on."
        )
    if node_rank >= nodes:
        raise PlanError(
            f"{source.node_rank}={node_rank} with {source.nodes}={nodes}: machines are numbered from 0 to {nodes - 1}."
        )
    address = os.environ.get("MASTER_ADDR", "").strip() or _first_machine(source)
    if not address:
        raise PlanError(
            f"{source.nodes}={nodes}, and MASTER_ADDR is not set. Set it to the first machine's name or address, on every machine."
        )
    slurm = _slurm_words(source) if source in (_SLURM, _SLURM_STEP) else None
    return Topology(per_node, nodes, node_rank, address, port, slurm)


def _slurm_words(source: _Source) -> str:
    names = ("SLURM_JOB_ID", source.nodes, "SLURM_NODEID", "SLURM_JOB_NODELIST")
    said = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return (
        f"Slurm's variables say where the machines are ({said}), and this one is {socket.gethostname()}. If they are left over from "
        f"another job, unset them: {UNSET_SLURM}. In a batch script start the command with srun --ntasks-per-node=1."
    )


def whole_number(name: str, default: int, least: int, most: int | None = None) -> int:
    """A variable of the environment as a number, or the default where it is empty.

    Raises:
        PlanError: It is none, or outside the bounds.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or int(text) < least or (most is not None and int(text) > most):
        raise PlanError(
            f"{name}={text}: must be a whole number of at least {least}"
            + ("." if most is None else f" and at most {most}.")
        )
    return int(text)


def _source() -> _Source:
    if "NNODES" in os.environ:
        return _USER
    # An allocation may be larger than the step that was started in it.
    for source in (_SLURM_STEP, _SLURM, _KUBERNETES, _SKYPILOT):
        if os.environ.get(source.nodes, "").strip():
            return source
    return _USER


def _per_node(source: _Source) -> int:
    wanted = os.environ.get("NPROC", "").strip().lower()
    if wanted == "auto":
        return max(1, len(visible_gpus()))
    name = "NPROC" if wanted else source.per_node
    if os.environ.get(name, "").strip().lower() in ("auto", "gpu"):
        return max(1, len(visible_gpus()))
    return whole_number(name, max(1, len(visible_gpus())), 1)


def _default_port(source: _Source) -> int:
    # Every machine of a Slurm job knows its number, and two jobs may share a machine.
    if source in (_SLURM, _SLURM_STEP) and "SLURM_JOB_ID" in os.environ:
        return 20000 + whole_number("SLURM_JOB_ID", 0, 0) % 10000
    return DEFAULT_PORT


def _check_tasks(nodes: int) -> None:
    # SLURM_STEP_NUM_TASKS is srun's own; outside a step only what sbatch was asked for is known.
    asked = whole_number("SLURM_NTASKS_PER_NODE", 1, 1) * nodes
    # In a batch script without srun, sbatch --ntasks-per-node says what srun would start; on one machine this launcher is alone.
    tasks = whole_number("SLURM_STEP_NUM_TASKS", asked if nodes > 1 else 1, 1)
    if tasks > nodes:
        raise PlanError(
            f"Slurm starts {tasks} tasks on {nodes} machine{'s' if nodes > 1 else ''}, and this launcher wants one on each: it starts the "
            "processes, one for each GPU. Use srun --ntasks-per-node=1. If these variables are left over from another job, unset them: "
            f"{UNSET_SLURM}."
        )


def _first_machine(source: _Source) -> str | None:
    if source in (_SLURM, _SLURM_STEP):
        nodelist = os.environ.get("SLURM_STEP_NODELIST" if source is _SLURM_STEP else "SLURM_JOB_NODELIST")
        return _first_slurm_host(nodelist or os.environ.get("SLURM_JOB_NODELIST", ""))
    if source is _SKYPILOT:
        return next(iter(os.environ.get("SKYPILOT_NODE_IPS", "").split()), None)
    return os.environ.get(source.address, "").strip() if source.address else None


def _first_slurm_host(nodelist: str) -> str | None:
    if not nodelist:
        return None
    try:
        told = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True, timeout=30
        )
        return told.stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return next(expanded(nodelist), None)  # a container without Slurm's programs


def expanded(nodelist: str) -> Iterator[str]:
    """The machines of a list as Slurm writes it.

    >>> list(expanded("gpu[01-03,07],login"))
    ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login']
    """
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        yield from _expanded_part(part)


def _expanded_part(part: str) -> Iterator[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        yield part
        return
    before, numbers, after = match.groups()
    for item in numbers.split(","):
        first, _, last = item.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return  # a list of another kind: who asks says that the address is not known
        for number in range(int(first), int(last or first) + 1):
            for rest in _expanded_part(after):
                yield f"{before}{number:0{len(first)}d}{rest}"
