"""What the facts of several ranks tell when they are compared."""

from pathlib import Path

import pytest

from sft.errors import PreflightError
from sft.launch.job import open_job
from sft.launch.preflight import REMEDIES, Check, Facts, compare, rank_facts, refuse
from sft.plan.hardware import Hardware

FIRST: Facts = {
    "rank": 0,
    "host": "host0",
    "packages": {"torch": "2.13.0", "trl": "1.16.0"},
    "code": {"sft/plan/plan.py": "aa", "sft/train/main.py": "bb"},
    "recipe": {"train": {"learning_rate": 1e-05, "seed": 0}},
    "plan": {"engine": "DDP", "micro_batch_size": "2"},
    "dataset": {"fingerprint": "abcdef"},
    "GPUs": {"GPU": "NVIDIA H100"},
    "variables": {"NCCL_DEBUG": "INFO"},
}


def other(**sections: object) -> Facts:
    return {**FIRST, "rank": 2, "host": "host2", **sections}


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("packages", {"torch": "2.13.0", "trl": "1.15.0"}, "trl is 1.16.0 on host0 (rank 0) and 1.15.0 on host2 (rank 2)"),
        ("code", {"sft/plan/plan.py": "aa", "sft/train/main.py": "cc"}, "sft/train/main.py is bb"),
        ("dataset", {"fingerprint": "other"}, "other on host2"),
    ],
)  # fmt: skip
def test_a_difference_is_named_with_both_values_the_host_and_the_remedy(
    section: str, values: dict[str, str], words: str
) -> None:
    failed = {
        check.name: check.problem for check in compare([FIRST, FIRST, other(**{section: values})]) if check.problem
    }
    assert list(failed) == [section]
    assert words in str(failed[section])
    assert str(failed[section]).endswith(REMEDIES[section].format(host="host2"))


def test_other_variables_are_shown_and_stop_nothing() -> None:
    assert not any(check.problem for check in compare([FIRST, other()]))
    row = compare([FIRST, other(variables={})])[-1]
    assert (row.name, row.problem) == ("variables", None)
    assert "NCCL_DEBUG is INFO on host0" in row.found


def test_all_problems_come_in_one_message() -> None:
    refuse([Check("a", "fine"), Check("b", "fine")])
    with pytest.raises(PreflightError, match=r"(?s)a: first.*c: second"):
        refuse([Check("a", "", "first"), Check("b", "fine"), Check("c", "", "second")])


def test_a_rank_brings_every_section(recipe_file: Path, outputs: Path) -> None:
    job = open_job(recipe_file, [f"output_dir={outputs}"], Hardware(None, 2, 2, 2, 16.0))
    facts = rank_facts(job, 1)
    assert set(FIRST) == set(facts)
    assert facts["recipe"]["train"]["seed"] == 0
    assert "sft/launch/preflight.py" in facts["code"]
