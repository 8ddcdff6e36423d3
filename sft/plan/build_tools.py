"""Refuses what is compiled on this machine where that cannot be done."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from sft.errors import PlanError


def check_build_tools(what: str, programs: Sequence[Sequence[str]], instead: str) -> None:
    """Refuse what needs a compiler and Python.h, which Triton, torch.compile and DeepSpeed's operations include.

    Args:
        what: Key and what is compiled for it.
        programs: Names of each program that must be on PATH; one of them is enough.
        instead: What to do without.

    Raises:
        PlanError: Something is missing.
    """
    missing = [f"{' or '.join(names)} on PATH" for names in programs if not any(map(shutil.which, names))]
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing += [] if header.is_file() else [str(header)]
    if missing:
        raise PlanError(
            f"{what}: it is compiled on this machine, and there is no {' and no '.join(missing)}. Install a compiler and Python's headers "
            "(apt-get install build-essential python3-dev, or a Python of uv's; ninja is in .venv/bin, which scripts/sft.sh puts on PATH), "
            f"or {instead}."
        )
