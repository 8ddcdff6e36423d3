"""Fingerprints of real runs, on ranks of every kind, against those of the rows that the recipe's order has for each step.

Chosen are every kind of ranks once, packed or padded; the other half is `extra`.
"""

import json
from pathlib import Path

import pytest
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.prepared import entry_folder
from sft.data.store import DocumentStore, SequenceIndex
from sft.launch.job import open_recipe
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from sft.train.batches import Sequences, contents_of
from tests.slow.conftest import latest, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LEAVE = REPOSITORY / "tests" / "slow" / "train_and_leave.py"
STEPS = 9
ROWS = {
    "1 process": (1, ("train.micro_batch_size=1",)),
    "DDP": (2, ()),
    "ZeRO-2, workers that load": (
        2,
        ("train.deepspeed=zero2", "train.micro_batch_size=4", "train.trainer_args={dataloader_num_workers: 1}"),
    ),
    "FSDP2": (2, ("train.fsdp={}",)),
    "ranks that share tensors": (2, ("train.tensor_parallel_size=2",)),
    "ranks that share sequences": (
        2,
        ("train.deepspeed=zero2", "train.sequence_parallel_size=2", "train.micro_batch_size=1"),
    ),
}


@pytest.fixture
def recipe(own_recipe: Path) -> Path:
    return write_recipe(
        own_recipe,
        model={"name_or_path": "builtin:demo"},
        data={"train": [{"path": "builtin:demo", "split": "train[:150]"}], "max_length": 128},
        train={
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "save_steps": 100,
            "logging_steps": 1,
        },
    )


def told(run: Run) -> dict[int, str]:
    """The fingerprint of each line, by its step."""
    return {line["step"]: line["batch"] for line in map(json.loads, run.metrics_file.read_text().splitlines())}


def expected(recipe: Path, packed: bool) -> dict[int, str]:
    """Of each step, from the prepared rows; packed, the ninth step is in the second epoch or later."""
    opened, _, facts = open_recipe(recipe, [f"data.packing={str(packed).lower()}"])
    prepared = entry_folder(opened, facts) / "train.npz"
    index, store = SequenceIndex.load(prepared), DocumentStore.open(prepared.parent)
    sequences = Sequences(store, index, 8, 0, packed)
    order, collate = sequences.order(0), DataCollatorForLanguageModeling(0, packed)
    prints: dict[int, str] = {}
    while len(prints) < STEPS:
        places = list(order)
        for start in range(0, len(places), 8):
            rows = [sequences[number] for number in places[start : start + 8]]
            prints[len(prints) + 1] = f"{contents_of(collate(rows)).fingerprint:016x}"
        order.set_epoch(order.epoch + 1)
    return {step: prints[step] for step in range(1, STEPS + 1)}


PADDED = {"1 process", "ZeRO-2, workers that load", "ranks that share tensors"}


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        pytest.param(name, packing, marks=pytest.mark.extra if packing == (name in PADDED) else ())
        for name in ROWS
        for packing in (True, False)
    ],
)
def test_every_kind_of_ranks_is_given_the_rows_of_the_recipes_order(
    name: str, packing: bool, recipe: Path, ranks: Ranks
) -> None:
    count, overrides = ROWS[name]
    ranks.run(count, ["sft.train", recipe, f"data.packing={str(packing).lower()}", *overrides])
    found = told(latest(recipe))
    assert found == expected(recipe, packing)
    assert len(set(found.values())) == STEPS


def test_a_run_that_goes_on_between_two_lines_leaves_none_out(recipe: Path, ranks: Ranks) -> None:
    """Saved after step 3, where no line was due: it gets one, and the sum of the two is that of the undisturbed line."""
    words = [recipe, "train.logging_steps=4"]
    ranks.run(1, [LEAVE, "3", *words], expect=5)
    ranks.run(1, ["sft.train", *words])
    found, of_steps = told(latest(recipe)), expected(recipe, packed=True)
    ends = [1, 3, 4, 8, 9]
    assert list(found) == ends
    for before, end in zip([0, *ends], ends, strict=False):
        total = sum(int(of_steps[step], 16) for step in range(before + 1, end + 1))
        assert found[end] == f"{total % 2**64:016x}"
