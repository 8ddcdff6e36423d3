"""Start an evaluation as several processes that share its documents. Called by eval/run.py, which becomes this program.

What eval/run.py has looked at on the GPUs (how much memory is free) leaves nothing behind on them this way.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import NoReturn

from eval.models.placement import Placement
from sft.launch.torchrun import start
from sft.plan.hardware import cpu_cores
from sft.plan.topology import Layout
from sft.program import run_main
from sft.signals import held_back

PLACEMENT = "SFT_EVAL_PLACEMENT"
"""Where the launcher tells the processes what it has decided: they would find each other's memory on the GPUs."""


def become_launcher(placement: Placement, arguments: list[str]) -> NoReturn:
    """Replace this process by one that starts the others.

    Args:
        placement: How many there are.
        arguments: Of eval/run.py.
    """
    os.environ[PLACEMENT] = json.dumps(asdict(placement))
    sys.stdout.flush()
    sys.stderr.flush()
    with held_back():
        os.execv(sys.executable, [sys.executable, "-m", "eval.harness.launch", *arguments])


def decided_placement() -> Placement | None:
    """What the launcher has decided; None where this process was not started by it."""
    told = os.environ.get(PLACEMENT)
    return Placement(**json.loads(told)) if told else None


def main(arguments: list[str]) -> None:
    """Start the processes, and end as they do."""
    placement = decided_placement()
    assert placement is not None
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // placement.processes)))
    start(Layout(placement.processes), ["-m", "eval.run", *arguments], stopping="stopping.")


if __name__ == "__main__":
    run_main(main)
