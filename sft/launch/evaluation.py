"""Start an evaluation as several processes that share its documents. `python -m eval.run` becomes this program where it needs several."""

from __future__ import annotations

import os

from eval.harness.processes import decided_placement
from sft.launch.torchrun import start
from sft.plan.hardware import cpu_cores
from sft.plan.topology import Topology
from sft.program import run_main


def main(arguments: list[str]) -> None:
    """Start the processes, and end as they do."""
    placement = decided_placement()
    assert placement is not None
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // placement.processes)))
    start(Topology(placement.processes), ["-m", "eval.run", *arguments], stopping="stopping.")


if __name__ == "__main__":
    run_main(main)
