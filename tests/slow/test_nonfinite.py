"""A row whose loss or gradient is not finite, on one rank only, under every engine and policy.

Chosen are a loss that is NaN under every engine, and the other two faults where gradients are whole and where they are divided with the
weights. ZeRO-1 and FSDP2 find the other faults as DDP and ZeRO-2 do. The rest is `extra`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
POISON = REPOSITORY / "tests" / "slow" / "train_and_poison.py"
STEPS, ROW = 8, 31
ENGINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "DDP": (2, ()),
    "ZeRO-1": (2, ("train.deepspeed=zero1",)),
    "ZeRO-2": (2, ("train.deepspeed=zero2",)),
    "ZeRO-3": (2, ("train.deepspeed=zero3",)),
    "FSDP2": (2, ("train.fsdp={}",)),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    rows = make_demo(folder).train.read_text().splitlines()[:60]
    rows[ROW - 1] = poisoned(rows[ROW - 1])
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return write_recipe(
        folder / "bad.yaml",
        model={"name_or_path": "builtin:demo"},
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


def run_of(recipe: Path, name: str) -> Run:
    return Run(recipe.parent / "outputs" / "bad" / name)


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def bad_step(run: Run) -> int:
    (fault,) = run.record["nonfinite"]
    return int(fault["step"])


def account(run: Run) -> Any:
    return json.loads((run.path / "nonfinite" / f"step-{bad_step(run)}.json").read_text())


def rows_told(run: Run) -> dict[int, list[int]]:
    """Rows of the micro-batches whose loss was not finite, by rank."""
    return {
        one["rank"]: [row["row"] for micro_batch in one["micro_batches"] for row in micro_batch["rows"]]
        for one in account(run)["ranks"]
    }


@pytest.fixture(scope="module")
def alone(recipe: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process that skips."""
    folder = tmp_path_factory.mktemp("alone")
    words = [
        POISON,
        folder,
        "nan",
        recipe,
        "train.on_nonfinite=skip",
        "train.micro_batch_size=1",
        "tracking.run_name=alone",
    ]
    ranks.run(1, words)
    run = run_of(recipe, "alone")
    assert rows_told(run) == {0: [ROW]}
    check_skipped(run, folder, 1)
    return run


def check_skipped(run: Run, folder: Path, count: int) -> None:
    """One step changed nothing, on any rank; the others did."""
    bad = bad_step(run)
    assert 1 < bad < STEPS - 1
    for rank in range(count):
        told = dict(line.split() for line in (folder / f"rank{rank}.txt").read_text().splitlines())
        assert {int(step) for step, what in told.items() if what == "same"} == {bad}
    (line,) = [line for line in lines(run) if "skipped_steps" in line]
    assert (line["step"], line["skipped_steps"], line["loss"]) == (bad, 1, None)
    assert run.record["status"] == "finished"


def assert_same_training(run: Run, other: Run) -> None:
    for mine, theirs in zip(lines(run), lines(other), strict=True):
        assert (mine["step"], mine["batch"], mine["learning_rate"]) == (
            theirs["step"],
            theirs["batch"],
            pytest.approx(theirs["learning_rate"]),
        )
        if mine["loss"] is None:
            assert theirs["loss"] is None
        else:
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    by_one = load_file(other.final / "model.safetensors")
    for name, weight in load_file(run.final / "model.safetensors").items():
        torch.testing.assert_close(weight, by_one[name], atol=1e-4, rtol=0, msg=name)


SKIPS = [
    *(("nan", engine) for engine in ENGINES),
    *((kind, engine) for kind in ("inf", "gradient") for engine in ("DDP", "ZeRO-2", "ZeRO-3")),
]
MORE = {("inf", "ZeRO-2"), ("gradient", "ZeRO-2"), ("inf", "DDP")}


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*case, marks=pytest.mark.extra if case in MORE else ()) for case in SKIPS]
)
def test_a_skipped_step_changes_nothing_and_all_others_are_as_they_would_be(
    kind: str, name: str, recipe: Path, alone: Run, ranks: Ranks, tmp_path: Path
) -> None:
    count, overrides = ENGINES[name]
    run = run_of(recipe, f"{kind}-{name}")
    words = [
        POISON,
        tmp_path,
        kind,
        recipe,
        *overrides,
        "train.on_nonfinite=skip",
        f"tracking.run_name={run.path.name}",
    ]
    assert "The step was skipped" in ranks.run(count, words)["stdout"]
    check_skipped(run, tmp_path, count)
    assert_same_training(run, alone)
    told = rows_told(run)
    if kind == "gradient":
        assert told == {0: [], 1: []}
    else:
        (of_micro_batch,) = [rows for rows in told.values() if rows]
        assert ROW in of_micro_batch
        assert len(of_micro_batch) == 2
    assert ROW in [row["row"] for row in account(run)["rows_of_the_step"]]


def test_bf16_weights_and_their_fp32_copies_stay_as_they_are(recipe: Path, ranks: Ranks, tmp_path: Path) -> None:
    run = run_of(recipe, "masters")
    words = [
        POISON,
        tmp_path,
        "inf",
        recipe,
        "train.precision=bf16",
        "train.on_nonfinite=skip",
        "tracking.run_name=masters",
    ]
    ranks.run(1, words)
    check_skipped(run, tmp_path, 1)


@pytest.mark.parametrize("name", ["DDP", "ZeRO-2", "ZeRO-3"])
def test_the_run_stops_before_the_step_and_says_where(name: str, recipe: Path, ranks: Ranks, tmp_path: Path) -> None:
    count, overrides = ENGINES[name]
    run = run_of(recipe, f"stop-{name}")
    words = [POISON, tmp_path, "nan", recipe, *overrides, f"tracking.run_name={run.path.name}"]
    said = ranks.run(count, words, expect=2)["stderr"]
    bad = bad_step(run)
    assert f"step {bad}: the loss is not finite (rank " in said
    assert "Traceback" not in said
    assert [line["step"] for line in lines(run)] == list(range(1, bad))
    assert run.record["status"] == "failed"
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None
    assert int(checkpoint.name.split("-")[1]) == (bad - 1) // 2 * 2
    assert all(weight.isfinite().all() for weight in load_file(checkpoint / "model.safetensors").values())


def test_as_many_steps_are_skipped_as_the_recipe_allows(recipe: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Two epochs meet the row twice."""
    words = [
        POISON,
        tmp_path,
        "nan",
        recipe,
        "train.on_nonfinite=skip",
        "train.max_nonfinite_steps=1",
        "train.max_steps=16",
    ]
    said = ranks.run(1, [*words, "tracking.run_name=limit"], expect=2)["stderr"]
    assert "train.max_nonfinite_steps=1" in said
    faults = run_of(recipe, "limit").record["nonfinite"]
    assert [fault["answer"] for fault in faults] == ["skip", "stop"]
