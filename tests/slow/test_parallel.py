"""Law 1 where ranks share layers or sequences: a group of them trains as one process does, and goes on as it would have."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sft.hub.demo import make_demo
from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TENSOR = ["train.tensor_parallel_size=2"]
SEQUENCE = ["train.sequence_parallel_size=2", "train.micro_batch_size=1"]


@dataclass(frozen=True)
class Way:
    """How ranks share the work, and what must be read from the live objects."""

    ranks: int
    packed: bool
    overrides: list[str]
    engine: str
    tensor: int = 1
    sequence: int = 1


WAYS = {
    "tensor-packed": Way(2, True, TENSOR, "tensor parallel", tensor=2),
    "tensor-padded": Way(2, False, TENSOR, "tensor parallel", tensor=2),
    "sequence-packed-zero3": Way(2, True, [*SEQUENCE, "train.deepspeed=zero3"], "ZeRO-3", sequence=2),
    "sequence-padded-zero2": Way(2, False, ["train.sequence_parallel_size=2", "train.deepspeed=zero2"], "ZeRO-2", sequence=2),
    "sequence-and-data": Way(4, False, [*SEQUENCE, "train.deepspeed=zero2"], "ZeRO-2", sequence=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """12 steps over 6 a pass, the last of which is not full; packed and padded."""
    folder = tmp_path_factory.mktemp("parallel")
    rows = make_demo(folder).train.read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(rows[200:209]))
    files = {}
    for packed, name, count in ((True, "packed", 91), (False, "padded", 45)):
        (folder / f"{name}.jsonl").write_text("\n".join(rows[:count]))
        files[packed] = write_recipe(
            folder / f"{name}.yaml",
            model={"name_or_path": "builtin:demo"},
            data={
                "train": str(folder / f"{name}.jsonl"),
                "max_length": 128,
                "packing": packed,
                "held_out": str(folder / "held_out.jsonl"),
            },
            train={
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "learning_rate": 1e-3,
                "weight_decay": 0.1,
                "max_steps": 12,
                "logging_steps": 1,
                "save_steps": 8,
            },
        )
    return files


@pytest.fixture(scope="module")
def alone(recipes: dict[bool, Path], ranks: Ranks) -> dict[bool, Run]:
    """The same recipes trained by one plain process."""
    runs = {}
    for packed, recipe in recipes.items():
        runs[packed] = train(ranks, recipe, "alone", 1, [])
    return runs


def train(ranks: Ranks, recipe: Path, name: str, count: int, overrides: list[str]) -> Run:
    ranks.run(count, ["sft.train", recipe, f"tracking.run_name={name}", *overrides])
    return Run(recipe.parent / "outputs" / recipe.stem / name)


def norms(run: Run) -> list[float]:
    """The norm of the gradients at every step."""
    return [json.loads(line)["grad_norm"] for line in run.metrics_file.read_text().splitlines()]


def assert_equal(run: Run, expected: Run) -> None:
    """One trajectory, and one model at its end."""
    assert losses(run) == pytest.approx(losses(expected), abs=1e-5)
    # AdamW gives the same weights for gradients of another scale, unless they are clipped.
    assert norms(run) == pytest.approx(norms(expected), rel=1e-3)
    trained, wanted = (AutoModelForCausalLM.from_pretrained(path.final) for path in (run, expected))
    assert trained.state_dict().keys() == wanted.state_dict().keys()
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(weight, wanted.state_dict()[name], atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("name", WAYS)
def test_ranks_that_share_a_batch_train_as_one_process(
    name: str, recipes: dict[bool, Path], alone: dict[bool, Run], ranks: Ranks
) -> None:
    way = WAYS[name]
    run = train(ranks, recipes[way.packed], name, way.ranks, way.overrides)
    running = run.record["running"]
    assert running["engine"] == way.engine
    assert running["tensor_parallel_size"] == str(way.tensor)
    assert running["sequence_parallel_size"] == str(way.sequence)
    assert decisions(run)["data_parallel_ranks"] == way.ranks // way.tensor // way.sequence
    assert decisions(run)["steps_per_epoch"] == 6
    assert len(losses(run)) == 12
    assert_equal(run, alone[way.packed])
    before, expected = (each.record["held_out_loss_before"] for each in (run, alone[way.packed]))
    assert before == pytest.approx(expected, abs=1e-5)
    if name in ("tensor-padded", "sequence-padded-zero2"):
        assert_equal(resumed(ranks, recipes[way.packed], run, way), run)


def resumed(ranks: Ranks, recipe: Path, finished: Run, way: Way) -> Run:
    """A copy of a run that was stopped after its first checkpoint, trained to its end."""
    copy = Run(finished.path.parent / f"{finished.path.name}-resumed")
    shutil.copytree(finished.path, copy.path)
    shutil.rmtree(copy.final)
    shutil.rmtree(copy.checkpoints / "checkpoint-12")
    overrides = [word.replace(finished.path.name, copy.path.name) for word in finished.record["overrides"]]
    record = finished.record | {"status": "interrupted", "overrides": overrides}
    (copy.path / "run.json").write_text(json.dumps(record))
    train(ranks, recipe, copy.path.name, way.ranks, way.overrides)
    return copy


def test_norms_inside_divided_heads_get_each_micro_batch_once(recipes: dict[bool, Path], ranks: Ranks) -> None:
    # transformers sums their gradients over ranks again with each micro-batch of a step.
    recipe = recipes[True]
    demo = make_demo(recipe.parent).model
    model = recipe.parent / "normed"
    shutil.copytree(demo, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = Qwen3Config(
        vocab_size=json.loads((demo / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(model)
    short = [f"model.name_or_path={model}", "train.max_steps=6"]
    expected = train(ranks, recipe, "normed-alone", 1, short)
    run = train(ranks, recipe, "normed", 2, [*TENSOR, *short])
    assert decisions(run)["gradient_accumulation_steps"] == 4
    assert_equal(run, expected)
