"""A GPU that runs out of memory during a training, on one and on two ranks: one message, exit status 2, and no restart."""

import json
import re
import time
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


@pytest.mark.extra
@pytest.mark.parametrize(("fault", "status"), [("out of memory", 2), ("SIGKILL", 1)])
def test_ranks_that_wait_in_c_for_a_rank_that_is_gone_are_ended_at_once(
    fault: str, status: int, own_recipe: Path, command: Callable[..., CompletedProcess[str]]
) -> None:
    """As NCCL waits, up to train.ddp_timeout, 600 s: torchrun ends them 30 s later, if the watchdog has not."""
    recipe = write_recipe(
        own_recipe,
        data={"train": [{"path": "builtin:demo", "rows": 200}], "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 4, "logging_steps": 1},
    )
    fault_of_rank_1 = {"AT": "step 3, micro-batch 1", "ON": "1", "DO": fault, "OTHERS": "wait in C"}
    began = time.monotonic()
    printed = command([*launcher_of(0, ranks=2), recipe], expect=status, PYTHONPATH=str(REPOSITORY), **fault_of_rank_1)
    assert time.monotonic() - began < 150
    message = (
        "Rank 1 on .* was ended by signal 9" if fault == "SIGKILL" else "Rank 1 ran out of GPU memory while step 3"
    )
    assert len(re.findall(message, printed.stderr)) == 1, printed.stderr
    assert not re.search("Traceback|Interrupted|lost the other", printed.stderr)
    assert latest(recipe).record["status"] == "failed"
