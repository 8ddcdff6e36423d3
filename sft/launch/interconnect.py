"""What joins the GPUs of a machine, by `nvidia-smi topo -m`, and what it should carry.

The ranges are rules of thumb for the bus bandwidth of an all-reduce, from the nominal speeds of the links; none of them was
measured by this project. A measurement below its range is worth a look, and never stops a run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from sft.launch.host_comparison import Check


@dataclass(frozen=True)
class Link:
    """A way between two devices."""

    name: str
    low: float
    """GB/s, below which something is worth a look."""

    high: float


ACROSS_MACHINES = Link("a network of 10 Gbit Ethernet to 400 Gbit InfiniBand", 0.8, 45)
WITHIN_A_CPU = Link("gloo in the memory of one machine", 0.1, 10)
_LINKS = {
    "PIX": Link("PIX, one PCIe switch", 8, 50),
    "PXB": Link("PXB, several PCIe switches", 8, 50),
    "PHB": Link("PHB, through the PCIe root of one CPU", 6, 45),
    "NODE": Link("NODE, between PCIe roots of one CPU", 5, 40),
    "SYS": Link("SYS, between CPU sockets", 3, 30),
}
_SLOWEST_FIRST = ("SYS", "NODE", "PHB", "PXB", "PIX")


def parse_topology(text: str) -> list[str]:
    """The kinds of link between each two GPUs: NV12, PIX, PXB, PHB, NODE or SYS.

    Args:
        text: What `nvidia-smi topo -m` prints.
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    header = next((line.split() for line in lines if re.match(r"\s*GPU0\b", line)), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    rows = [words for line in lines if (words := line.split()) and re.fullmatch(r"GPU\d+", words[0])]
    rows = [words for words in rows if "X" in words]
    return [words[1 + column] for row, words in enumerate(rows) for column in range(count) if column > row]


def slowest_link(kinds: Sequence[str]) -> Link | None:
    """The one that an all-reduce over all of them is bound by; None where nothing is known."""
    for kind in _SLOWEST_FIRST:
        if kind in kinds:
            return _LINKS[kind]
    lanes = [int(kind[2:]) for kind in kinds if re.fullmatch(r"NV\d+", kind)]
    if not lanes or len(lanes) < len(kinds):
        return None
    # 20 to 26 GB/s a lane in each direction, of which an all-reduce sees 60 to 95 %.
    return Link(f"NV{min(lanes)}, NVLink", 0.6 * 20 * min(lanes), 26.0 * min(lanes))


def expected_link(ranks: int, per_node: int, on_gpu: bool) -> Link | None:
    """What the ranks of this job talk over, as far as can be told."""
    if ranks > per_node:
        return ACROSS_MACHINES
    if not on_gpu:
        return WITHIN_A_CPU
    try:
        text = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return slowest_link(parse_topology(text))


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """GB/s that each rank's link carries in an all-reduce, whatever the number of ranks.

    Args:
        ranks: That take part.
        size: Bytes of the tensor.
        seconds: Of one all-reduce.

    >>> bus_bandwidth(2, 10**9, 0.5)
    2.0
    """
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def check_bandwidth(measured: float, link: Link | None) -> Check:
    """A measurement against what is expected.

    Args:
        measured: Bus bandwidth in GB/s.
        link: What it was measured over.
    """
    if link is None:
        return Check("all-reduce", f"the right sum; {measured:.2f} GB/s; what joins the GPUs is not known")
    found = f"the right sum; {measured:.2f} GB/s over {link.name} (rule of thumb: {link.low:g} to {link.high:g})"
    if measured >= link.low:
        return Check("all-reduce", found)
    return Check(
        "all-reduce",
        found,
        remark=f"{measured:.2f} GB/s is less than {link.name} should give: other jobs on the link, a slower interface than meant (see "
        "variables), or a link that is down.",
    )
