"""The loss on held-out rows is what the model gives each of them alone, on any engine; and they are never trained."""

import json
from pathlib import Path

import pytest
import torch

from sft.data.store import DocumentStore, SequenceIndex
from sft.hub.demo import make_demo
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128, "held_out": 0.01},
        train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 6, "eval_steps": 3, "logging_steps": 2},
    )


def mean_loss(model_folder: Path, prepared: Path) -> float:
    """Each held-out document by itself through plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    store, index = DocumentStore.open(prepared), SequenceIndex.load(prepared / "held_out.npz")
    assert len(index)
    total = tokens = 0.0
    for document in index.members:
        ids, trained = store.document(int(document))
        with torch.no_grad():
            logits = model(torch.tensor(ids[None].astype("int64"))).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:].astype("int64")), reduction="none")
        kept = torch.tensor(trained[1:] == 1)
        total += float(losses[kept].double().sum())
        tokens += int(kept.sum())
    return total / tokens


@pytest.mark.parametrize("engine", ["one process", "ZeRO-3"])
def test_the_eval_loss_is_that_of_each_row_alone(engine: str, recipe: Path, ranks: Ranks) -> None:
    count, overrides = (1, []) if engine == "one process" else (2, ["train.deepspeed=zero3"])
    ranks.run(count, ["sft.train", recipe, *overrides], finish=count == 1)
    run = Run((recipe.parent / "outputs" / "job" / "latest").resolve())
    prepared = next((recipe.parent / "outputs" / ".prepared").glob("*/prepared.json")).parent
    before = mean_loss(make_demo(recipe.parent / "outputs").model, prepared)
    assert run.record["held_out_loss_before"] == pytest.approx(before, abs=1e-4)
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    measured = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert list(measured) == [3, 6]
    assert measured[6] < measured[3] < before
    assert measured[6] == pytest.approx(mean_loss(run.final, prepared), abs=2e-4)
    assert count > 1 or "Eval loss at the end" in run.report_file.read_text()


def test_measuring_the_eval_loss_does_not_change_the_training(recipe: Path, ranks: Ranks) -> None:
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=often", "train.eval_steps=1"])
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=rarely", "train.eval_steps=6"])
    folder = recipe.parent / "outputs" / "job"
    weights = [(folder / name / "final" / "model.safetensors").read_bytes() for name in ("often", "rarely")]
    assert weights[0] == weights[1]
