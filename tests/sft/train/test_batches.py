"""What a step holds: sequences, their order, their work counted beforehand, and fingerprints, against what TRL's collator yields."""

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
from sft.hub.model_facts import inspect_model
from sft.parallel.sequence import PartOfSequences
from sft.recipe.schema import Recipe
from sft.train.batches import KEY, Fingerprint, Fingerprinted, Sequences, StepOrder, StepWork, batch_hash

LENGTHS = [5, 9, 16, 1, 3, 3, 12, 7, 8, 2, 15, 4, 6, 16, 10, 11, 13, 2, 2, 9]
MAX_LENGTH = 16
Document = tuple[list[int], list[int]]
"""Tokens and labels."""


def documents(lengths: list[int], vocabulary: int = 2**31) -> list[Document]:
    """Tokens that tell which document they are of. Odd documents are labelled from their middle on, even ones throughout."""
    found = []
    for number, length in enumerate(lengths, start=1):
        ids = [(1000 * number + position) % vocabulary for position in range(length)]
        hidden = length // 2 or 1 if number % 2 else 0
        found.append((ids, [IGNORED] * hidden + ids[hidden:]))
    return found


def stored(folder: Path, rows: list[Document]) -> DocumentStore:
    folder.mkdir()
    records = np.zeros(len(rows), DOCUMENT)
    records["length"] = [len(ids) for ids, _ in rows]
    records["trained"] = [sum(label != IGNORED for label in labels) for _, labels in rows]
    tokens = np.array([token for ids, _ in rows for token in ids], np.int32)
    loss_mask = np.array([label != IGNORED for _, labels in rows for label in labels], np.uint8)
    with DocumentWriter(folder) as writer:
        writer.write(tokens, loss_mask, records)
    return DocumentStore.open(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DocumentStore:
    return stored(tmp_path_factory.mktemp("store") / "documents", documents(LENGTHS))


def sequences_of(store: DocumentStore, per_step: int, packed: bool, empty: int = 0, max_length: int = 16) -> Sequences:
    count = len(store.documents)
    arrays = pack(store.documents["length"], max_length) if packed else (np.arange(count), np.arange(1, count + 1))
    return Sequences(store, SequenceIndex(*arrays), per_step, 7, packed, empty)


def cut(values: Any, lengths: list[int]) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(values), np.cumsum(lengths)[:-1])]


def test_packs_hold_every_document_complete_and_once(store: DocumentStore) -> None:
    packs = sequences_of(store, 1, packed=True)
    found = []
    for number in range(len(packs)):
        one = packs[number]
        assert sum(one["seq_lengths"]) == len(one["input_ids"]) == len(one["labels"]) <= MAX_LENGTH
        assert one["input_ids"].dtype == one["labels"].dtype == np.int64
        found += zip(cut(one["input_ids"], one["seq_lengths"]), cut(one["labels"], one["seq_lengths"]), strict=True)
    assert sorted(found) == sorted(documents(LENGTHS))


def test_without_packing_a_sequence_is_a_document(store: DocumentStore) -> None:
    alone = sequences_of(store, 1, packed=False)
    rows = [alone[number] for number in range(len(alone))]
    assert [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows] == documents(LENGTHS)
    assert all(set(row) == {"input_ids", "labels"} for row in rows)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("per_step", "empty"), [(1, 0), (3, 0), (8, 0), (700, 0), (8, 1)])
def test_steps_are_completed_with_what_is_not_trained(
    packed: bool, per_step: int, empty: int, store: DocumentStore
) -> None:
    sequences = sequences_of(store, per_step, packed, empty)
    real = len(sequences.index)
    assert len(sequences) == -(-real // per_step) * (per_step + empty)
    for number in range(real, len(sequences)):
        dummy = sequences[number]
        assert (dummy["input_ids"].tolist(), dummy["labels"].tolist()) == ([7], [IGNORED])
        assert dummy.get("seq_lengths") == ([1] if packed else None)


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


def test_packed_documents_get_the_logits_they_get_alone(demo: Demo, tmp_path: Path) -> None:
    """With the collator and the attention that training uses on a CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo.model, attn_implementation="sdpa").eval()
    store = stored(tmp_path / "documents", documents([5, 9, 3, 12, 7], 500))
    packs = sequences_of(store, 1, packed=True, max_length=36)
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


def orders(sequences: int, dummies: int, seed: int, epochs: range) -> list[list[int]]:
    order = StepOrder(sequences, dummies, seed, per_step=1)
    found = []
    for epoch in epochs:
        order.set_epoch(epoch)
        found.append(list(order))
    return found


@pytest.mark.parametrize(("sequences", "dummies"), [(1, 0), (1, 7), (100, 0), (1000, 24)])
def test_an_epoch_is_every_sequence_once_and_the_dummies_last(sequences: int, dummies: int) -> None:
    for order in orders(sequences, dummies, 3, range(3)):
        assert sorted(order[:sequences]) == list(range(sequences))
        assert order[sequences:] == list(range(sequences, sequences + dummies))


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


@pytest.mark.parametrize(("real", "per_step", "empty"), [(8, 8, 1), (20, 8, 1), (3, 8, 4), (17, 4, 2), (16, 4, 2)])
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


def collated(sequences: Sequences, numbers: list[int], packed: bool) -> dict[str, int]:
    """Tokens, labels and squares of one micro-batch, from the tensors that the model gets."""
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=7, padding_free=packed)(
        [sequences[number] for number in numbers]
    )
    labelled = int(batch["labels"][:, 1:].ne(-100).sum())
    if packed:
        lengths = batch["cu_seq_lens_q"].diff()
        lengths = lengths[
            batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] != 7
        ]  # a dummy is the padding token
    else:
        lengths = (batch["input_ids"] != 7).sum(1)
    lengths = lengths.to(torch.int64)
    return {"tokens": int(lengths.sum()), "labelled": labelled, "squares": int((lengths**2).sum())}


def counted(work: StepWork, first: int, last: int) -> dict[str, int]:
    found = work.between(first, last)
    return {"tokens": found.tokens, "labelled": found.target_tokens, "squares": int((found.lengths**2).sum())}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("micro_batch", "empty"), [(1, 0), (2, 1), (6, 2)])
def test_the_counted_work_is_what_the_collator_yields(
    store: DocumentStore, packed: bool, micro_batch: int, empty: int
) -> None:
    """Each step of three epochs, the steps together, and all before one, where a resumed run continues to count."""
    sequences = sequences_of(store, 6 - empty, packed, empty)
    order = sequences.order(seed=3)
    work, steps = StepWork(sequences, order), []
    for epoch in range(3):
        order.set_epoch(epoch)
        numbers = list(order)
        for start in range(0, len(numbers), 6):
            micro = [numbers[at : at + micro_batch] for at in range(start, start + 6, micro_batch)]
            parts = [collated(sequences, some, packed) for some in micro]
            steps.append({key: sum(part[key] for part in parts) for key in parts[0]})
            assert sorted(order.sequences_of(len(steps))) == sorted(
                number for number in numbers[start : start + 6] if number < len(sequences.index)
            )
        assert list(order) == numbers  # counting leaves it alone
    per_epoch = order.steps_per_epoch
    assert len(steps) == 3 * per_epoch
    assert [counted(work, step, step + 1) for step in range(len(steps))] == steps
    for first, last in ((0, 0), (1, per_epoch), (per_epoch - 1, per_epoch + 2), (0, len(steps))):
        assert counted(work, first, last) == {key: sum(one[key] for one in steps[first:last]) for key in steps[0]}
    assert [work.tokens_before(step) for step in range(len(steps))] == [
        sum(one["tokens"] for one in steps[:step]) for step in range(len(steps))
    ]


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
        "input_ids": np.concatenate([ids for ids, _ in rows]),
        "labels": np.concatenate([labels for _, labels in rows]),
        "seq_lengths": [len(ids) for ids, _ in rows],
    }


def packs(*sequences: list[Document]) -> int:
    """Hash of one batch of packs."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return batch_hash(collate([row(*rows) for rows in sequences]))


def padded(*rows: Document) -> int:
    """Hash of one batch with a document per sequence."""
    return batch_hash(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=False)([row(one) for one in rows]))


class Ranks:
    """accelerate's sum over ranks, given what the others have."""

    def __init__(self, *others: Fingerprint) -> None:
        self.others, self.device = others, torch.device("cpu")

    def reduce(self, halves: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        for other in self.others:
            value = int(line_of(other), 16)
            halves = halves + torch.tensor([value & 0xFFFFFFFF, value >> 32])
        return halves


def line_of(fingerprint: Fingerprint, *others: Fingerprint) -> str:
    fingerprint.gather(Ranks(*others))
    assert fingerprint.line is not None
    return fingerprint.line


def of_batches(*hashes: int) -> Fingerprint:
    fingerprint = Fingerprint()
    fingerprint.add([{KEY: value} for value in hashes])
    return fingerprint


def test_a_fingerprint_does_not_depend_on_packing_micro_batches_ranks_padding_or_dummies() -> None:
    assert packs(PRINTED) == packs(PRINTED[3:], PRINTED[:3]) == padded(*PRINTED)
    assert packs(PRINTED, [DUMMY], [DUMMY]) == padded(*PRINTED, DUMMY) == packs(PRINTED)
    assert padded(DUMMY) == packs([DUMMY]) == 0
    expected = line_of(of_batches(packs(PRINTED)))
    assert line_of(of_batches(padded(*PRINTED[4:]), padded(*PRINTED[:2]), padded(*PRINTED[2:4]))) == expected
    first, *others = [of_batches(packs([document])) for document in PRINTED]
    assert line_of(first, *others) == expected
    # The label of a first token has no loss.
    assert padded(([9, 10, 11], [IGNORED, 10, 11])) == padded(PRINTED[1])


@pytest.mark.parametrize(
    "changed",
    [
        PRINTED[1:],  # skipped
        [*PRINTED, PRINTED[0]],  # replayed
        [([5, 6, 7, 9], [IGNORED, IGNORED, 7, 9]), *PRINTED[1:]],  # another token
        [([5, 7, 6, 8], [IGNORED, IGNORED, 6, 8]), *PRINTED[1:]],  # two tokens swapped
        [([5, 6, 7, 8], [IGNORED, 6, 7, 8]), *PRINTED[1:]],  # one more target token
        [([5, 6, 7, 8], [IGNORED, IGNORED, 8, 7]), *PRINTED[1:]],  # two labels swapped
        [([12, 6, 7, 8], [IGNORED, IGNORED, 7, 8]), PRINTED[1], ([5, 13], [IGNORED, 13]), *PRINTED[3:]],
        [([5, 6], [IGNORED, IGNORED]), ([7, 8], [7, 8]), *PRINTED[1:]],  # cut in two
    ],
)
def test_a_fingerprint_shows_what_is_trained(changed: list[Document]) -> None:
    assert len({packs(PRINTED), packs(changed), padded(*changed)}) == 2


def test_a_fingerprint_shows_position_ids_that_do_not_restart() -> None:
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row(*PRINTED)])
    before = batch_hash(batch)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    assert batch_hash(batch) != before


def test_lines_add_up_to_the_line_of_all_their_steps() -> None:
    hashes = [padded(document) for document in PRINTED]
    lines = [int(line_of(of_batches(one)), 16) for one in hashes]
    assert f"{sum(lines) % 2**64:016x}" == line_of(of_batches(*hashes))


def test_ranks_that_share_a_batch_count_once() -> None:
    def batch(rank: int) -> dict[str, Any]:
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
        return PartOfSequences(Fingerprinted(collate, counts=rank == 0), rank, 2)([row(*PRINTED)])

    assert batch(0)["input_ids"].shape == batch(1)["input_ids"].shape == (1, 12)
    assert [batch(rank)[KEY] for rank in (0, 1)] == [packs(PRINTED), 0]


def test_a_fingerprint_is_the_same_in_every_version() -> None:
    """Those of old runs must stay comparable."""
    assert f"{packs(PRINTED):016x}" == "8714d200422ab0a0"
