"""Reads from the environment how many processes a job has, and on which nodes.

| who sets it | nodes | this node | node 0 | processes per node |
|---|---|---|---|---|
| the user | NNODES | NODE_RANK | MASTER_ADDR, MASTER_PORT | NPROC |
| Slurm | SLURM_STEP_NUM_NODES, SLURM_NNODES | SLURM_NODEID | the first of SLURM_JOB_NODELIST | one per GPU |
| PyTorchJob, TrainJob (Kubernetes) | PET_NNODES | PET_NODE_RANK | PET_MASTER_ADDR, PET_MASTER_PORT | PET_NPROC_PER_NODE |
| SkyPilot | SKYPILOT_NUM_NODES | SKYPILOT_NODE_RANK | the first of SKYPILOT_NODE_IPS | one per GPU |

The first row that is set counts; NPROC, MASTER_ADDR and MASTER_PORT are the user's in every row.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field

from sft.errors import PlanError
from sft.plan.hardware import visible_gpus, whole_number

DEFAULT_PORT = 29500

UNSET_SLURM = "unset SLURM_NNODES SLURM_STEP_NUM_NODES"  # not all: commands of Slurm's may need SLURM_CONF


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
    """The variables of one row of the table."""

    nodes: str
    node_rank: str
    address: str
    port: str = "MASTER_PORT"
    per_node: str = "NPROC"

    @property
    def is_slurm(self) -> bool:
        return self.nodes.startswith("SLURM")


_USER = _Source("NNODES", "NODE_RANK", "MASTER_ADDR")
_CLUSTERS = (
    # An allocation may be larger than the step that was started in it.
    _Source("SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST"),
    _Source("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_NODELIST"),
    _Source("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"),
    _Source("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
)


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def read_topology() -> Topology:
    """The processes that the environment requests: one for each visible GPU, or one where there is none. Raises PlanError."""
    source = _USER if "NNODES" in os.environ else next((one for one in _CLUSTERS if _variable(one.nodes)), _USER)
    per_node, nodes = _per_node(source), whole_number(source.nodes, 1, 1)
    if source.is_slurm:
        _check_tasks(nodes)
    port = whole_number("MASTER_PORT", whole_number(source.port, _default_port(source), 1, 65535), 1, 65535)
    if nodes == 1:
        return Topology(per_node, master_port=port)
    node_rank = whole_number(source.node_rank, -1, 0)
    if node_rank < 0:
        remedy = "Set it to 0 on the first machine, 1 on the second, and so on."
        if source.is_slurm:
            remedy = f"srun sets it, on each machine.\n{_slurm_words(source)}"
        raise PlanError(f"{source.nodes}={nodes}, and {source.node_rank} is not set. {remedy}")
    if node_rank >= nodes:
        raise PlanError(
            f"{source.node_rank}={node_rank} with {source.nodes}={nodes}: machines are numbered from 0 to {nodes - 1}."
        )
    address = _variable("MASTER_ADDR") or _first_node(source)
    if not address:
        raise PlanError(
            f"{source.nodes}={nodes}, and MASTER_ADDR is not set. Set it to the first machine's name or address, on every machine."
        )
    return Topology(per_node, nodes, node_rank, address, port, _slurm_words(source) if source.is_slurm else None)


def _per_node(source: _Source) -> int:
    name = "NPROC" if _variable("NPROC") else source.per_node
    gpus = max(1, len(visible_gpus()))
    return gpus if _variable(name).lower() in ("auto", "gpu") else whole_number(name, gpus, 1)


def _default_port(source: _Source) -> int:
    # Every node of a Slurm job knows its number, and two jobs may share a node.
    return 20000 + whole_number("SLURM_JOB_ID", DEFAULT_PORT, 0) % 10000 if source.is_slurm else DEFAULT_PORT


def _check_tasks(nodes: int) -> None:
    # In a batch script without srun, sbatch --ntasks-per-node says what srun would start; on one node this launcher is alone.
    requested = whole_number("SLURM_NTASKS_PER_NODE", 1, 1) * nodes if nodes > 1 else 1
    tasks = whole_number("SLURM_STEP_NUM_TASKS", requested, 1)
    if tasks > nodes:
        raise PlanError(
            f"Slurm starts {tasks} tasks on {nodes} machine{'s' if nodes > 1 else ''}, and this launcher wants one on each: it starts the "
            f"processes, one for each GPU. Use srun --ntasks={nodes} --ntasks-per-node=1. If these variables are left over from another "
            f"job, unset them: {UNSET_SLURM}."
        )


def _first_node(source: _Source) -> str | None:
    if source.is_slurm:
        return first_slurm_node(_variable(source.address) or _variable("SLURM_JOB_NODELIST"))
    return next(iter(_variable(source.address).split()), None)


def first_slurm_node(nodelist: str) -> str | None:
    """The first node of a list as Slurm writes it; None where it is empty or of another form.

    >>> first_slurm_node("gpu[01-03,07]-ib,login")
    'gpu01-ib'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    name = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", first[0]) if first else ""
    return name if name and "[" not in name else None


def _slurm_words(source: _Source) -> str:
    names = ("SLURM_JOB_ID", source.nodes, "SLURM_NODEID", "SLURM_JOB_NODELIST")
    said = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return (
        f"Slurm's variables say where the machines are ({said}), and this one is {socket.gethostname()}. If they are left over from "
        f"another job, unset them: {UNSET_SLURM}. In a batch script or an allocation start the command with srun --ntasks-per-node=1."
    )
