"""A GPU that runs out of memory during a training, on one and on two ranks: one message, exit status 2, and no restart."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import latest, rows, write_recipe
from tests.slow.test_launch import launcher_of

pytestmark = pytest.mark.slow

ENGINES = {"1": (1, []), "2 DDP": (2, []), "2 ZeRO-2": (2, ["train.deepspeed=zero2"])}


@pytest.mark.parametrize("engine", rows(ENGINES, ["2 ZeRO-2"]))
def test_it_ends_the_job_in_one_message_and_no_launcher_restarts_it(
    engine: str, own_recipe: Path, command: Callable[..., CompletedProcess[str]]
) -> None:
    count, overrides = ENGINES[engine]
    recipe = write_recipe(
        own_recipe,
        data={"train": [{"path": "builtin:demo", "rows": 200}], "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 4, "logging_steps": 1},
    )
    fault = {"AT": "step 3, micro-batch 1", "DO": "out of memory", "ON": str(count - 1)}
    printed = command([*launcher_of(3, ranks=count), recipe, *overrides], expect=2, PYTHONPATH=str(REPOSITORY), **fault)
    shown = printed.stdout + printed.stderr
    assert shown.count(f"Rank {count - 1} ran out of GPU memory while step 3 was trained (") == 1
    assert "2.25 GiB more were requested. The peak was " in shown
    assert re.search(r"\(weights \d+\.\d \+ .*activations, buffers", shown), shown
    assert f"`sft plan {recipe} {' '.join([*overrides, ''])}--fit`" in shown
    assert not re.search("Restarting all processes|Traceback|lost the other ranks", shown), shown
    run = latest(recipe)
    assert (run.record["status"], "ran out of GPU memory" in run.record["error"]) == ("failed", True)
    assert [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()] == [1, 2]
