"""DeepSpeed's stage and buckets, read back from live engines of two ranks."""

import json
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import decisions, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("named", "stage"), [("zero2", 2), ("zero3", 3)])
def test_the_live_engine_has_the_planned_buckets(named: str, stage: int, tmp_path: Path, ranks: Ranks) -> None:
    recipe = write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 2, "deepspeed": named},
    )
    ranks.run(2, [REPOSITORY / "tests" / "slow" / "train_and_tell.py", recipe])
    run = Run((tmp_path / "outputs" / "job" / "latest").resolve())
    assert decisions(run)["engine"] == f"ZeRO-{stage}"
    told = json.loads((run.path / "told.json").read_text())
    planned = json.loads(run.plan_file.read_text())["deepspeed"]["zero_optimization"]
    assert all(10_000 < told[key] < 700_000 for key in planned if "bucket" in key)
    for key, value in planned.items():
        if key in told:
            assert told[key] == value, key
    assert "reduce_bucket_size" in planned
    assert ("stage3_prefetch_bucket_size" in planned) == (stage == 3)
