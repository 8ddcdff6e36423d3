"""Summarizes a trace of torch.profiler, as train.profile writes it: kernels, and what the host waits for."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(trace: Path) -> Iterator[dict[str, Any]]:
    """Of the steps in a trace, rows for gpu.py's table."""
    yield from summary(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])


def summary(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Per step: how long the GPU computes, what the host waits for, and the kernels that take most; without a GPU, the operations."""
    events = [one for one in events if one.get("ph") == "X"]
    steps = len({one["name"] for one in events if one["name"].startswith("ProfilerStep#")})
    kind = "kernel" if any(one.get("cat") == "kernel" for one in events) else "cpu_op"
    worked = sorted((one["ts"], one["dur"], one["name"]) for one in events if one.get("cat") == kind)
    busy, end, times = 0.0, 0.0, Counter()
    for start, length, name in worked:
        busy += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
        times[re.sub(r"[|`\n]", " ", name)[:80]] += length
    span = end - worked[0][0]
    yield {"what": "step", "milliseconds": span / steps / 1000}
    yield {"what": "of it the GPU computes" if kind == "kernel" else "of it operations", "share": busy / span}
    waits = [one["dur"] for one in events if one.get("cat") == "cuda_runtime" and "Synchronize" in one["name"]]
    yield {"what": "host waits for the GPU", "times": len(waits) / steps, "milliseconds": sum(waits) / steps / 1000}
    copies = [one["dur"] for one in events if one.get("cat") == "gpu_memcpy" and "DtoH" in one["name"]]
    yield {"what": "copies to the host", "times": len(copies) / steps, "milliseconds": sum(copies) / steps / 1000}
    for name, length in times.most_common(12):
        yield {"what": f"`{name}`", "milliseconds": length / steps / 1000, "share": length / span}
