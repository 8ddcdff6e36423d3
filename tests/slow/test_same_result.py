"""Law 1 on real processes: launcher, engine and number of ranks change who computes what, never the result.

Every row is a training of its own with an engine of its own; only the import is shared (tests/slow/ranks.py). The rows of launchers
start as a user would.

Chosen are all rows of packed sequences, which is every engine, on one rank, two and four; and of each other kind of sequences and
weights a row that holds the weights whole and one that divides them, so that each engine meets a second kind. The rest is `extra`.
"""

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft.hub.demo import make_demo
from sft.parallel.process_group import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, plain, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 10
ALL = "optimizer, gradients, parameters"


@dataclass(frozen=True)
class Row:
    """Who computes, and what must be found running."""

    ranks: int
    overrides: tuple[str, ...]
    engine: str
    sharded: str
    offloaded: str = "nothing"

    @property
    def tolerance(self) -> float:
        """Largest difference of a loss: CPU Adam sums in another order."""
        return 1e-5 if self.offloaded == "nothing" else 1e-4


def zero(ranks: int, name: str, sharded: str, offloaded: str = "nothing") -> Row:
    """A row of a file under ds_configs/."""
    return Row(ranks, (f"train.deepspeed={name}",), f"ZeRO-{name[4]}", sharded, offloaded)


ROWS = {
    "1 process, other micro-batch": Row(1, ("train.micro_batch_size=4",), "one process", "nothing"),
    "1 process, ZeRO-2": zero(1, "zero2", "optimizer, gradients"),
    "2 ranks, DDP": Row(2, (), "DDP", "nothing"),
    "2 ranks, ZeRO-1": zero(2, "zero1", "optimizer"),
    "2 ranks, ZeRO-2": zero(2, "zero2", "optimizer, gradients"),
    "2 ranks, ZeRO-3": zero(2, "zero3", ALL),
    "2 ranks, ZeRO-2, offload": zero(2, "zero2_offload", "optimizer, gradients", "optimizer on cpu"),
    "2 ranks, ZeRO-3, offload": zero(2, "zero3_offload", ALL, "optimizer on cpu, parameters on cpu"),
    "2 ranks, FSDP2": Row(2, ("train.fsdp={}",), "FSDP2", ALL),
    "4 ranks, ZeRO-3": zero(4, "zero3", ALL),
}
KINDS = {
    "packed": (True, ()),
    "padded": (False, ()),
    "packed, adapters": (True, ("model.lora={}",)),
    "padded, adapters": (False, ("model.lora={}",)),
}
CHOSEN = {
    "packed": set(ROWS),
    "padded": {"1 process, other micro-batch", "2 ranks, ZeRO-2", "2 ranks, ZeRO-3"},
    "packed, adapters": {"2 ranks, ZeRO-1", "2 ranks, FSDP2"},
    "padded, adapters": {"2 ranks, DDP", "2 ranks, ZeRO-3, offload"},
}
CASES = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=() if name in CHOSEN[kind] else pytest.mark.extra)
    for kind in KINDS
    for name in ROWS
]


@dataclass(frozen=True)
class Science:
    """A recipe and the run of it by one process, one sequence at a time."""

    recipe: Path
    overrides: tuple[str, ...]
    alone: Run

    def run(self, name: str) -> tuple[str, Run]:
        """The override that names a run, and the run."""
        return f"tracking.run_name={plain(name)}", Run(self.alone.path.parent / plain(name))

    def check(self, run: Run, row: Row) -> None:
        """One trajectory: the same plan, losses and weights, and the engine that was asked for."""
        expected = {"engine": row.engine, "processes": str(row.ranks), "sharded": row.sharded}
        assert run.record["running"].items() >= (expected | {"offloaded": row.offloaded}).items()
        shared = decisions(run)["micro_batch_size"] * decisions(run)["gradient_accumulation_steps"] * row.ranks
        assert shared == decisions(run)["global_batch_size"] == 8
        assert 1 < decisions(run)["steps_per_epoch"] == decisions(self.alone)["steps_per_epoch"] < STEPS
        assert len(losses(run)) == STEPS
        assert losses(run) == pytest.approx(losses(self.alone), abs=row.tolerance)
        trained, by_one = (load_file(path.final / "model.safetensors") for path in (run, self.alone))
        assert trained.keys() == by_one.keys()
        for name, weight in trained.items():
            torch.testing.assert_close(weight, by_one[name], atol=2e-4, rtol=0, msg=name)


@pytest.fixture(scope="module")
def science_of(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Callable[[str], Science]:
    """One of a kind; a parameter of the module would order the tests by it, and train it anew for every other row."""
    return cache(lambda kind: train_alone(kind, tmp_path_factory.mktemp("same"), ranks))


def train_alone(kind: str, folder: Path, ranks: Ranks) -> Science:
    """Steps of 8 sequences over a set that does not divide by 8, so that they cross an epoch's uneven end."""
    packed, overrides = KINDS[kind]
    rows = make_demo(folder).train.read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(rows[:101] if packed else rows[:53]))
    recipe = write_recipe(
        folder / "same.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 128, "packing": packed},
        train={
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": 100,
        },
    )
    one = Science(recipe, overrides, Run(folder / "outputs" / "same" / "alone"))
    ranks.run(1, ["sft.train", recipe, *overrides, "train.micro_batch_size=1", "tracking.run_name=alone"])
    assert decisions(one.alone)["gradient_accumulation_steps"] == 8
    return one


@pytest.fixture
def science(science_of: Callable[[str], Science]) -> Science:
    return science_of("packed")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_engine_and_number_of_ranks_trains_alike(
    kind: str, name: str, science_of: Callable[[str], Science], ranks: Ranks
) -> None:
    science = science_of(kind)
    row, (run_name, run) = ROWS[name], science.run(name)
    ranks.run(row.ranks, ["sft.train", science.recipe, *science.overrides, *row.overrides, run_name])
    science.check(run, row)


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "sft.train"]
# `--multi_gpu` is accelerate's word for several processes; without a GPU they are CPU ranks.
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m", "sft.train"]
DEEPSPEED = ["deepspeed", "--num_gpus", "2", "--master_port", "PORT", "--module", "sft.train"]
SFT_SH = ["bash", str(REPOSITORY / "scripts" / "sft.sh")]
LAUNCHERS = {
    "sft.sh": (SFT_SH, ROWS["2 ranks, DDP"]),
    "torchrun": (TORCHRUN, ROWS["2 ranks, ZeRO-3"]),
    "accelerate": (ACCELERATE, ROWS["2 ranks, ZeRO-2"]),
    "deepspeed": (DEEPSPEED, ROWS["2 ranks, ZeRO-1"]),
}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_trains_alike(launcher: str, science: Science, command: Command) -> None:
    words, row = LAUNCHERS[launcher]
    words = [str(free_port()) if word == "PORT" else word for word in words]
    run_name, run = science.run(launcher)
    command([*words, science.recipe, *row.overrides, run_name], NPROC="2")
    science.check(run, row)
    assert run.record["status"] == "finished"
    assert (run.path / "report.md").is_file()


@pytest.fixture
def two_machines() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as machines:
        yield machines


@pytest.mark.extra  # tests/slow/test_two_hosts.py has two addresses, test_launch.py what starts two machines
def test_two_machines_train_alike(science: Science, command: Command, two_machines: ThreadPoolExecutor) -> None:
    """As two machines would be started, at one address; tests of two addresses are elsewhere."""
    run_name, run = science.run("two machines")
    where = {"NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    row = ROWS["2 ranks, DDP"]
    words = [*SFT_SH, science.recipe, *row.overrides, run_name]
    both = [two_machines.submit(command, words, NODE_RANK=str(rank), **where) for rank in (0, 1)]
    assert [done.result().returncode for done in both] == [0, 0]
    science.check(run, row)
    assert run.record["hardware"]["ranks_per_node"] == 1
