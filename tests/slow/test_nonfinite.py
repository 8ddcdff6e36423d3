"""A row whose loss or gradient is not finite, on one rank only, under every engine and policy."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import plain, write_recipe
from tests.slow.engine_runs import ENGINES, assert_same_weights, lines
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"
STEPS, ROW = 8, 31


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    rows = make_demo(folder).train.read_text().splitlines()[:60]
    rows[ROW - 1] = poisoned(rows[ROW - 1])
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return write_recipe(
        folder / "bad.yaml",
        data={"train": str(folder / "rows.jsonl"), "max_length": 128, "packing": False},
        train={
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "max_steps": STEPS - 1,
            "logging_steps": 1,
            "save_steps": 2,
            "save_total_limit": 10,
        },
    )


def poisoned(row: str) -> str:
    """With a `~` before the prompt's first word."""
    values = json.loads(row)
    name = next(iter(values))
    if isinstance(values[name], str):
        values[name] = "~" + values[name]
    else:
        values[name][0]["content"] = "~" + values[name][0]["content"]
    return json.dumps(values)


def train(
    ranks: Ranks, recipe: Path, engine: str, kind: str, name: str, *overrides: str, expect: int = 0
) -> tuple[Run, str]:
    """The run, and what was printed."""
    words = [FAULTS, recipe, *ENGINES[engine].overrides, f"tracking.run_name={plain(name)}", *overrides]
    printed = ranks.run(ENGINES[engine].ranks, words, expect, BAD_ROW=kind)
    return Run(recipe.parent / "outputs" / "bad" / plain(name)), printed["stdout"] + printed["stderr"]


SKIP = "train.on_nonfinite=skip"


def bad_step(run: Run) -> int:
    (fault,) = run.record["nonfinite"]
    return int(fault["step"])


def account(run: Run) -> Any:
    return json.loads((run.path / "nonfinite" / f"step-{bad_step(run)}.json").read_text())


def rows_found(run: Run) -> dict[int, list[int]]:
    """Rows of the micro-batches whose loss was not finite, by rank."""
    return {
        one["rank"]: [row["row"] for micro_batch in one["micro_batches"] for row in micro_batch["rows"]]
        for one in account(run)["ranks"]
    }


@pytest.fixture(scope="module")
def alone(recipe: Path, ranks: Ranks) -> Run:
    """One process that skips."""
    run, _ = train(ranks, recipe, "1", "nan", "alone", SKIP, "train.micro_batch_size=1")
    assert rows_found(run) == {0: [ROW]}
    check_skipped(run, 1)
    return run


def check_skipped(run: Run, count: int) -> None:
    """One step changed nothing, on any rank; the others did."""
    bad = bad_step(run)
    assert 1 < bad < STEPS
    for rank in range(count):
        changes = (run.path / "observed" / f"changes-{rank}.txt").read_text().splitlines()
        assert [int(line.split()[0]) for line in changes if line.endswith("same")] == [bad]
    (line,) = [line for line in lines(run) if "skipped_steps" in line]
    assert (line["step"], line["skipped_steps"], line["loss"]) == (bad, 1, None)
    assert run.record["status"] == "finished"


CASES = [
    *(("nan", engine) for engine in ("2 DDP", "2 ZeRO-1", "2 ZeRO-2", "2 ZeRO-3", "2 FSDP2")),
    # Where gradients are full, and where they are sharded with the weights.
    ("nan", "2 pipeline parallel"),
    ("gradient", "2 DDP"),
    ("inf", "2 ZeRO-3"),
    ("gradient", "2 ZeRO-3"),
]


@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_a_skipped_step_changes_nothing_and_all_others_are_as_they_would_be(
    kind: str, engine: str, recipe: Path, alone: Run, ranks: Ranks
) -> None:
    """On one rank alone the loss is not finite."""
    run, printed = train(ranks, recipe, engine, kind, f"{kind}-{engine}", SKIP)
    assert "The step was skipped" in printed
    check_skipped(run, 2)
    for mine, theirs in zip(lines(run), lines(alone), strict=True):
        for key in ("step", "batch", "learning_rate", "loss"):
            assert mine[key] == (
                theirs[key] if key == "batch" or theirs[key] is None else pytest.approx(theirs[key], abs=1e-5)
            )
    assert_same_weights(run, alone, 1e-4)
    found = rows_found(run)
    if kind == "gradient":
        assert found == {0: [], 1: []}
    else:
        (of_micro_batch,) = [rows for rows in found.values() if rows]
        assert ROW in of_micro_batch and len(of_micro_batch) == 2
    assert ROW in [row["row"] for row in account(run)["rows_of_the_step"]]


def test_bf16_weights_and_their_fp32_copies_stay_as_they_are(recipe: Path, ranks: Ranks) -> None:
    run, _ = train(ranks, recipe, "1", "inf", "bf16", SKIP, "train.precision=bf16")
    check_skipped(run, 1)


@pytest.mark.parametrize("engine", ["2 DDP", "2 ZeRO-3", "2 pipeline parallel"])
def test_the_run_stops_before_the_step_and_names_it(engine: str, recipe: Path, ranks: Ranks) -> None:
    run, printed = train(ranks, recipe, engine, "nan", f"stop-{engine}", expect=2)
    bad = bad_step(run)
    assert f"step {bad}: the loss is not finite (rank " in printed
    assert "Traceback" not in printed
    assert [line["step"] for line in lines(run)] == list(range(1, bad))
    assert run.record["status"] == "failed"
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None
    assert int(checkpoint.name.split("-")[1]) == (bad - 1) // 2 * 2
    files = list(checkpoint.glob("model*.safetensors"))
    assert files
    assert all(weight.isfinite().all() for file in files for weight in load_file(file).values())


def test_as_many_steps_are_skipped_as_the_recipe_allows(recipe: Path, ranks: Ranks) -> None:
    """Two epochs meet the row twice."""
    twice = ("train.max_nonfinite_steps=1", "train.max_steps=16")
    run, printed = train(ranks, recipe, "1", "nan", "limit", SKIP, *twice, expect=2)
    assert "train.max_nonfinite_steps=1" in printed
    assert [fault["answer"] for fault in run.record["nonfinite"]] == ["skip", "stop"]
