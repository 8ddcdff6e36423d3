"""What the run says it trained on, against what its ranks were really given; and the profile that it leaves."""

import gzip
import json
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = REPOSITORY / "tests" / "slow" / "train_and_count.py"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": [{"path": "builtin:demo", "split": "train[:600]"}], "max_length": 128, "held_out": 0.02},
        train={
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "learning_rate": 1e-3,
            "num_train_epochs": 1.3,
            "save_steps": 20,
            "eval_steps": 10,
            "logging_steps": 4,
        },
    )


def given(folder: Path, ranks: int) -> list[dict[str, int]]:
    """What all ranks together were given, by step."""
    by_rank = [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)
    ]
    steps = []
    for parts in zip(*by_rank, strict=True):
        assert len({part["step"] for part in parts}) == 1
        steps.append({key: sum(part[key] for part in parts) for key in ("tokens", "labelled", "squares")})
    return steps


@pytest.mark.parametrize("packing", [True, False])
def test_the_counts_are_of_what_two_ranks_were_given(packing: bool, recipe: Path, tmp_path: Path, ranks: Ranks) -> None:
    # Padded, an epoch has twice as many steps. One profile of two ranks is enough.
    more = ["train.profile=true"] if packing else ["train.num_train_epochs=0.5"]
    overrides = [f"data.packing={str(packing).lower()}", *more]
    told = ranks.run(2, [PROGRAM, tmp_path, recipe, *overrides])
    run = Run((tmp_path / "outputs" / "job" / "latest").resolve())
    steps = given(tmp_path, 2)
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    seen = 0
    for before, line in zip([{"step": 0}, *lines], lines, strict=False):
        seen += sum(step["tokens"] for step in steps[before["step"] : line["step"]])
        assert line["tokens_seen"] == seen
        labelled = sum(step["labelled"] for step in steps[before["step"] : line["step"]])
        shares = line["labelled_tokens_per_second"] / line["tokens_per_second"]
        assert shares == pytest.approx(labelled / sum(step["tokens"] for step in steps[before["step"] : line["step"]]))
        assert 0 <= line["data_seconds"] < line["seconds"]
    assert lines[-1]["step"] == len(steps)
    if packing:
        assert_profiled(run, told["stdout"])


def assert_profiled(run: Run, shown: str) -> None:
    assert "Profile of steps 7 to 9" in shown
    for rank in range(2):
        with gzip.open(run.path / "profile" / f"rank{rank}.json.gz") as file:
            names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
        assert any("allreduce" in name.replace("_", "").lower() for name in names)  # communication
        assert any("mm" in name for name in names)
