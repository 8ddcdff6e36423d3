"""After training: score base and tuned, and write the report. `python -m sft.finish RUN`

The first rank becomes this program, so that nothing of the training is left in memory or on the GPU beside the evaluation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sft.errors import run_main
from sft.run_directory import Run, find_run

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher has told the rank; the evaluation is a process by itself."""


def become_finish(run: Run) -> NoReturn:
    """Replace this process; the launcher goes on waiting for it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHED and not name.startswith(("TORCHELASTIC", "ACCELERATE_", "FSDP_"))
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "sft.finish", str(run.path)], environment)


def main(argv: Sequence[str]) -> None:
    """Evaluate where the recipe asks for it, and write the report.

    Raises:
        SystemExit: The evaluation failed; the training is finished all the same.
    """
    from eval.report import write_report

    run = find_run(Path(argv[0]))
    evaluation = run.recipe().eval
    if not (evaluation.tasks or evaluation.suite):
        print(f"Report: {write_report(run)}", flush=True)
        return
    started = time.monotonic()
    status = subprocess.run([sys.executable, "-m", "eval.run", str(run.path)], check=False).returncode
    timings = run.record["timings"] | {"evaluate_seconds": time.monotonic() - started}
    run.update(timings=timings, evaluation="finished" if status == 0 else "failed")
    report = write_report(run)  # once more: eval.run has shown it, without its own duration
    if status:
        print(f"Report: {report}", flush=True)
        print(
            f"The model is trained; its evaluation is not complete. Again: bash scripts/eval.sh {run.path}",
            file=sys.stderr,
        )
        raise SystemExit(status)


if __name__ == "__main__":
    run_main(main)
