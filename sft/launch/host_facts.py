"""What a machine of the job says about itself, to be compared with the others. Imports no torch."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from sft.errors import PreflightError
from sft.plan.job import Job
from sft.recipe.schema import REPOSITORY
from sft.run.record import installed_versions

CODE = ("sft/**/*.py", "sft/**/*.jinja", "eval/**/*.py", "ds_configs/*.json")
VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DIST", "TORCH_CPP_LOG", "FI_", "UCX_")
"""Prefixes of the environment variables that change how ranks talk to each other."""


@dataclass(frozen=True)
class HostFacts:
    """What must be alike on every machine, by name; plain values that travel as JSON."""

    rank: int
    """Of the process; between launchers, of the machine."""

    host: str
    packages: dict[str, str]
    code: dict[str, str]
    """The hash of each file of the program."""

    recipe: dict[str, str]
    """Every key of the recipe with the overrides applied, and where its run goes."""

    plan: dict[str, str]
    data: str | None
    """Key of the data, from data_key: each file's size and both ends, the tokenizer and what else counts; None: not looked up."""

    gpu: str
    driver: str
    variables: dict[str, str]

    @property
    def where(self) -> str:
        """Host and rank, for messages."""
        return f"{self.host} (rank {self.rank})"


def host_facts(job: Job, rank: int, data: str | None = None) -> HostFacts:
    """This machine's facts.

    Args:
        job: The recipe, planned here.
        rank: Of this process, or of this machine.
        data: From data_key.
    """
    recipe = _flat(job.recipe.model_dump(mode="json"))
    folder = str(Path(job.recipe.output_dir).expanduser().resolve() / job.name)
    return HostFacts(
        rank=rank,
        host=socket.gethostname(),
        packages=installed_versions(),
        code=_code(),
        recipe=recipe | {"the run's folder": folder, "the model's commit": str(job.model.commit)},
        plan={name: str(value) for name, value in job.plan.settings().items()},
        data=data,
        gpu=job.hardware.gpu.name if job.hardware.gpu else "none",
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    )


def read_facts(values: dict[str, Any]) -> HostFacts:
    """The facts of another machine, from JSON.

    Raises:
        PreflightError: Its program is another one, with other facts.
    """
    if set(values) != {field.name for field in fields(HostFacts)}:
        raise PreflightError(
            f"The program on {values.get('host', 'one machine')} is of another version than here. Check out the same commit on every "
            "machine."
        )
    return HostFacts(**values)


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat


def _code() -> dict[str, str]:
    files = sorted(file for pattern in CODE for file in REPOSITORY.glob(pattern))
    return {str(file.relative_to(REPOSITORY)): sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def driver_version(file: Path) -> str:
    """The version of NVIDIA's kernel module; `none` where there is none."""
    try:
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", file.read_text())
    except OSError:
        return "none"
    return match[1] if match else "unknown"
