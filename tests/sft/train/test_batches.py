"""What a step holds: sequences, their order, and the account of each batch, against what TRL's collator yields."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.formats import IGNORED
from sft.data.packing import pack
from sft.data.prepare import prepare
from sft.data.store import DOCUMENT, DocumentStore, DocumentWriter, SequenceIndex
from sft.hub.demo import Demo
from sft.hub.flops import AttentionLayers, Matmuls, ModelFlops
from sft.hub.model_facts import inspect_model
from sft.parallel.sequence import PartOfSequences
from sft.recipe.schema import Recipe
from sft.train.batches import CONTENTS, Accounted, Contents, Sequences, StepOrder, Work, WorkSum, add_ranks, contents_of

LENGTHS = [5, 9, 16, 3, 3, 12, 7, 8, 2, 15, 4, 6, 16, 10, 11, 13, 2, 2, 9]
MAX_LENGTH = 16
Document = tuple[list[int], list[int]]
"""Tokens and labels."""


def documents(lengths: list[int]) -> list[Document]:
    """Tokens that tell which document they are of. Odd documents are labelled from their middle on, even ones throughout."""
    found = []
    for number, length in enumerate(lengths, start=1):
        ids = [1000 * number + position for position in range(length)]
        hidden = length // 2 or 1 if number % 2 else 0
        found.append((ids, [IGNORED] * hidden + ids[hidden:]))
    return found


def stored(folder: Path, rows: list[Document]) -> DocumentStore:
    folder.mkdir()
    records = np.zeros(len(rows), DOCUMENT)
    records["length"] = [len(ids) for ids, _ in rows]
    tokens = np.array([token for ids, _ in rows for token in ids], np.int32)
    loss_mask = np.array([label != IGNORED for _, labels in rows for label in labels], np.uint8)
    with DocumentWriter(folder) as writer:
        writer.write(tokens, loss_mask, records)
    return DocumentStore.open(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DocumentStore:
    return stored(tmp_path_factory.mktemp("store") / "documents", documents(LENGTHS))


def sequences_of(store: DocumentStore, per_step: int, packed: bool, empty: int = 0) -> Sequences:
    count = len(store.documents)
    arrays = pack(store.documents["length"], MAX_LENGTH) if packed else (np.arange(count), np.arange(1, count + 1))
    return Sequences(store, SequenceIndex(*arrays), per_step, 7, packed, empty)


def cut(values: Any, lengths: list[int]) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(values), np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_hold_every_document_complete_and_once(packed: bool, store: DocumentStore) -> None:
    sequences, found = sequences_of(store, 1, packed), []
    for number in range(len(sequences)):
        one = sequences[number]
        lengths = one.get("seq_lengths", [len(one["input_ids"])])
        assert sum(lengths) == len(one["input_ids"]) == len(one["labels"]) <= MAX_LENGTH
        found += zip(cut(one["input_ids"], lengths), cut(one["labels"], lengths), strict=True)
    assert sorted(found) == sorted(documents(LENGTHS))


@pytest.mark.parametrize(("per_step", "empty", "packed"), [(3, 0, True), (700, 0, False), (8, 1, True)])
def test_steps_are_completed_with_what_is_not_trained(
    per_step: int, empty: int, packed: bool, store: DocumentStore
) -> None:
    sequences = sequences_of(store, per_step, packed, empty)
    real = len(sequences.index)
    assert len(sequences) == -(-real // per_step) * (per_step + empty)
    for number in range(real, len(sequences)):
        dummy = sequences[number]
        assert (dummy["input_ids"].tolist(), dummy["labels"].tolist()) == ([7], [IGNORED])
        assert dummy.get("seq_lengths") == ([1] if packed else None)


def test_what_training_sees_is_what_the_ledger_counts(make_recipe: Callable[..., Recipe], demo: Demo) -> None:
    recipe = make_recipe("data.train=[{path: 'builtin:demo', epochs: 1.5}]")
    prepared = prepare(recipe, inspect_model(recipe))
    index, store = SequenceIndex.load(prepared.folder / "train.npz"), DocumentStore.open(prepared.folder)
    sequences = Sequences(store, index, 8, 0, packed=True)
    rows = [sequences[number] for number in range(len(index))]
    tokens = prepared.ledger["total"]["tokens"]
    assert len(rows) == prepared.sequences
    assert sum(len(row["input_ids"]) for row in rows) == tokens["trained"] + tokens["masked"] == tokens["in"]
    assert sum(int((row["labels"] != IGNORED).sum()) for row in rows) == tokens["trained"]
    assert prepared.ledger["packing"]["padding"] == sum(128 - len(row["input_ids"]) for row in rows)


def orders(sequences: int, dummies: int, seed: int, epochs: range) -> list[list[int]]:
    order, found = StepOrder(sequences, dummies, seed, per_step=1), []
    for epoch in epochs:
        order.set_epoch(epoch)
        found.append(list(order))
    return found


def test_an_epoch_is_every_sequence_once_and_the_dummies_last() -> None:
    for order in orders(1000, 24, 3, range(3)):
        assert sorted(order[:1000]) == list(range(1000))
        assert order[1000:] == list(range(1000, 1024))


def test_the_order_depends_on_seed_and_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = orders(500, 12, 0, range(4))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    np.random.seed(99)
    torch.manual_seed(99)
    assert orders(500, 12, 0, range(4)) == first
    # Straight to an epoch, as after a resume, and with other dummies, as with another batch size.
    assert orders(500, 12, 0, range(2, 3)) == first[2:3]
    assert [order[:500] for order in orders(500, 0, 0, range(4))] == [order[:500] for order in first]
    assert len({tuple(order) for order in [*first, *orders(500, 12, 1, range(4))]}) == 8


@pytest.mark.parametrize(("real", "per_step", "empty"), [(20, 8, 1), (3, 8, 4), (16, 4, 2)])
def test_a_step_with_empty_slots_holds_the_sequences_of_one_without(real: int, per_step: int, empty: int) -> None:
    def steps(empty: int) -> list[list[int]]:
        count, size = -(-real // per_step), per_step + empty
        order = StepOrder(real, count * size - real, 3, per_step, empty)
        order.set_epoch(1)
        numbers = list(order)
        assert sorted(numbers) == list(range(len(order))) and len(order) == count * size
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    for with_empty, without in zip(steps(empty), steps(0), strict=True):
        sequences = [number for number in without if number < real]
        assert with_empty[: len(sequences)] == sequences
        assert min(with_empty[len(sequences) :], default=real) >= real


@pytest.mark.parametrize(("micro_batch", "empty", "packed"), [(2, 1, True), (6, 2, False)])
def test_a_batch_carries_the_numbers_and_the_counts_of_what_it_holds(
    micro_batch: int, empty: int, packed: bool, store: DocumentStore
) -> None:
    sequences = sequences_of(store, 6 - empty, packed, empty)
    collate = Accounted(DataCollatorForLanguageModeling(pad_token_id=7, padding_free=packed), counts=True)
    order, given = list(sequences.order(seed=3)), documents(LENGTHS)
    for start in range(0, len(order), micro_batch):
        numbers = order[start : start + micro_batch]
        found: Contents = collate([sequences[number] for number in numbers])[CONTENTS]
        real = [number for number in numbers if number < len(sequences.index)]
        rows = [given[int(document)] for number in real for document in sequences.index.of(number)]
        assert found.sequences == tuple(real)
        assert found.lengths.tolist() == [len(ids) for ids, _ in rows]
        assert found.target_tokens == sum(label != IGNORED for _, labels in rows for label in labels[1:])


PRINTED: list[Document] = [
    ([5, 6, 7, 8], [IGNORED, IGNORED, 7, 8]),
    ([9, 10, 11], [9, 10, 11]),
    ([12, 13], [IGNORED, 13]),
    ([5, 6, 7, 8, 9, 10], [IGNORED] * 5 + [10]),
    ([20, 21, 22, 23, 24], [IGNORED, 21, 22, IGNORED, 24]),
    ([30, 31], [30, 31]),
]
DUMMY: Document = ([0], [IGNORED])


def row(*rows: Document) -> dict[str, Any]:
    """A sequence as Sequences gives it; of several documents only where they are packed."""
    return {
        "number": 0,
        "input_ids": np.concatenate([ids for ids, _ in rows]),
        "labels": np.concatenate([labels for _, labels in rows]),
        "seq_lengths": [len(ids) for ids, _ in rows],
    }


def packs(*sequences: list[Document]) -> int:
    """Fingerprint of one batch of packs."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return contents_of(collate([row(*rows) for rows in sequences])).fingerprint


def padded(*rows: Document) -> int:
    """Fingerprint of one batch with a document per sequence."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=False)
    return contents_of(collate([row(one) for one in rows])).fingerprint


def test_a_fingerprint_does_not_depend_on_packing_micro_batches_ranks_padding_or_dummies() -> None:
    assert packs(PRINTED) == packs(PRINTED[3:], PRINTED[:3]) == padded(*PRINTED)
    assert packs(PRINTED, [DUMMY], [DUMMY]) == padded(*PRINTED, DUMMY) == packs(PRINTED)
    assert padded(DUMMY) == packs([DUMMY]) == 0
    parts = padded(*PRINTED[4:]), padded(*PRINTED[:2]), padded(*PRINTED[2:4])
    assert sum(parts) % 2**64 == packs(PRINTED)
    # Those of old runs must stay comparable.
    assert f"{packs(PRINTED):016x}" == "8714d200422ab0a0"
    # The label of a first token has no loss.
    assert padded(([9, 10, 11], [IGNORED, 10, 11])) == padded(PRINTED[1])


def test_a_line_sums_its_steps_over_all_ranks() -> None:
    flops = ModelFlops(Matmuls(trained=10, head_trained=3), (AttentionLayers(2, 4),))
    work = WorkSum(flops)
    assert work.gather(1.5, 2.5) is None
    work.add([Contents((), np.array([3, 4]), 2, value) for value in (1, 2)])
    one = flops.of(np.array([3, 4]), 2)
    assert work.gather(1.5, 2.5) == Work(14, 4, 2 * one, f"{3:016x}", (1.5, 2.5))
    # Memory is that of the rank with most, each figure by itself.
    ranks = [(2**64 - 1, 7, 2, 5.0, (1.5, 2.5)), (2, 7, 2, 5.0, (3.0, 1.0))]
    assert add_ranks(ranks) == Work(14, 4, 10.0, f"{1:016x}", (3.0, 2.5))


@pytest.mark.parametrize(
    "changed",
    [
        PRINTED[1:],  # skipped
        [([5, 7, 6, 8], [IGNORED, IGNORED, 6, 8]), *PRINTED[1:]],  # two tokens swapped
        [([5, 6, 7, 8], [IGNORED, 6, 7, 8]), *PRINTED[1:]],  # one more target token
        [([5, 6], [IGNORED, IGNORED]), ([7, 8], [7, 8]), *PRINTED[1:]],  # cut in two
    ],
)
def test_a_fingerprint_shows_what_is_trained(changed: list[Document]) -> None:
    assert len({packs(PRINTED), packs(changed), padded(*changed)}) == 2


def test_a_fingerprint_shows_position_ids_that_do_not_restart() -> None:
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row(*PRINTED)])
    before = contents_of(batch)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    assert contents_of(batch).fingerprint != before.fingerprint


def test_ranks_that_share_a_batch_count_once() -> None:
    def contents(rank: int) -> Contents:
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
        batch = PartOfSequences(Accounted(collate, counts=rank == 0), rank, 2)([row(*PRINTED)])
        assert batch["input_ids"].shape == (1, 12)
        found: Contents = batch[CONTENTS]
        return found

    assert [contents(rank).fingerprint for rank in (0, 1)] == [packs(PRINTED), 0]
    assert [int(contents(rank).lengths.sum()) for rank in (0, 1)] == [22, 0]
    assert [contents(rank).sequences for rank in (0, 1)] == [(0,), (0,)]
