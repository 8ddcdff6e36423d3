"""The machines of a job compared: pure functions of their facts, each giving one row of the preflight's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sft.launch.host_facts import HostFacts

CLOCK_LIMIT = 5.0
"""Seconds that clocks may differ. The times of files and logs of two machines are compared; training needs no clock."""


@dataclass(frozen=True)
class Check:
    """One row: what was found and, where it is wrong, what and where and what to do."""

    name: str
    found: str
    problem: str | None = None
    remark: str | None = None
    """Worth a look, and no reason to stop."""


def _many(words: Sequence[str], most: int = 3) -> str:
    return "; ".join(words[:most]) + (f"; and {len(words) - most} more" if len(words) > most else "")


def _compare(
    facts: Sequence[HostFacts], values: Callable[[HostFacts], dict[str, str]]
) -> tuple[HostFacts | None, list[str]]:
    """The first one that differs from rank 0, and in what."""
    first = facts[0]
    for other in facts[1:]:
        here, there = values(first), values(other)
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            missing = "not there"
            return other, [
                f"{name} is {here.get(name, missing)} on {first.where} and {there.get(name, missing)} on {other.where}"
                for name in names
            ]
    return None, []


def check_packages(facts: Sequence[HostFacts]) -> Check:
    """The same versions everywhere."""
    other, lines = _compare(facts, lambda host: host.packages)
    found = f"torch {facts[0].packages.get('torch')}, and {len(facts[0].packages) - 1} more alike"
    if other is None:
        return Check("packages", found)
    return Check(
        "packages", lines[0], f"{_many(lines)}. Install requirements.lock on {other.host}, or share one environment."
    )


def check_code(facts: Sequence[HostFacts]) -> Check:
    """The same program everywhere."""
    other, lines = _compare(facts, lambda host: host.code)
    if other is None:
        return Check("code", f"{len(facts[0].code)} files alike")
    files = [line.split(" is ")[0] for line in lines]
    return Check(
        "code",
        f"{len(files)} files differ",
        f"the program on {other.where} is not that on {facts[0].where}: {_many(files)}. Check out the same commit on {other.host}, "
        "without changes.",
    )


def check_recipe(facts: Sequence[HostFacts]) -> Check:
    """The same recipe and overrides everywhere."""
    other, lines = _compare(facts, lambda host: host.recipe)
    if other is None:
        return Check("recipe", f"{len(facts[0].recipe) - 1} keys alike")
    return Check("recipe", lines[0], f"{_many(lines)}. Start the same file with the same overrides on {other.host}.")


def check_plan(facts: Sequence[HostFacts]) -> Check:
    """The same decisions everywhere: machines that differ may resolve `auto` differently."""
    other, lines = _compare(facts, lambda host: host.plan)
    if other is None:
        return Check("plan", f"{facts[0].plan.get('engine', '')}, {len(facts[0].plan)} decisions alike")
    return Check(
        "plan",
        lines[0],
        f"{_many(lines)}. {other.host} is another kind of machine: write these into the recipe instead of auto, or use machines that "
        "are alike.",
    )


def check_gpus(facts: Sequence[HostFacts]) -> Check:
    """The same GPU everywhere; another driver is worth a look."""
    other, lines = _compare(facts, lambda host: {"the GPU": host.gpu})
    found = facts[0].gpu if facts[0].gpu == "none" else f"{facts[0].gpu}, driver {facts[0].driver}"
    if other is not None:
        return Check(
            "GPUs", lines[0], f"{_many(lines)}. Use machines with one kind of GPU: the slowest sets the pace of all."
        )
    _, drivers = _compare(facts, lambda host: {"the driver": host.driver})
    return Check("GPUs", found, remark=_many(drivers) or None)


def check_data(facts: Sequence[HostFacts]) -> Check:
    """The same rows, tokenizer and template everywhere."""
    other, _ = _compare(facts, lambda host: {"data": str(host.data)})
    if other is None:
        return Check("dataset", f"fingerprint {str(facts[0].data)[:12]}")
    return Check(
        "dataset",
        f"differs on {other.where}",
        f"the data, tokenizer or chat template that {other.where} reads is not what {facts[0].where} reads. Put the files on a folder that "
        f"all machines share, or copy them to {other.host} again.",
    )


def check_variables(facts: Sequence[HostFacts]) -> Check:
    """The variables of NCCL, gloo and torch, shown; a difference is worth a look."""
    shown = ", ".join(f"{name}={value}" for name, value in facts[0].variables.items()) or "none set"

    # Names of interfaces may differ from machine to machine.
    def alike(host: HostFacts) -> dict[str, str]:
        return {name: value for name, value in host.variables.items() if not name.endswith("_IFNAME")}

    _, lines = _compare(facts, alike)
    return Check("variables", shown, remark=_many(lines) or None)


def check_clocks(hosts: Sequence[str], offsets: Sequence[float]) -> Check:
    """Clocks that agree.

    Args:
        hosts: One a clock.
        offsets: Seconds that each is ahead of the first one's.
    """
    worst = max(range(len(offsets)), key=lambda index: abs(offsets[index]))
    found = f"within {max(0.1, abs(offsets[worst])):.1f} s"
    if abs(offsets[worst]) <= CLOCK_LIMIT:
        return Check("clocks", found)
    side = "ahead of" if offsets[worst] > 0 else "behind"
    return Check(
        "clocks",
        found,
        remark=f"{hosts[worst]} is {abs(offsets[worst]):.0f} s {side} {hosts[0]}. Run a time service (chrony, ntpd) on both.",
    )


def compare(facts: Sequence[HostFacts]) -> list[Check]:
    """Everything that the facts alone can tell.

    Args:
        facts: Of each rank, or of each machine, the first one's first.
    """
    checks = [check_packages, check_code, check_recipe, check_plan, check_gpus, check_variables]
    return [*(check(facts) for check in checks), *([check_data(facts)] if facts[0].data is not None else [])]
