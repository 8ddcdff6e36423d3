from dataclasses import replace
from pathlib import Path

import pytest

from sft.errors import PreflightError
from sft.launch.host_comparison import Check, check_clocks, compare
from sft.launch.host_facts import HostFacts, driver_version, read_facts
from sft.launch.preflight import refuse, shared

FIRST = HostFacts(
    rank=0,
    host="host0",
    packages={"torch": "2.13.0", "trl": "1.16.0"},
    code={"sft/plan/plan.py": "aa", "sft/launch/rank.py": "bb"},
    recipe={"train.learning_rate": "1e-05", "train.seed": "0"},
    plan={"engine": "DDP", "micro_batch_size": "2"},
    data="abcdef",
    gpu="NVIDIA H100",
    driver="570.1",
    variables={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"},
)
SECOND = replace(FIRST, rank=1, host="host1")


def problems(other: HostFacts) -> dict[str, str]:
    return {check.name: check.problem for check in compare([FIRST, SECOND, other]) if check.problem}


def test_machines_that_are_alike_have_nothing_to_say() -> None:
    assert not problems(replace(SECOND, rank=2, host="host2"))
    assert not any(check.remark for check in compare([FIRST, SECOND]))


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"packages": {"torch": "2.13.0", "trl": "1.15.0"}}, "packages", ["trl is 1.16.0", "1.15.0 on host2 (rank 2)", "requirements"]),
        ({"packages": {"torch": "2.13.0"}}, "packages", ["not there on host2"]),
        ({"code": {"sft/plan/plan.py": "aa", "sft/launch/rank.py": "cc"}}, "code", ["sft/launch/rank.py", "host2", "same commit"]),
        ({"recipe": {"train.learning_rate": "2e-05", "train.seed": "0"}}, "recipe", ["train.learning_rate is 1e-05", "2e-05 on host2"]),
        ({"plan": {"engine": "DDP", "micro_batch_size": "4"}}, "plan", ["micro_batch_size is 2", "4 on host2", "instead of auto"]),
        ({"gpu": "NVIDIA A100"}, "GPUs", ["NVIDIA H100 on host0", "NVIDIA A100 on host2"]),
        ({"data": "other"}, "dataset", ["host2", "folder that all machines share"]),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_both_values_the_host_and_the_remedy(
    change: dict[str, object], name: str, words: list[str]
) -> None:
    found = problems(replace(SECOND, rank=2, host="host2", **change))  # type: ignore[arg-type]
    assert list(found) == [name]
    assert all(word in found[name] for word in words), found[name]


def test_another_driver_and_other_variables_are_worth_a_look_and_stop_nothing() -> None:
    other = replace(SECOND, driver="535.2", variables={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0"})
    checks = {check.name: check for check in compare([FIRST, other])}
    assert "535.2 on host1" in (checks["GPUs"].remark or "")
    assert "NCCL_DEBUG is INFO" in (checks["variables"].remark or "")
    assert "IFNAME" not in (checks["variables"].remark or "")
    assert not any(check.problem for check in checks.values())


def test_many_differences_are_counted_and_not_all_listed() -> None:
    other = replace(SECOND, packages=dict.fromkeys("abcdef", "9"))
    assert "and 5 more" in str(next(check.problem for check in compare([FIRST, other])))


@pytest.mark.parametrize(
    ("ahead", "words"), [(4.0, None), (61.0, "host1 is 61 s ahead of host0"), (-9.0, "9 s behind")]
)
def test_clocks_that_differ_are_told_with_the_host(ahead: float, words: str | None) -> None:
    remark = check_clocks(["host0", "host1"], [0.0, ahead]).remark
    assert (words is None) == (remark is None)
    assert words is None or words in str(remark)


def test_a_folder_that_is_not_shared_names_who_does_not_see_it(tmp_path: Path) -> None:
    assert shared(tmp_path, "host0 (rank 0)", []).problem is None
    problem = shared(tmp_path, "host0 (rank 0)", ["host1 (rank 1)"]).problem
    assert problem is not None
    assert all(word in problem for word in ("host1 (rank 1)", str(tmp_path), "output_dir"))


def test_all_problems_come_in_one_message() -> None:
    refuse([Check("a", "fine"), Check("b", "fine", remark="look")])
    with pytest.raises(PreflightError, match=r"(?s)a: first.*c: second"):
        refuse([Check("a", "", "first"), Check("b", "fine"), Check("c", "", "second")])


def test_facts_of_another_version_of_the_program_are_refused_with_the_host() -> None:
    with pytest.raises(PreflightError, match=r"host7.*same commit"):
        read_facts({"host": "host7", "rank": 1})


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == "none"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 2025\nGCC version:\n")
    assert driver_version(file) == "570.124.06"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n")
    assert driver_version(file) == "575.57.08"
