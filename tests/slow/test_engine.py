"""`train.parallel: auto` and the buckets, read back from live engines of two ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.recipe import REPOSITORY
from sft.run_directory import Run
from tests.slow.conftest import decisions, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("named", "stage"), [({"parallel": "auto", "precision": "bf16"}, 2), ({"deepspeed": "zero3"}, 3)]
)
def test_the_live_engine_has_the_planned_buckets(
    named: dict[str, str], stage: int, tmp_path: Path, command: Callable[..., object]
) -> None:
    recipe = write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 2, **named},
    )
    command([*TORCHRUN, REPOSITORY / "tests" / "slow" / "train_and_tell.py", recipe], PYTHONPATH=str(REPOSITORY))
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


PROGRAM = """
import os
from sft import distributed
from sft.errors import PlanError
distributed.join_group(False, False)
distributed.check_same_plan({"engine": "DDP"})
try:
    distributed.check_same_plan({"engine": "DDP", "micro_batch_size": int(os.environ["RANK"])})
    assert os.environ["RANK"] == "0"
except PlanError as error:
    assert "Rank 1" in str(error) and "micro_batch_size: 0 there, 1 here" in str(error), error
distributed.leave_group()
"""


def test_ranks_that_plan_differently_say_so(tmp_path: Path, command: Callable[..., object]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command([*TORCHRUN, tmp_path / "program.py"], PYTHONPATH=str(REPOSITORY))
