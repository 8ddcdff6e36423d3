import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from sft.errors import PreflightError
from sft.launch.job import open_job
from sft.launch.preflight import check_ranks, disk
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job, bytes_per_parameter, checkpoints_to_come
from sft.plan.plan import Decision
from sft.recipe.schema import REPOSITORY

CPU = Hardware(None, 2, 2, 2, 16.0)
H100 = Hardware(Gpu("NVIDIA H100", 80.0, 9.0), 1, 1, 16, 200.0)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def job(tmp_path: Path, *overrides: str, hardware: Hardware = CPU) -> Job:
    return open_job(REPOSITORY / "recipes" / "tiny.yaml", [f"output_dir={tmp_path}", *overrides], hardware)


@pytest.mark.parametrize(
    ("overrides", "hardware", "expected"),
    [
        ([], CPU, (4 + 8, 4)),
        (["train.deepspeed=zero2"], CPU, (4 + 4 + 4 + 8, 4)),
        (["train.deepspeed=zero3"], CPU, (4 + 4 + 8, 4)),
        (["train.deepspeed=zero2", "train.precision=bf16"], CPU, (2 + 2 + 4 + 8, 2)),
        (["train.precision=bf16"], H100, (2 + 4 + 8, 2)),
    ],
)
def test_a_parameter_takes_its_weights_moments_and_copies(
    overrides: list[str], hardware: Hardware, expected: tuple[int, int], tmp_path: Path
) -> None:
    assert bytes_per_parameter(job(tmp_path, *overrides, hardware=hardware)) == expected


@pytest.mark.parametrize(
    ("steps", "there", "expected"), [(None, 0, 3), (450, 0, 3), (300, 0, 2), (10, 0, 1), (2000, 2, 1)]
)
def test_there_must_be_room_for_one_checkpoint_more_than_is_kept(
    steps: int | None, there: int, expected: int, tmp_path: Path
) -> None:
    planned = job(tmp_path, "train.save_steps=200", "train.save_total_limit=2")
    planned = replace(planned, plan=replace(planned.plan, max_steps=Decision(steps, "here")))
    assert checkpoints_to_come(planned, there) == expected


def test_the_best_checkpoint_is_kept_besides(tmp_path: Path) -> None:
    best = ["data.held_out=0.1", "train.load_best_model_at_end=true"]
    planned = job(tmp_path, "train.save_steps=200", "train.save_total_limit=2", "train.max_steps=2000", *best)
    assert checkpoints_to_come(planned, 0) == 4


def test_a_disk_without_room_is_told_with_both_sizes_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = job(tmp_path)
    large = replace(planned, model=replace(planned.model, parameters=3 * 10**9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**10))
    problem = disk(large).problem
    alone = replace(large, hardware=replace(CPU, ranks=1, ranks_per_node=1))
    with pytest.raises(PreflightError, match=r"36.0 GB"):
        check_ranks(alone)
    assert problem is not None
    assert all(words in problem for words in ("36.0 GB", "10.0 GB free", "save_total_limit", "output_dir"))
    assert disk(planned).problem is None
