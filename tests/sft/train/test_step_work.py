"""What a step holds, counted beforehand, against what the trainer's collator really yields."""

from typing import Any

import numpy as np
import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.packing import pack
from sft.data.store import DOCUMENT, DocumentStore, DocumentWriter, SequenceIndex
from sft.train.batches import Sequences, StepOrder
from sft.train.step_work import StepWork

LENGTHS = [5, 9, 16, 1, 3, 3, 12, 7, 8, 2, 15, 4, 6, 16, 10, 11, 13, 2, 2, 9]
MAX_LENGTH = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DocumentStore:
    """Half of the documents are trained from their first token on, as plain text is; the others from the middle."""
    masks = [np.arange(length) >= (length // 2 if number % 2 else 0) for number, length in enumerate(LENGTHS)]
    records = np.zeros(len(LENGTHS), DOCUMENT)
    records["length"], records["trained"] = LENGTHS, [mask.sum() for mask in masks]
    folder = tmp_path_factory.mktemp("store")
    tokens = np.arange(1, sum(LENGTHS) + 1, dtype=np.int32)
    with DocumentWriter(folder) as writer:
        writer.write(tokens, np.concatenate(masks).astype(np.uint8), records)
    return DocumentStore.open(folder)


def prepared(
    store: DocumentStore, per_step: int, packed: bool, empty: int = 0
) -> tuple[Sequences, StepOrder, StepWork]:
    count = len(LENGTHS)
    arrays = pack(store.documents["length"], MAX_LENGTH) if packed else (np.arange(count), np.arange(1, count + 1))
    sequences = Sequences(store, SequenceIndex(*arrays), per_step, 0, packed, empty)
    order = StepOrder(len(sequences.index), sequences.fillers, 3, per_step, empty)
    return sequences, order, StepWork(store, sequences.index, order, per_step)


def collated(sequences: Sequences, numbers: list[int], packed: bool) -> dict[str, int]:
    """Tokens, labels and squares of one micro-batch, from the tensors that the model gets."""
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)(
        [sequences[number] for number in numbers]
    )
    labelled = int(batch["labels"][:, 1:].ne(-100).sum())
    if packed:
        lengths = batch["cu_seq_lens_q"].diff()
        real = batch["input_ids"][0, batch["cu_seq_lens_q"][:-1].long()] != 0  # a filler is the padding token
        lengths = lengths[real]
    else:
        lengths = (batch["input_ids"] != 0).sum(1)
    lengths = lengths.to(torch.int64)
    return {"tokens": int(lengths.sum()), "labelled": labelled, "squares": int((lengths**2).sum())}


def counted(work: StepWork, first: int, last: int) -> dict[str, int]:
    found = work.between(first, last)
    return {"tokens": found.tokens, "labelled": found.labelled_tokens, "squares": found.squares}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro_batch", [1, 2, 6])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_each_step_of_three_epochs_holds_what_the_collator_yields(
    store: DocumentStore, packed: bool, micro_batch: int, empty: int
) -> None:
    sequences, order, work = prepared(store, 6 - empty, packed, empty)
    assert sequences.fillers > 0
    step = 0
    for epoch in range(3):
        order.set_epoch(epoch)
        numbers = list(order)
        for start in range(0, len(numbers), 6):
            micro = [numbers[at : at + micro_batch] for at in range(start, start + 6, micro_batch)]
            parts = [collated(sequences, some, packed) for some in micro]
            assert counted(work, step, step + 1) == {key: sum(part[key] for part in parts) for key in parts[0]}
            step += 1
    assert step == 3 * work.steps_per_epoch


@pytest.mark.parametrize("packed", [True, False])
def test_steps_together_hold_what_they_hold_apart_also_across_epochs(store: DocumentStore, packed: bool) -> None:
    _, _, work = prepared(store, 3, packed)
    per_epoch = work.steps_per_epoch
    for first, last in ((0, 1), (1, per_epoch), (per_epoch - 1, per_epoch + 2), (2, 3 * per_epoch + 1)):
        apart = [counted(work, step, step + 1) for step in range(first, last)]
        assert counted(work, first, last) == {key: sum(one[key] for one in apart) for key in apart[0]}


def test_an_epoch_holds_every_token_and_no_label_on_a_first_token(store: DocumentStore) -> None:
    _, _, work = prepared(store, 4, packed=True)
    epoch = work.between(0, work.steps_per_epoch)
    assert epoch.tokens == sum(LENGTHS)
    assert epoch.squares == sum(length**2 for length in LENGTHS)
    first_trained = sum(number % 2 == 0 or length // 2 == 0 for number, length in enumerate(LENGTHS))
    assert epoch.labelled_tokens == int(store.documents["trained"].sum()) - first_trained


def test_tokens_before_a_step_are_those_of_all_steps_before_it(store: DocumentStore) -> None:
    """Where a resumed run goes on counting."""
    _, _, work = prepared(store, 4, packed=True)
    for step in range(3 * work.steps_per_epoch + 2):
        assert work.tokens_before(step) == work.between(0, step).tokens


def test_counting_does_not_disturb_the_order_of_the_data(store: DocumentStore) -> None:
    _, order, work = prepared(store, 4, packed=True)
    order.set_epoch(1)
    before = list(order)
    work.between(0, 1)
    assert list(order) == before


def test_no_step_holds_nothing(store: DocumentStore) -> None:
    _, _, work = prepared(store, 4, packed=True)
    assert counted(work, 5, 5) == {"tokens": 0, "labelled": 0, "squares": 0}


def test_a_step_that_is_left_out_counts_nothing(store: DocumentStore) -> None:
    _, order, work = prepared(store, 4, packed=False)
    lengths = [work.between(step, step + 1).tokens for step in range(10)]
    order.left_out = frozenset({2, 8})
    assert [work.between(step, step + 1).tokens for step in range(10)] == [
        0 if step + 1 in order.left_out else length for step, length in enumerate(lengths)
    ]
    assert work.between(0, 10).tokens == sum(lengths) - lengths[1] - lengths[7]
    assert work.tokens_before(8) == sum(lengths[:8]) - lengths[1] - lengths[7]
