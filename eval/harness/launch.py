"""How an evaluation becomes several processes that share its documents. sft/launch/torchrun.py starts them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import NoReturn

from eval.models.placement import Placement
from sft.plan.hardware import cpu_cores
from sft.signals import held_back

PLACEMENT = "SFT_EVAL_PLACEMENT"
"""Where the launcher tells the processes what it has decided: they would find each other's memory on the GPUs."""


def become_launcher(placement: Placement, arguments: list[str]) -> NoReturn:
    """Replace this process by one that starts the others: a look at the GPUs leaves memory of this one on them.

    Args:
        placement: How many there are.
        arguments: Of eval/run.py.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // placement.processes)))
    layout = json.dumps({"per_node": placement.processes})
    os.environ[PLACEMENT] = json.dumps(asdict(placement))
    sys.stdout.flush()
    sys.stderr.flush()
    with held_back():
        os.execv(
            sys.executable,
            [sys.executable, "-m", "sft.launch.torchrun", layout, "0", "0", "-m", "eval.run", *arguments],
        )


def decided_placement() -> Placement | None:
    """What the launcher has decided; None where this process was not started by it."""
    told = os.environ.get(PLACEMENT)
    return Placement(**json.loads(told)) if told else None
