"""Several sides of one measurement: each in a process of its own, timed by the lines it prints, refused where losses differ."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"step +\d+/\d+ +loss |\{'loss': ")
"""The line of a step, ours and transformers'."""


def use_the_cores() -> None:
    """What sft/launch/main.py would set, for every side alike."""
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def seconds_to_steps(words: Sequence[str], folder: Path, until_first: bool = False) -> list[float]:
    """Seconds from the command to each line that reports a step.

    Args:
        words: The command.
        folder: Of this run; its errors and caches go beside.
        until_first: End it after the first of these lines.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}.cache"}
    errors, seconds = Path(f"{folder}.errors"), []
    with errors.open("w") as file:
        started = time.monotonic()
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if STEP.match(line):
                seconds.append(time.monotonic() - started)
                if until_first:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
        status = process.wait()
    if not seconds or (status and not until_first):
        raise SystemExit(f"{' '.join(words)[:200]} failed:\n{errors.read_text()[-3000:]}")
    return seconds


def losses(folder: Path) -> list[float]:
    """What a finished run has logged, in full precision: ours in metrics.jsonl, transformers' with its last checkpoint."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"))
    if states:
        return [line["loss"] for line in json.loads(states[-1].read_text())["log_history"] if "loss" in line]
    lines = next(folder.glob("*/[0-9]*/metrics.jsonl")).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def check_agreement(found: Mapping[str, Sequence[float]], what: str, tolerance: float = 1e-4) -> None:
    """Refuse to go on where the sides did not compute the same.

    Args:
        found: Of each side, its losses.
        what: Names the work, for the message.
        tolerance: Greatest difference allowed.
    """
    lengths = {len(values) for values in found.values()}
    apart = max(max(values) - min(values) for values in zip(*found.values(), strict=False))
    finite = all(math.isfinite(value) for values in found.values() for value in values)
    if len(lengths) > 1 or not finite or apart > tolerance:
        for side, values in found.items():
            print(f"{side:20} {values}")
        print(f"The losses of {what} do not agree: no speed is shown.")
        raise SystemExit(1)
    print(f"Same work: the losses of {what} agree to {apart:.1e} ({', '.join(found)}).", flush=True)


def turned(sides: Sequence[str], number: int) -> list[str]:
    """Each round begins with another side, so that none always meets the machine first."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def show(title: str, values: Mapping[str, Sequence[float]], against: str, unit: str) -> None:
    """Print each side's values, and their ratio to one side's, round by round.

    Args:
        title: What is measured.
        values: Of each side, one a round.
        against: The side that the others are compared with.
        unit: Of the values.
    """
    print(f"\n{title}, median (min to max); ratio to {against}, round by round")
    for side, measured in values.items():
        ratios = [one / other for one, other in zip(measured, values[against], strict=True)]
        spread = f"{median(measured):,.2f} {unit} ({min(measured):,.2f} to {max(measured):,.2f})"
        print(f"{side:40} {spread:40} {median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
