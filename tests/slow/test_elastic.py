"""Law 4 on real gloo ranks: a run goes on with other ranks or another engine, and ends as one that was never interrupted.

Chosen are moves in which each engine is left once and gone to once, among them from one rank to several, from several to one, and to
four; the other pairs of docs/elastic.md are `extra`. So it is with adapters and with bf16.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file

from sft.hub.demo import make_demo
from sft.run.directory import Run
from tests.slow.conftest import losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, HALF = 10, 5


@dataclass(frozen=True)
class Engine:
    """Who computes."""

    ranks: int
    overrides: tuple[str, ...]


ENGINES = {
    "1": Engine(1, ()),
    "1 ZeRO-2": Engine(1, ("train.deepspeed=zero2",)),
    "2 DDP": Engine(2, ()),
    "2 ZeRO-1": Engine(2, ("train.deepspeed=zero1",)),
    "2 ZeRO-2": Engine(2, ("train.deepspeed=zero2",)),
    "2 ZeRO-2 offload": Engine(2, ("train.deepspeed=zero2_offload",)),
    "2 ZeRO-3": Engine(2, ("train.deepspeed=zero3",)),
    "2 ZeRO-3 offload": Engine(2, ("train.deepspeed=zero3_offload",)),
    "2 FSDP2": Engine(2, ("train.fsdp={}",)),
    "2 FSDP2 full": Engine(2, ("train.fsdp={state_dict_type: full}",)),
    "1 ZeRO-3": Engine(1, ("train.deepspeed=zero3",)),
    "4 DDP": Engine(4, ()),
    "4 ZeRO-2": Engine(4, ("train.deepspeed=zero2",)),
    "4 ZeRO-3": Engine(4, ("train.deepspeed=zero3",)),
    "2 ZeRO-2 SP": Engine(2, ("train.deepspeed=zero2", "train.sequence_parallel_size=2")),
    "2 TP": Engine(2, ("train.tensor_parallel_size=2",)),
}
MOVES = [
    ("2 DDP", "1"),
    ("2 DDP", "4 DDP"),
    ("1", "2 DDP"),
    ("2 ZeRO-2", "1 ZeRO-2"),
    ("1 ZeRO-2", "2 ZeRO-2"),
    ("2 ZeRO-2", "4 ZeRO-2"),
    ("2 ZeRO-3", "1 ZeRO-3"),
    ("1 ZeRO-3", "2 ZeRO-3"),
    ("2 ZeRO-3", "4 ZeRO-3"),
    ("2 ZeRO-2", "2 ZeRO-3"),
    ("2 ZeRO-3", "2 ZeRO-2"),
    ("2 ZeRO-2", "2 DDP"),
    ("2 ZeRO-3", "1"),
    ("2 DDP", "2 ZeRO-2"),
    ("1", "2 ZeRO-3"),
    ("2 ZeRO-3", "2 FSDP2"),
    ("2 FSDP2", "2 ZeRO-2"),
    ("2 FSDP2", "1"),
    ("2 FSDP2 full", "2 DDP"),
    ("2 ZeRO-1", "2 ZeRO-3 offload"),
    ("2 ZeRO-2 offload", "1"),
    ("2 ZeRO-2", "2 ZeRO-2 offload"),
    ("2 TP", "1"),
    ("2 ZeRO-2", "2 TP"),
    ("2 ZeRO-2 SP", "1"),
    ("2 ZeRO-3", "2 ZeRO-2 SP"),
]


CHOSEN = {
    ("2 DDP", "1"),
    ("1 ZeRO-2", "2 ZeRO-2"),
    ("2 ZeRO-2", "4 ZeRO-2"),
    ("1", "2 ZeRO-3"),
    ("2 ZeRO-3", "2 FSDP2"),
    ("2 FSDP2", "2 ZeRO-2"),
    ("2 FSDP2 full", "2 DDP"),
    ("2 ZeRO-1", "2 ZeRO-3 offload"),
    ("2 ZeRO-2 offload", "1"),
    ("2 TP", "1"),
    ("2 ZeRO-2", "2 TP"),
    ("2 ZeRO-2 SP", "1"),
    ("2 ZeRO-3", "2 ZeRO-2 SP"),
}


def moves(pairs: list[tuple[str, str]], chosen: Collection[tuple[str, str]]) -> list[ParameterSet]:
    """As rows of conftest.py, of pairs."""
    assert set(chosen) <= set(pairs)
    return [pytest.param(*pair, id="-".join(pair), marks=() if pair in chosen else pytest.mark.extra) for pair in pairs]


@dataclass
class Science:
    """A recipe and the runs of it that were never interrupted, by engine."""

    recipe: Path
    ranks: Ranks
    overrides: tuple[str, ...] = ()

    def run(self, name: str) -> Run:
        return Run(self.recipe.parent / "outputs" / self.recipe.stem / name)

    def train(self, name: str, engine: Engine, expect: int = 0) -> dict[str, str]:
        words = ["sft.train", self.recipe, *self.overrides, *engine.overrides, f"tracking.run_name={name}"]
        return self.ranks.run(engine.ranks, words, expect=expect)

    def whole(self, engine: str) -> Run:
        """A run of all steps, with a checkpoint at half of them."""
        name = "whole-" + engine.replace(" ", "-")
        if not self.run(name).path.exists():
            self.train(name, ENGINES[engine])
        return self.run(name)

    def stopped(self, engine: str, name: str) -> Run:
        """As if the run had been interrupted after half of its steps."""
        run = self.run(name)
        shutil.copytree(self.whole(engine).path, run.path)
        shutil.rmtree(run.checkpoints / f"checkpoint-{STEPS}")
        shutil.rmtree(run.final)
        lines = run.metrics_file.read_text().splitlines(keepends=True)
        run.metrics_file.write_text("".join(lines[:HALF]))
        overrides = [word for word in run.record["overrides"] if not word.startswith("tracking")]
        run.update(status="interrupted", overrides=[*overrides, f"tracking.run_name={name}"])
        return run


@pytest.fixture(scope="module")
def science(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Science:
    """Steps of 8 sequences over a set that does not divide by 8, so that they cross an epoch's uneven end."""
    folder = tmp_path_factory.mktemp("elastic")
    rows = make_demo(folder).train.read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(rows[:53]))
    train = {"global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3, "weight_decay": 0.1}
    recipe = write_recipe(
        folder / "elastic.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 128, "packing": False},
        train=train | {"max_steps": STEPS, "logging_steps": 1, "save_steps": HALF, "min_lr_ratio": 0.5},
    )
    return Science(recipe, ranks)


def of_kind(science: Science, kind: str, *overrides: str) -> Science:
    recipe = science.recipe.with_name(f"{kind}.yaml")
    shutil.copyfile(science.recipe, recipe)
    return Science(recipe, science.ranks, overrides)


@pytest.fixture(scope="module")
def adapters(science: Science) -> Science:
    return of_kind(science, "adapters", "model.lora={r: 4}", "train.learning_rate=5e-3")


@pytest.fixture(scope="module")
def rounded(science: Science) -> Science:
    return of_kind(science, "rounded", "train.precision=bf16")


def check_same(run: Run, expected: Run) -> None:
    assert run.record["status"] == "finished"
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(expected), abs=1e-5)
    trained, kept = (load_file(one.final / "model.safetensors") for one in (run, expected))
    assert trained.keys() == kept.keys()
    for name, weight in trained.items():
        torch.testing.assert_close(weight, kept[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize(("source", "target"), moves(MOVES, CHOSEN))
def test_a_run_goes_on_elsewhere_as_if_it_had_stayed(source: str, target: str, science: Science) -> None:
    name = f"from-{source}-to-{target}".replace(" ", "-")
    run = science.stopped(source, name)
    told = science.train(name, ENGINES[target])
    assert "resharded from full tensors" in told["stdout"]
    check_same(run, science.whole("1"))


# FSDP2 saves the weights of adapters under other names than their moments.
ADAPTERS = [("1", "2 ZeRO-3"), ("2 ZeRO-2", "1"), ("2 ZeRO-3", "2 FSDP2"), ("2 FSDP2", "1"), ("2 FSDP2 full", "1")]


@pytest.mark.parametrize(
    ("source", "target"), moves(ADAPTERS, {("1", "2 ZeRO-3"), ("2 ZeRO-3", "2 FSDP2"), ("2 FSDP2", "1")})
)
def test_adapters_go_on_elsewhere(source: str, target: str, adapters: Science) -> None:
    name = f"from-{source}-to-{target}".replace(" ", "-")
    run = adapters.stopped(source, name)
    assert "resharded from full tensors" in adapters.train(name, ENGINES[target])["stdout"]
    check_same(run, adapters.whole("1"))


# One process steps on fp32 copies of its own, ZeRO-1 with DeepSpeed's BF16_Optimizer, and FSDP2 holds fp32 weights.
ROUNDED = [("1", "2 ZeRO-2"), ("2 ZeRO-1", "1"), ("2 ZeRO-3", "2 FSDP2"), ("2 DDP", "2 ZeRO-1")]


@pytest.mark.parametrize(("source", "target"), moves(ROUNDED, {("2 ZeRO-1", "1"), ("2 ZeRO-3", "2 FSDP2")}))
def test_bf16_goes_on_elsewhere_from_the_fp32_copies(source: str, target: str, rounded: Science) -> None:
    """Engines round at other places, so that losses differ by bf16's rounding; copies that were lost would show as more."""
    name = f"from-{source}-to-{target}".replace(" ", "-")
    run = rounded.stopped(source, name)
    assert "resharded from full tensors" in rounded.train(name, ENGINES[target])["stdout"]
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(rounded.whole("1")), abs=0.03)
