"""How fast a run was, from the lines of metrics.jsonl. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from eval.report.formats import MISSING, is_number, number

Line = Mapping[str, Any]


def _rate(line: Line) -> bool:
    rate = line.get("tokens_per_second")
    return isinstance(rate, int | float) and rate > 0


def _timed(lines: Sequence[Line]) -> list[tuple[Line, float]]:
    """The lines, each with the seconds that its steps took; without the first, whose steps start everything up."""
    found = []
    for before, line in pairwise(lines):
        if all(is_number(one.get("tokens_seen")) for one in (before, line)) and _rate(line):
            tokens = line["tokens_seen"] - before["tokens_seen"]
            found.append((line, tokens / line["tokens_per_second"]))
    return found


def _mean(timed: Sequence[tuple[Line, float]], key: str) -> float | None:
    """The mean of a rate over the time of the steps."""
    known = [(line[key], seconds) for line, seconds in timed if is_number(line.get(key))]
    total = sum(seconds for _, seconds in known)
    return sum(rate * seconds for rate, seconds in known) / total if total > 0 else None


def _middle(lines: Sequence[Line], key: str) -> str:
    values = [line[key] for line in lines if is_number(line.get(key))]
    return f"{median(values):.3f} s" if values else MISSING


def mean_rate(lines: Sequence[Line]) -> float | None:
    """Tokens per second, in the mean after the first line."""
    return _mean(_timed(lines), "tokens_per_second")


def speed_facts(lines: Sequence[Line]) -> dict[str, str]:
    """The rows of the report; docs/metrics.md says what each figure is.

    Args:
        lines: Of metrics.jsonl, by step.
    """
    timed = _timed(lines)
    shown = [line for line, _ in timed]
    share = _mean(timed, "mfu")
    known = [(line["data_seconds"], seconds) for line, seconds in timed if is_number(line.get("data_seconds"))]
    total = sum(seconds for _, seconds in known)
    rows = {
        "Tokens per second, mean after the first logged step": number(mean_rate(lines), ",.0f"),
        "Labelled tokens per second": number(_mean(timed, "labelled_tokens_per_second"), ",.0f"),
        "Share of the GPUs' bf16 peak (MFU)": f"{share:.1%}" if share is not None else "not known",
        "Time of a step, p50 and p90": f"{_middle(shown, 'step_seconds_p50')}, {_middle(shown, 'step_seconds_p90')}",
        "Share of it waiting for data": f"{sum(data for data, _ in known) / total:.1%}" if total > 0 else MISSING,
    }
    return rows if timed else dict.fromkeys(rows, MISSING)
