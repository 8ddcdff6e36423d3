import pytest

from sft.launch.interconnect import (
    ACROSS_MACHINES,
    bus_bandwidth,
    check_bandwidth,
    expected_link,
    parse_topology,
    slowest_link,
)

NVSWITCH = """
\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47\t0\tN/A
GPU1\tNV18\t X \tSYS\t48-95\t1\tN/A
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
SOCKETS = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      PIX     SYS     SYS     0-15
GPU1    PIX      X      SYS     SYS     0-15
GPU2    SYS     SYS      X      PXB     16-31
GPU3    SYS     SYS     PXB      X      16-31
"""


def test_the_table_of_links_is_read_without_the_network_cards() -> None:
    assert parse_topology(NVSWITCH) == ["NV18"]
    assert parse_topology(SOCKETS) == ["PIX", "SYS", "SYS", "SYS", "SYS", "PXB"]
    assert parse_topology("No devices were found") == []


def test_the_slowest_link_decides() -> None:
    sockets, nvlink = slowest_link(parse_topology(SOCKETS)), slowest_link(parse_topology(NVSWITCH))
    assert sockets is not None
    assert sockets.name.startswith("SYS")
    assert nvlink is not None
    assert nvlink.name.startswith("NV18")
    assert nvlink.low > 100
    assert slowest_link([]) is None
    assert slowest_link(["NV4", "?"]) is None


def test_between_machines_the_network_decides() -> None:
    assert expected_link(16, 8, on_gpu=True) == ACROSS_MACHINES


def test_bus_bandwidth_does_not_depend_on_the_number_of_ranks() -> None:
    # A ring moves 2 (n - 1) / n of the tensor over each link.
    assert bus_bandwidth(8, 8 * 10**9, 2 * 7 / 8) == pytest.approx(8.0)


def test_a_slow_link_is_worth_a_look_and_stops_nothing() -> None:
    slow, fast = (check_bandwidth(measured, ACROSS_MACHINES) for measured in (0.1, 12.0))
    assert fast.remark is None
    assert slow.remark is not None
    assert "0.10 GB/s" in slow.remark
    assert slow.problem is None
