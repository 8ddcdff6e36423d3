"""A job that is asked to stop, wherever it is: what is left, what it says, and how it goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft.recipe import REPOSITORY
from sft.run_directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIGNALLED = REPOSITORY / "tests" / "slow" / "train_and_signal.py"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("interrupted") / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128, "held_out": 0.02},
        train={
            "global_batch_size": 16,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "max_steps": 7,
            "save_steps": 5,
            "eval_steps": 4,
            "logging_steps": 1,
            "save_canary": False,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, ranks: Ranks) -> Run:
    ranks.run(2, ["sft.train", recipe, "tracking.run_name=undisturbed"])
    return Run(recipe.parent / "outputs" / "job" / "undisturbed")


def lines(run: Run) -> list[dict[str, Any]]:
    """What was measured at each step, but for times."""
    measured = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "loss", "held_out_loss", "tokens_seen")} for line in measured]


def left(run: Run) -> Iterator[str]:
    """What a run's folder must not hold once nothing runs."""
    for pattern in ("stop", "save", ".final", ".adapter", "checkpoints/.*", "logs/*.json"):
        yield from (str(path.relative_to(run.path)) for path in run.path.glob(pattern))


POINTS = [
    # where, which rank hears the signal, the newest checkpoint afterwards
    ("import", "all", None),
    ("loading", "all", None),
    ("held out 0", "all", None),
    ("step 1, micro-batch 1", "1", "checkpoint-1"),
    ("step 3, micro-batch 2", "0", "checkpoint-3"),
    ("held out 4", "1", "checkpoint-4"),
    ("save 5", "1", "checkpoint-5"),
    ("held out 7", "0", "checkpoint-7"),
    ("final", "all", "checkpoint-7"),
]


def test_a_training_stopped_everywhere_once_ends_as_an_undisturbed_one(
    recipe: Path, undisturbed: Run, ranks: Ranks
) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "stopped")
    words = [SIGNALLED, recipe, "tracking.run_name=stopped"]
    for point, rank, checkpoint in POINTS:
        told = ranks.run(2, words, expect=143, AT=point, ON=rank)
        assert "Traceback" not in told["stderr"], point
        assert told["stderr"].count("Interrupted by SIGTERM") == 1, (point, told)
        if point == "import":
            assert not run.path.exists()
            continue
        assert run.record["status"] == "interrupted", (point, told)
        saved = run.last_checkpoint()
        assert (saved and saved.name) == checkpoint, point
        assert f"goes on from {checkpoint}" in told["stderr"] or checkpoint is None
        assert not run.final.exists()
    ranks.run(2, words, AT="nowhere")
    assert (run.record["status"], run.record["error"]) == ("finished", None)
    assert list(left(run)) == []
    assert lines(run) == lines(undisturbed)
    assert run.record["held_out_loss_before"] == undisturbed.record["held_out_loss_before"]
    weights, expected = (load_file(each.final / "model.safetensors") for each in (run, undisturbed))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
