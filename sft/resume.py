"""Which checkpoint a run goes on from: the newest that can be read whole; and why newer ones were passed over. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sft.errors import RunError
from sft.manifest import fault
from sft.run_directory import Run


@dataclass(frozen=True)
class Choice:
    """Where a start goes on."""

    checkpoint: Path | None
    """None: at the first step."""

    passed_over: dict[str, str]
    """Names of newer checkpoints, and what is wrong with each."""

    @property
    def step(self) -> int:
        """Optimizer steps that are done; 0 for none."""
        return step_of(self.checkpoint) if self.checkpoint else 0

    def lines(self) -> list[str]:
        """What the user is told."""
        if self.checkpoint is None:
            return []
        name = self.checkpoint.name
        told = [f"passed over: {other}: {why}" for other, why in self.passed_over.items()]
        return [*told, f"This run was not finished: it goes on from {name}. train.resume=never starts another."]


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written.

    >>> step_of(Path("checkpoints/checkpoint-20"))
    20
    """
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_of(run: Run) -> list[Path]:
    """All that have the name of a complete checkpoint, the newest first."""
    found = [path for path in run.checkpoints.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def choose_checkpoint(run: Run) -> Choice:
    """The newest checkpoint that verifies. Reads every byte of each that is tried: for one rank to do, while the others wait.

    Args:
        run: One that goes on.

    Raises:
        RunError: There are checkpoints, and none of them verifies.
    """
    passed_over: dict[str, str] = {}
    for checkpoint in checkpoints_of(run):
        why = fault(checkpoint)
        if why is None:
            return Choice(checkpoint, passed_over)
        passed_over[checkpoint.name] = why
    if passed_over:
        reasons = [f"  {name}: {why}" for name, why in passed_over.items()]
        raise RunError(
            "\n".join(
                [
                    f"{run.path} is unfinished, and none of its checkpoints can be used:",
                    *reasons,
                    "Bring one back from a copy. Or start over, which is never done unasked: train.resume=never makes a new run, and "
                    "leaves this one as it is.",
                ]
            )
        )
    return Choice(None, {})
