"""When a job stands still, and which rank it waits for. Pure: sft/train/watchdog.py looks and tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sft.parallel.progress import CHECKPOINT, EVALUATION, HELD_OUT, START, Place


@dataclass(frozen=True)
class Patience:
    """How long a rank may stay where it is, in seconds, before it is called stalled."""

    least: float
    steps: float
    """As a multiple of the median step."""

    unknown: float
    """While the median is not known: the first steps compile kernels and allocate."""

    def limit(self, phase: str, step_seconds: float | None, timeout: float) -> float:
        """Seconds in this phase.

        Args:
            phase: Of sft/parallel/progress.py. A checkpoint is one phase, and may take as long as the group waits for it.
            step_seconds: The median step, where it is known.
            timeout: Of the process group. A stall is told before the group gives up, when half of it is over.

        >>> Patience(60, 10, 300).limit("forward", 20.0, timeout=600)
        200.0
        """
        most = timeout / 2
        if phase in (START, CHECKPOINT, HELD_OUT, EVALUATION):
            return most
        return min(most, self.unknown if step_seconds is None else max(self.least, self.steps * step_seconds))


ENDS_AFTER = 20
"""Median steps in one place, after which a job is ended; train.ddp_timeout where that is longer."""

FIRST_STEPS = 10
"""Times longer for the first steps, which compile, and for what comes before them."""


def end_limit(phase: str, step_seconds: float | None, timeout: float, ranks: int) -> float | None:
    """Seconds in one place after which a job is ended; None where it may take as long as it takes.

    Args:
        phase: Of sft/parallel/progress.py.
        step_seconds: The median step; None while the first steps are trained.
        timeout: train.ddp_timeout: how long a rank waits for the others.
        ranks: Of the job. Of several those that wait give up first, and say for whom.

    >>> end_limit("forward", 2.0, 600, 1), end_limit("forward", 60.0, 600, 1), end_limit("checkpoint", 2.0, 600, 1)
    (600, 1200.0, None)
    """
    if phase == CHECKPOINT:
        return None
    begins = phase == START or step_seconds is None
    limit = FIRST_STEPS * timeout if begins else max(timeout, ENDS_AFTER * (step_seconds or 0))
    return limit if ranks == 1 else 1.1 * limit + 10


ALWAYS, DEBUG = Patience(60, 10, 300), Patience(20, 5, 120)


@dataclass(frozen=True)
class Report:
    """What a rank says of itself."""

    rank: int
    host: str
    pid: int
    stalled: bool = False
    """False: it moves, or it could not say that it does not."""

    place: Place | None = None
    seconds: float = 0.0
    """That it has stayed there."""

    frames: tuple[str, ...] = ()
    """Of its main thread, the innermost last."""

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self) | {"place": list(self.place) if self.place else None}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        """As as_json wrote it."""
        place = Place(*value["place"]) if value["place"] else None
        return cls(**value | {"place": place, "frames": tuple(value["frames"])})

    @property
    def waits(self) -> bool:
        """Whether its main thread is inside a collective, by the frames that Python sees."""
        return bool(self.frames) and any(part in self.frames[-1] for part in ("torch/distributed/", "deepspeed/comm/"))


def behind(reports: Sequence[Report]) -> list[Report]:
    """The ranks that the others wait for; none where all stand in the same place.

    First those that say nothing. Else those that have come least far. Of ranks that have come equally far, those that compute
    while the others wait in a collective.
    """
    silent = [report for report in reports if report.place is None or not report.stalled]
    if silent:
        return silent
    least = min(report.place[:2] for report in reports if report.place)
    late = [report for report in reports if report.place and report.place[:2] == least]
    if len(late) == len(reports):
        late = [report for report in reports if not report.waits]
    return late if len(late) < len(reports) or len(reports) == 1 else []


def message(reports: Sequence[Report], step_seconds: float | None, files: str, outcome: str) -> str:
    """What a person is told of a stall.

    Args:
        reports: Of all ranks.
        step_seconds: The median step, where it is known.
        files: Where the stacks are.
        outcome: What happens next.
    """
    late = behind(reports)
    standing = [report for report in reports if report.stalled and report.place]
    seconds = max((report.seconds for report in standing), default=0.0)
    usual = f" A step takes {step_seconds:.2g} s." if step_seconds is not None else ""
    lines = [f"The training has not moved for {seconds:.0f} s.{usual}"]
    lines += [about(report) for report in late[:4]]
    if len(late) > 4:
        lines.append(f"So {'is' if len(late) == 5 else 'are'} {ranks(report.rank for report in late[4:])}.")
    if not late:
        lines.append(
            "All ranks stand in the same place, so none is behind: the network between them may be gone, or one has sent what the others "
            "did not expect (debug=true compares)."
        )
    lines += _waiting([report for report in standing if report not in late])
    return "\n".join([*lines, f"Stacks: {files}", outcome])


def about(report: Report) -> str:
    """Why the others wait for a rank, in one sentence and the frames where it stands."""
    who = f"Rank {report.rank} ({report.host}, pid {report.pid})"
    if not report.stalled or report.place is None:
        return (
            f"{who} says nothing: it is stopped (SIGSTOP, a debugger), hangs where Python cannot run, or its machine or the shared folder "
            "is gone. The others wait for it."
        )
    where = "".join(f"\n    {frame}" for frame in report.frames)
    return f"{who} is behind: {report.place}, for {report.seconds:.0f} s.{where}"


def _waiting(reports: Iterable[Report]) -> list[str]:
    places: defaultdict[str, list[int]] = defaultdict(list)
    for report in reports:
        inner = f" ({report.frames[-1]})" if report.frames else ""
        places[f"{report.place}{inner}"].append(report.rank)
    return [f"Waiting: {ranks(numbers)} in {place}" for place, numbers in places.items()]


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in words.

    >>> ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if one else 's'} {', '.join(words)}"
