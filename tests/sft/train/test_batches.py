from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.data.documents import DOCUMENT, Chunk, Counts
from sft.data.findings import Findings
from sft.data.formats import IGNORED
from sft.data.packing import pack
from sft.data.prepare import prepare
from sft.data.store import DocumentStore, DocumentWriter, SequenceIndex
from sft.hub.demo import Demo
from sft.plan.facts import inspect_model
from sft.recipe.schema import Recipe
from sft.train.batches import Sequences, StepOrder

LENGTHS = [5, 9, 16, 1, 3, 3, 12, 7, 8, 2, 15, 4, 6, 16, 10] * 20


def documents(lengths: list[int], vocabulary: int = 2**31) -> list[tuple[list[int], list[int]]]:
    """Tokens that tell which document they are of, and labels: the first half of each is hidden."""
    found = []
    for number, length in enumerate(lengths, start=1):
        ids = [(1000 * number + position) % vocabulary for position in range(length)]
        found.append((ids, [IGNORED] * (length // 2 or 1) + ids[(length // 2 or 1) :]))
    return found


def stored(folder: Path, rows: list[tuple[list[int], list[int]]]) -> DocumentStore:
    folder.mkdir()
    records = np.zeros(len(rows), DOCUMENT)
    records["length"] = [len(ids) for ids, _ in rows]
    tokens = np.array([token for ids, _ in rows for token in ids], np.int32)
    trained = np.array([label != IGNORED for _, labels in rows for label in labels], np.uint8)
    with DocumentWriter(folder) as writer:
        writer.write(Chunk(tokens, trained, records, Counts(), Findings()))
    return DocumentStore.open(folder)


def sequences_of(store: DocumentStore, per_step: int, packed: bool, max_length: int = 16) -> Sequences:
    if packed:
        index = SequenceIndex(*pack(store.documents["length"], max_length))
    else:
        count = len(store.documents)
        index = SequenceIndex(np.arange(count), np.arange(1, count + 1))
    return Sequences(store, index, per_step, 7, packed)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DocumentStore:
    return stored(tmp_path_factory.mktemp("store") / "documents", documents(LENGTHS))


def cut(values: Any, lengths: list[int]) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(values), np.cumsum(lengths)[:-1])]


def test_packs_hold_every_document_whole_and_once(store: DocumentStore) -> None:
    packs = sequences_of(store, 1, packed=True)
    found = [
        (ids, labels)
        for pack in (packs[number] for number in range(len(packs)))
        for ids, labels in zip(
            cut(pack["input_ids"], pack["seq_lengths"]), cut(pack["labels"], pack["seq_lengths"]), strict=True
        )
    ]
    assert sorted(found) == sorted(documents(LENGTHS))


def test_a_pack_is_as_long_as_its_documents_and_no_longer_than_allowed(store: DocumentStore) -> None:
    packs = sequences_of(store, 8, packed=True)
    for number in range(len(packs)):
        pack = packs[number]
        assert sum(pack["seq_lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 16
        assert pack["input_ids"].dtype == pack["labels"].dtype == np.int64


def test_the_first_token_of_a_document_is_never_trained(store: DocumentStore) -> None:
    packs = sequences_of(store, 8, packed=True)
    for number in range(len(packs)):
        pack = packs[number]
        starts = np.cumsum([0, *pack["seq_lengths"][:-1]])
        assert (pack["labels"][starts] == IGNORED).all()


def test_without_packing_a_sequence_is_a_document(store: DocumentStore) -> None:
    alone = sequences_of(store, 1, packed=False)
    assert len(alone) == len(LENGTHS)
    for number, (ids, labels) in enumerate(documents(LENGTHS)):
        assert set(alone[number]) == {"input_ids", "labels"}
        assert (alone[number]["input_ids"].tolist(), alone[number]["labels"].tolist()) == (ids, labels)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("per_step", [1, 3, 8, 64, 700])
def test_the_last_step_is_filled_with_what_is_not_trained(packed: bool, per_step: int, store: DocumentStore) -> None:
    sequences = sequences_of(store, per_step, packed)
    real = len(sequences.index)
    assert len(sequences) % per_step == 0
    assert len(sequences) == real + sequences.fillers
    assert 0 <= sequences.fillers < per_step
    for number in range(real, len(sequences)):
        filler = sequences[number]
        assert (filler["input_ids"].tolist(), filler["labels"].tolist()) == ([7], [IGNORED])
        assert filler.get("seq_lengths") == ([1] if packed else None)


@pytest.mark.parametrize("packing", [True, False])
def test_what_training_sees_is_what_the_ledger_counts(
    packing: bool, make_recipe: Callable[..., Recipe], demo: Demo
) -> None:
    recipe = make_recipe(f"data.packing={str(packing).lower()}", "data.train=[{path: 'builtin:demo', epochs: 1.5}]")
    prepared = prepare(recipe, inspect_model(recipe))
    index, store = SequenceIndex.load(prepared.folder / "train.npz"), DocumentStore.open(prepared.folder)
    sequences = Sequences(store, index, 8, 0, packing)
    rows = [sequences[number] for number in range(len(index))]
    tokens = prepared.ledger["total"]["tokens"]
    assert len(rows) == prepared.sequences
    assert sum(len(row["input_ids"]) for row in rows) == tokens["trained"] + tokens["masked"] == tokens["in"]
    assert sum(int((row["labels"] != IGNORED).sum()) for row in rows) == tokens["trained"]
    if packing:
        assert prepared.ledger["packing"]["padding"] == sum(128 - len(row["input_ids"]) for row in rows)
        assert prepared.ledger["packing"]["packs"] == len(rows)


def orders(sequences: int, fillers: int, seed: int, epochs: range) -> list[list[int]]:
    order = StepOrder(sequences, fillers, seed)
    found = []
    for epoch in epochs:
        order.set_epoch(epoch)
        found.append(list(order))
    return found


@pytest.mark.parametrize(("sequences", "fillers"), [(1, 0), (1, 7), (100, 0), (1000, 24)])
def test_an_epoch_is_every_sequence_once_and_the_fillers_last(sequences: int, fillers: int) -> None:
    for order in orders(sequences, fillers, 3, range(3)):
        assert len(order) == sequences + fillers == len(StepOrder(sequences, fillers, 3))
        assert sorted(order[:sequences]) == list(range(sequences))
        assert order[sequences:] == list(range(sequences, sequences + fillers))


def test_the_order_is_one_of_seed_and_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = orders(500, 12, 0, range(4))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    _disturb_every_generator()
    assert orders(500, 12, 0, range(4)) == first
    # Straight to an epoch, as after a resume, and with other fillers, as at another batch size.
    assert orders(500, 12, 0, range(2, 3)) == first[2:3]
    assert [order[:500] for order in orders(500, 0, 0, range(4))] == [order[:500] for order in first]
    different = [*first, *orders(500, 12, 1, range(4))]
    assert len({tuple(order) for order in different}) == 8


@pytest.mark.parametrize(("real", "per_step", "empty"), [(8, 8, 1), (20, 8, 1), (3, 8, 4), (17, 4, 2), (16, 4, 2)])
def test_a_step_with_empty_places_holds_the_sequences_of_one_without(real: int, per_step: int, empty: int) -> None:
    def steps(empty: int) -> list[list[int]]:
        count = -(-real // per_step)
        order = StepOrder(real, count * (per_step + empty) - real, 3, per_step, empty)
        order.set_epoch(1)
        numbers = list(order)
        assert len(numbers) == len(order) == count * (per_step + empty)
        assert sorted(numbers) == list(range(len(order)))
        size = per_step + empty
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    for with_empty, without in zip(steps(empty), steps(0), strict=True):
        sequences = [number for number in without if number < real]
        assert [number for number in with_empty if number < real] == sequences
        assert with_empty[: len(sequences)] == sequences, "fillers stand at the end of a step"


@pytest.mark.parametrize("packed", [True, False])
def test_the_empty_places_of_all_steps_are_fillers(packed: bool, store: DocumentStore) -> None:
    plain = sequences_of(store, 8, packed)
    filled = Sequences(store, plain.index, 8, 7, packed, empty=1)
    assert len(filled) == len(plain) // 8 * 9
    assert filled[len(filled) - 1]["labels"].tolist() == [IGNORED]


def _disturb_every_generator() -> None:
    import random

    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def test_the_order_is_a_shuffle() -> None:
    (order,) = orders(1000, 0, 0, range(1))
    assert sum(position == value for position, value in enumerate(order)) < 10


def test_packed_documents_get_the_logits_they_get_alone(demo: Demo, tmp_path: Path) -> None:
    """Law 2, with the collator and the attention that training uses on a CPU."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model = AutoModelForCausalLM.from_pretrained(demo.model, attn_implementation="sdpa").eval()
    packs = sequences_of(stored(tmp_path / "documents", documents([5, 9, 3, 12, 7], 500)), 1, True, max_length=36)
    assert len(packs) == 1
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([packs[0]])
    del batch["labels"]
    pieces = cut(packs[0]["input_ids"], packs[0]["seq_lengths"])
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0]
        separate = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in pieces])
        leaked = model(input_ids=batch["input_ids"]).logits[0]
    torch.testing.assert_close(together, separate, atol=1e-4, rtol=0)
    assert (leaked - separate).abs().max() > 0.1, "a leak would not show in this test"
