import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from sft.launch.job import open_job
from sft.launch.preflight import disk
from sft.plan.disk import bytes_per_parameter, checkpoints_to_come, estimate_disk
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job
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
        (["train.precision=bf16"], H100, (2 + 4 + 8, 2)),
        (["train.fsdp={}", "train.precision=bf16"], CPU, (4 + 8, 2)),
        (["model.lora={}"], H100, (4 + 8, 2)),
    ],
)
def test_a_parameter_takes_its_weights_moments_and_copies(
    overrides: list[str], hardware: Hardware, expected: tuple[int, int], tmp_path: Path
) -> None:
    assert bytes_per_parameter(job(tmp_path, *overrides, hardware=hardware)) == expected


@pytest.mark.parametrize(("steps", "there", "expected"), [(None, 0, 3), (300, 0, 2), (2000, 2, 1)])
def test_there_must_be_room_for_one_checkpoint_more_than_is_kept(
    steps: int | None, there: int, expected: int, tmp_path: Path
) -> None:
    planned = job(tmp_path, "train.save_steps=200", "train.save_total_limit=2")
    planned = replace(planned, plan=replace(planned.plan, max_steps=Decision(steps, "here")))
    assert checkpoints_to_come(planned, there) == expected


def test_a_disk_without_room_is_told_with_both_sizes_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = job(tmp_path)
    large = replace(planned, model=replace(planned.model, parameters=3 * 10**9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**10))
    problem = disk(large).problem
    assert problem is not None
    assert all(words in problem for words in ("36.0 GB", "10.0 GB free", "save_total_limit", "output_dir"))
    assert disk(planned).problem is None


def test_adapters_take_little_in_a_checkpoint_and_the_whole_model_in_final(tmp_path: Path) -> None:
    planned = job(tmp_path, "model.lora={r: 8}", "train.max_steps=10", "train.save_steps=10", hardware=H100)
    widths, parameters = planned.model.linear_widths, planned.model.parameters
    found = estimate_disk(planned)
    assert found is not None and widths is not None and parameters is not None
    assert found.checkpoint == 12 * 8 * widths
    assert (found.final, found.checkpoints) == (2 * parameters + 4 * 8 * widths, 1)
    assert found.total == found.checkpoint + found.final + found.prepared
    more = job(tmp_path, "model.lora={r: 8, rank_pattern: {down_proj: 32}, modules_to_save: [lm_head]}", hardware=H100)
    assert more.adapter_parameters == 32 * widths + (planned.model.vocab_size or 0) * (planned.model.hidden_size or 0)


def test_saving_by_epoch_counts_epochs_and_without_data_all_that_are_kept(tmp_path: Path) -> None:
    words = ("train.save_strategy=epoch", "train.num_train_epochs=2", "train.save_total_limit=4")
    planned = job(tmp_path, *words)
    assert checkpoints_to_come(planned, 0) == 2
    unknown = replace(planned.plan, steps_per_epoch=Decision(None, "here"), max_steps=Decision(50, "here"))
    assert checkpoints_to_come(replace(planned, plan=unknown), 0) == 5


def test_prepared_data_counts_until_it_is_prepared(tmp_path: Path) -> None:
    planned = job(tmp_path)
    estimated, data = estimate_disk(planned), planned.data
    assert estimated is not None and data is not None
    assert 0 < estimated.prepared == 5 * data.tokens + 60 * data.documents
    counted = estimate_disk(planned.with_data(replace(data, exact=True)))
    assert counted is not None and counted.prepared == 0
    assert planned.plan.disk.value is not None
    assert "prepared data" in planned.plan.disk.reason


def test_a_model_of_unknown_size_has_no_estimate(tmp_path: Path) -> None:
    planned = job(tmp_path)
    unknown = replace(planned, model=replace(planned.model, parameters=None))
    assert estimate_disk(unknown) is None
    assert disk(unknown).problem is None
