"""Law 4 with the same ranks and engine: a run that was interrupted ends as one that was not, in every bit that is written.

Each row is one training of 12 steps that keeps its checkpoints, and a copy of it that has lost everything after one of them: what a
kill leaves behind. An epoch is 6 steps, packed 3, so that step 6 is at its end and step 4 inside it; the steps after both go
across the next end.
"""

import json
import shutil
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft.checkpoint.resume import step_of
from sft.files import write_json
from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, plain, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAILING = REPOSITORY / "tests" / "slow" / "train_and_fail.py"
STEPS, BATCH, MID, END = 12, 8, 4, 6


@dataclass(frozen=True)
class Row:
    """Who computes, what is trained, and the checkpoint that is left."""

    ranks: int
    overrides: tuple[str, ...]
    step: int


LORA = "model.lora={lora_dropout: 0.1}"
PADDED = "data.packing=false"
ROWS = {
    "1 process, packed": Row(1, (), MID),
    "1 process, padded, adapters": Row(1, (PADDED, LORA), END),
    "DDP, packed, adapters": Row(2, (LORA,), MID),
    "DDP, padded": Row(2, (PADDED,), END),
    "ZeRO-2, packed": Row(2, ("train.deepspeed=zero2",), END),
    "ZeRO-2, padded, adapters": Row(2, ("train.deepspeed=zero2", PADDED, LORA), MID),
    "ZeRO-3, packed, adapters": Row(2, ("train.deepspeed=zero3", LORA), END),
    "ZeRO-3, padded": Row(2, ("train.deepspeed=zero3", PADDED), MID),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose last step of an epoch is not full."""
    folder = tmp_path_factory.mktemp("resume")
    rows = make_demo(folder).train.read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(rows[: 6 * BATCH - 3]))
    return write_recipe(
        folder / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 128},
        train={
            "global_batch_size": BATCH,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "warmup_steps": 3,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_total_limit": 5,
        },
    )


def lines(run: Run) -> list[dict[str, Any]]:
    """What metrics.jsonl says, without times."""
    timed = ("seconds", "per_second", "memory", "mfu")
    found = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not any(word in key for word in timed)} for line in found]


def killed_after(run: Run, step: int, name: str) -> Run:
    """A copy of a run, as a kill leaves it a few steps after a checkpoint."""
    copy = Run(run.path.parent / name)
    shutil.copytree(run.path, copy.path, ignore=shutil.ignore_patterns("final", "report.*", "loss.png"))
    for checkpoint in copy.all_checkpoints():
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)
    text = copy.metrics_file.read_text().splitlines(keepends=True)
    copy.metrics_file.write_text(
        "".join(text[: step + 3]) + "".join(text[step + 3 : step + 4])[:20]
    )  # the last one cut off
    session = run.record["sessions"][-1] | {"status": "running", "ended": None, "seconds": None, "last_step": None}
    write_json(copy.path / "run.json", run.record | {"status": "running", "sessions": [session]})
    return copy


def train(ranks: Ranks, recipe: Path, row: Row, name: str, *overrides: str) -> dict[str, str]:
    return ranks.run(row.ranks, ["sft.train", recipe, *row.overrides, f"tracking.run_name={name}", *overrides])


def assert_same(run: Run, undisturbed: Run) -> None:
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    assert lines(run) == lines(undisturbed)  # losses, rates, tokens, and the fingerprint of each batch
    assert len({line["batch"] for line in lines(run)}) == STEPS
    weights, expected = (load_file(path.final / "model.safetensors") for path in (run, undisturbed))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert run.record["train_loss"] == undisturbed.record["train_loss"]


@pytest.mark.parametrize("name", ROWS)
def test_resumed_equals_uninterrupted(name: str, recipe: Path, ranks: Ranks) -> None:
    row = ROWS[name]
    train(ranks, recipe, row, plain(name), f"train.save_steps={row.step}")
    undisturbed = Run(recipe.parent / "outputs" / "job" / plain(name))
    assert decisions(undisturbed)["precision"] == "fp32"
    assert (row.step % decisions(undisturbed)["steps_per_epoch"] == 0) == (row.step == END)
    killed = killed_after(undisturbed, row.step, f"{plain(name)}-killed")
    told = train(ranks, recipe, row, killed.path.name, f"train.save_steps={row.step}")
    assert f"it resumes from checkpoint-{row.step}" in told["stdout"]
    assert_same(killed, undisturbed)
    first, second = killed.record["sessions"]
    assert (first["status"], first["last_step"]) == ("killed", row.step + 3)
    assert (second["status"], second["checkpoint"], second["ranks"]) == (
        "finished",
        f"checkpoint-{row.step}",
        row.ranks,
    )
    assert killed.record["started"] == undisturbed.record["started"]
    assert killed.record["timings"]["train_seconds"] == pytest.approx(first["seconds"] + second["seconds"])
    assert losses(killed)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def logged_to_tensorboard(run: Run) -> list[int]:
    """Steps of the loss as tensorboard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own, where it reads
@pytest.mark.parametrize("name", ["1 process, packed", "ZeRO-2, packed"])
def test_a_damaged_checkpoint_is_passed_over_and_allowed_changes_take_effect(
    name: str, recipe: Path, ranks: Ranks
) -> None:
    row, run_name = ROWS[name], f"changed-{ROWS[name].ranks}"
    always = ("train.warmup_steps=0", "tracking.report_to=[wandb, tensorboard]")
    train(ranks, recipe, row, run_name, *always, "train.max_steps=8", "train.save_steps=4")
    killed = killed_after(Run(recipe.parent / "outputs" / "job" / run_name), 8, f"{run_name}-killed")
    flip_a_byte(next((killed.checkpoints / "checkpoint-8").rglob("*optim*.pt")))
    # Without the second checkpoint there is nothing left to go on from.
    copy = Run(killed.path.with_name(f"{run_name}-ruined"))
    shutil.copytree(killed.path, copy.path)
    (copy.checkpoints / "checkpoint-4" / "trainer_state.json").unlink()
    same = (*always, "train.max_steps=8", "train.save_steps=4")
    words = ["sft.train", recipe, *row.overrides, f"tracking.run_name={copy.path.name}", *same]
    for resume in ("auto", "must"):
        told = ranks.run(row.ranks, [*words, f"train.resume={resume}"], expect=2)["stderr"]
        assert "none of its checkpoints can be used:\n  checkpoint-8: " in told
        assert "checkpoint-4: trainer_state.json is missing" in told
        assert "Traceback" not in told
    assert copy.record["status"] == "running"
    changes = ("train.max_steps=10", "train.learning_rate=2e-3", "train.save_steps=3")
    allowed = "train.resume_allow_changes=[train.max_steps, train.learning_rate]"
    out = train(ranks, recipe, row, killed.path.name, *always, *changes, allowed)["stdout"]
    assert "passed over: checkpoint-8: " in out
    assert "it resumes from checkpoint-4" in out
    rates = [line["learning_rate"] for line in lines(killed)]
    assert rates == pytest.approx(
        [1e-3 / 2 * (1 + cos(pi * step / 8)) for step in range(4)]
        + [2e-3 / 2 * (1 + cos(pi * step / 10)) for step in range(4, 10)]
    )
    assert {step_of(path) for path in killed.all_checkpoints()} >= {6, 9, 10}
    session = killed.record["sessions"][-1]
    assert session["changes"]["train.max_steps"] == [8, 10]
    assert "checkpoint-8" in session["passed_over"]
    assert logged_to_tensorboard(killed) == list(range(1, 11))
    folders = [path.name for path in (killed.path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(folder.endswith(f"-{killed.record['wandb_id']}") for folder in folders)


def test_a_run_goes_on_in_another_precision_where_that_is_allowed(recipe: Path, ranks: Ranks) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "precision")
    words = [recipe, "train.max_steps=6", "train.save_steps=2", "tracking.run_name=precision"]
    ranks.run(1, [FAILING, "0", "4", "mistake", "1", *words, "train.precision=fp32"], expect=2)
    to_bf16 = [*words, "train.precision=bf16", "train.resume_allow_changes=[train.precision]"]
    assert "resharded from full tensors" in ranks.run(1, ["sft.train", *to_bf16])["stdout"]
    assert decisions(run)["weights"] == "bf16 with an fp32 copy"
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    same = ranks.run(1, ["sft.train", *words[:-1], "train.precision=fp32", "tracking.run_name=fp32"])
    assert same["status"] == "0"
    by_fp32 = Run(run.path.with_name("fp32"))
    assert losses(run)[:2] == losses(by_fp32)[:2]
    assert losses(run) == pytest.approx(losses(by_fp32), abs=0.03)
