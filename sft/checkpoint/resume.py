"""Which checkpoint a run goes on from: the newest that can be read whole; and why newer ones were passed over. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.checkpoint.manifest import fault, read_manifest
from sft.errors import RunError
from sft.files import read_json
from sft.run.directory import Run, read_lines

_SHOWN = 5
"""Missing steps that are listed."""


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


def _renamed(checkpoint: Path) -> str | None:
    step = read_manifest(checkpoint).get("step", step_of(checkpoint))
    return None if step == step_of(checkpoint) else f"it is of step {step}: rename it back to checkpoint-{step}"


def lost_lines(run: Run, checkpoint: Path) -> str | None:
    """Compare metrics.jsonl with what the checkpoint says was logged; None where no line is missing."""
    history = read_json(checkpoint / "trainer_state.json").get("log_history", [])
    logged = {entry["step"] for entry in history if "loss" in entry}
    missing = sorted(logged - {line["step"] for line in read_lines(run.metrics_file)})
    if not missing:
        return None
    shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
    return (
        f"{run.metrics_file} lacks {len(missing)} of the {len(logged)} lines up to {checkpoint.name} (step {shown}): it was edited or "
        "damaged. The curve and the mean loss leave them out. To keep them, restore the file from a copy before you resume."
    )


def changed_tokens(checkpoint: Path, tokenizer: Any) -> list[str]:
    """Compare the special tokens with those that a checkpoint was saved with: what was trained may not hold them.

    Args:
        checkpoint: Verified.
        tokenizer: Of this start.
    """
    file, changes = checkpoint / "tokenizer_config.json", list[str]()
    saved = read_json(file) if file.exists() else {}
    for name in ("pad_token", "eos_token", "bos_token"):
        was = saved.get(name)
        was = was.get("content") if isinstance(was, dict) else was
        if name in saved and was != (now := getattr(tokenizer, name)):
            changes.append(
                f"Warning: the tokenizer's {name} was {was!r} when {checkpoint.name} was written and is {now!r} now, which final/ gets. "
                "Restore the tokenizer's files to go on as before."
            )
    return changes


def choose_checkpoint(run: Run) -> Choice:
    """The newest checkpoint that verifies. Reads every byte of each that is tried: for one rank to do, while the others wait.

    Args:
        run: One that goes on.

    Raises:
        RunError: There are checkpoints, and none of them verifies.
    """
    passed_over: dict[str, str] = {}
    for checkpoint in checkpoints_of(run):
        why = fault(checkpoint) or _renamed(checkpoint)
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
