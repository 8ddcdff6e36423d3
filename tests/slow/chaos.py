"""Kill a training at random moments, again and again, and go on each time: python -m tests.slow.chaos FOLDER [KILLS] [SEED]

Two ranks under ZeRO-2 that save after every step, so that about half of the moments lie inside a save. It ends with what an
undisturbed run has: the same batches, losses and weights.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sft.checkpoint.manifest import fault
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

DIE = REPOSITORY / "tests" / "slow" / "train_and_die.py"
LONGEST = 0.5
"""Seconds from the first step to the latest kill."""

SAVES_LITTLE = "train.save_steps=1000"
"""Where no kill comes: a save takes longer than a step."""


def recipe_in(folder: Path, kills: int) -> Path:
    """A training with more steps than so many starts come to."""
    return write_recipe(
        folder / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={
            "deepspeed": "zero2",
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "max_steps": 6 * kills,
            "save_steps": 1,
            "logging_steps": 1,
        },
    )


def lines(run: Run) -> list[dict[str, Any]]:
    """Step, batch and loss of each line of metrics.jsonl."""
    found = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{name: line[name] for name in ("step", "batch", "loss", "grad_norm")} for line in found]


def check_left(run: Run) -> str:
    """Every checkpoint that has its name is whole; what the kill met."""
    whole = list(run.checkpoints.glob("checkpoint-*"))
    faults = {path.name: fault(path) for path in whole}
    assert not any(faults.values()), faults
    hidden = [path.name.partition("-")[0] for path in run.checkpoints.glob(".*")]
    return hidden[0].lstrip(".") if hidden else "between saves"


def killed(ranks: Ranks, recipe: Path, kills: int, seed: int) -> tuple[Run, Counter[str]]:
    """A run that was killed so many times, and then let be; and what the kills met."""
    run, chance, met = Run(recipe.parent / "outputs" / "job" / "killed"), random.Random(seed), Counter[str]()
    for number in range(kills):
        rank, seconds = chance.randrange(2), chance.uniform(0.0, LONGEST)
        words = [DIE, recipe, "tracking.run_name=killed"]
        told = ranks.run(2, words, expect=None, grace=1, ON=str(rank), AFTER=str(seconds))
        assert told["status"] != "0", f"it was done before kill {number + 1}"
        assert told["status"] in ("-9", "1"), told["stdout"] + told["stderr"]
        met[check_left(run)] += 1
    ranks.run(2, ["sft.train", recipe, SAVES_LITTLE, "tracking.run_name=killed"])
    return run, met


def check_same(run: Run, undisturbed: Run) -> None:
    """The same batches, losses and final weights, bit by bit."""
    assert lines(run) == lines(undisturbed)
    weights, expected = (load_file(one.final / "model.safetensors") for one in (run, undisturbed))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def chaos(ranks: Ranks, folder: Path, kills: int, seed: int) -> Counter[str]:
    """Train twice, undisturbed and not.

    Args:
        ranks: Starts them.
        folder: Where.
        kills: How many.
        seed: Of the moments.

    Returns:
        What the kills met, counted.

    Raises:
        AssertionError: Something was lost.
    """
    recipe = recipe_in(folder, kills)
    ranks.run(2, ["sft.train", recipe, SAVES_LITTLE, "tracking.run_name=undisturbed"])
    run, met = killed(ranks, recipe, kills, seed)
    check_same(run, Run(run.path.with_name("undisturbed")))
    assert sum(session["status"] == "killed" or session["status"] == "failed" for session in run.record["sessions"]) > 0
    return met


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int((sys.argv[2:3] or ["50"])[0]), int((sys.argv[3:4] or ["0"])[0])
    folder.mkdir(parents=True)
    ranks = Ranks()
    try:
        met = chaos(ranks, folder, kills, seed)
    finally:
        ranks.close()
    print(f"{kills} kills, the same batches, losses and weights as undisturbed. They met: {dict(met)}")


if __name__ == "__main__":
    main()
