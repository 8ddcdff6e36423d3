"""Refuse mistakes of launching that would otherwise train something else, or hang. Imports no torch."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sft.errors import PlanError
from sft.launch.job import CheckedRecipe, check_recipe
from sft.launch.topology import Topology, read_topology
from sft.plan.hardware import check_visible_gpus, detect_hardware, whole_number
from sft.program import shown_command
from sft.recipe.schema import REPOSITORY

_LAUNCHERS = {
    "TORCHELASTIC_RUN_ID": "torchrun or accelerate launch",
    "OMPI_COMM_WORLD_RANK": "mpirun",
    "LOCAL_RANK": "a launcher",
}


def check_installed() -> None:
    """Refuse packages older than pyproject.toml allows (PlanError); newer ones are untested, and run."""
    file = REPOSITORY / "pyproject.toml"
    if file.is_file():
        needed = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        needed = [line for line in requires("sft-recipes") or [] if "extra ==" not in line]
    for requirement in map(Requirement, needed):
        found = next(iter(distributions(name=requirement.name)), None)
        least = SpecifierSet(",".join(str(one) for one in requirement.specifier if one.operator == ">="))
        with suppress(InvalidVersion):
            # A vendor's 5.17.0a0 counts as 5.17.
            if found and not least.contains(Version(found.version).base_version):
                raise PlanError(
                    f"{found.name} {found.version} is too old: {least} is needed. It comes from {found.locate_file('')}. Start by "
                    "scripts/sft.sh, or unset PYTHONPATH; or install what is pinned: bash scripts/setup.sh."
                )


def check_started_once() -> None:
    """Refuse a launcher around this launcher (PlanError): each of its processes would start a whole job."""
    for name, launcher in _LAUNCHERS.items():
        if name in os.environ:
            raise PlanError(
                f"{name}={os.environ[name]} is set: {launcher} has started this, and each of its processes would start a whole "
                f"job. Run {shown_command('sft')} by itself, it starts one process for each GPU; or have the launcher start -m sft.train. "
                f"Where it is a leftover: unset {name}."
            )


def checked_recipe_and_topology(recipe: Path, overrides: Sequence[str]) -> tuple[CheckedRecipe, Topology]:
    """The recipe on this machine, with as many processes as the environment asks for. Raises UserError if one of them is wrong."""
    check_visible_gpus()
    topology = read_topology()
    return check_recipe(recipe, overrides, detect_hardware(topology.ranks, topology.per_node)), topology


def check_rank_variables() -> None:
    """Refuse an incomplete set of a launcher's variables (PlanError): the ranks would never meet, or each would train alone."""
    ranks = whole_number("WORLD_SIZE", 1, 1)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        if not os.environ.get(name, "").strip():
            os.environ.pop(name, None)  # empty is not set, for the libraries too
    for name, least, most in (("LOCAL_WORLD_SIZE", 1, None), ("LOCAL_RANK", 0, None), ("RANK", 0, ranks - 1)):
        whole_number(name, least, least, most)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if ranks > 1 and missing:
        raise PlanError(
            f"WORLD_SIZE={ranks}, and not set: {', '.join(missing)}. A launcher sets them in each process: {shown_command('sft')}, or "
            "torchrun --nproc-per-node N -m sft.train. For a single process unset WORLD_SIZE."
        )
    named, there = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    if ranks > 1 and any(name.strip() not in ("", *there) for name in named.split(",")):
        raise PlanError(
            f"GLOO_SOCKET_IFNAME={named}: {socket.gethostname()} has the network interfaces {', '.join(there)}. Set one, or unset it."
        )
