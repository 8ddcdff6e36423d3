import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, List, Value

from sft.batches import StepOrder, documents_dataset, fill_last_step, pack_documents
from sft.data import IGNORED
from sft.demo import Demo

COLUMN = List(Value("int32"))


def documents(lengths: list[int]) -> Dataset:
    """Documents whose tokens tell which they are; the first half of each is hidden."""
    rows = [
        {
            "input_ids": [1000 * number + position for position in range(length)],
            "labels": [IGNORED] * (length // 2) + [1000 * number + position for position in range(length // 2, length)],
        }
        for number, length in enumerate(lengths, start=1)
    ]
    return Dataset.from_list(rows, features=Features({"input_ids": COLUMN, "labels": COLUMN}))


LENGTHS = [5, 9, 16, 1, 3, 3, 12, 7, 8, 2, 15, 4, 6, 16, 10] * 100


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return pack_documents(documents(LENGTHS), 16, tmp_path_factory.mktemp("packs") / "packs.arrow")


def cut(values: list[int], lengths: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for length in lengths:
        parts.append(values[start : start + length])
        start += length
    return parts


def test_packing_keeps_every_document_whole_and_once(packs: Dataset) -> None:
    found = [
        (tuple(ids), tuple(labels))
        for row in packs
        for ids, labels in zip(
            cut(row["input_ids"], row["seq_lengths"]), cut(row["labels"], row["seq_lengths"]), strict=True
        )
    ]
    wanted = [(tuple(row["input_ids"]), tuple(row["labels"])) for row in documents(LENGTHS)]
    assert sorted(found) == sorted(wanted)


def test_a_pack_is_as_long_as_its_documents_and_no_longer_than_allowed(packs: Dataset) -> None:
    for row in packs:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 16


def test_documents_are_packed_all_at_once(packs: Dataset) -> None:
    """By batches of 1,000 a part of each batch would be left over; here nearly every pack is full."""
    assert sum(LENGTHS) / (16 * len(packs)) > 0.99


def test_packing_is_the_same_each_time_and_reads_back_from_its_file(packs: Dataset, tmp_path: Path) -> None:
    assert pack_documents(documents(LENGTHS), 16, tmp_path / "p.arrow").to_list() == packs.to_list()
    assert documents_dataset(tmp_path / "p.arrow").to_list() == packs.to_list()


def test_a_pack_may_hold_more_than_one_batch_of_rows(tmp_path: Path) -> None:
    packed = pack_documents(documents([1] * 2500), 2500, tmp_path / "p.arrow")
    assert len(packed) == 1
    assert packed[0]["seq_lengths"] == [1] * 2500


def test_trl_packs_as_it_is_called() -> None:
    """What `pack_documents` leans on: the names and order of TRL's arguments, and what goes to `map`."""
    from trl import pack_dataset

    assert list(inspect.signature(pack_dataset).parameters) == ["dataset", "seq_length", "strategy", "map_kwargs"]
    packed = pack_dataset(documents([2, 3]), 5, "bfd", {"batch_size": 2})
    assert set(packed.column_names) == {"input_ids", "labels", "seq_lengths"}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("per_step", [1, 3, 8, 64, 700])
def test_the_last_step_is_filled_with_what_is_not_trained(packed: bool, per_step: int, packs: Dataset) -> None:
    sequences = packs if packed else documents(LENGTHS)
    filled, fillers = fill_last_step(sequences, per_step, pad_token_id=7)
    assert len(filled) % per_step == 0
    assert len(filled) == len(sequences) + fillers
    assert 0 <= fillers < per_step
    assert filled.features == sequences.features
    rows = filled.to_list()
    assert rows[: len(sequences)] == sequences.to_list()
    filler = {"input_ids": [7], "labels": [IGNORED]} | ({"seq_lengths": [1]} if packed else {})
    assert rows[len(sequences) :] == [filler] * fillers


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


def _disturb_every_generator() -> None:
    import random

    import numpy as np
    import torch

    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def test_the_order_is_a_shuffle() -> None:
    (order,) = orders(1000, 0, 0, range(1))
    assert sum(position == value for position, value in enumerate(order)) < 10


def test_documents_are_read_from_the_file_that_was_written(tmp_path: Path) -> None:
    import pyarrow as pa

    from sft.data import SCHEMA

    rows: list[dict[str, Any]] = [{"input_ids": [1, 2], "labels": [IGNORED, 2]}, {"input_ids": [3], "labels": [3]}]
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))
    assert documents_dataset(tmp_path / "d.arrow").to_list() == rows
    assert pack_documents(documents_dataset(tmp_path / "d.arrow"), 4, tmp_path / "p.arrow")[0]["seq_lengths"] == [2, 1]


def test_packed_documents_get_the_logits_they_get_alone(demo: Demo, tmp_path: Path) -> None:
    """Law 2, with the collator and the attention that training uses on a CPU."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model = AutoModelForCausalLM.from_pretrained(demo.model, attn_implementation="sdpa").eval()
    rows = [
        {"input_ids": [(17 * number + token) % 500 + 3 for token in row["input_ids"]], "labels": row["labels"]}
        for number, row in enumerate(documents([5, 9, 3, 12, 7]))
    ]
    alone = Dataset.from_list(rows, features=Features({"input_ids": COLUMN, "labels": COLUMN}))
    packs = pack_documents(alone, 36, tmp_path / "packs.arrow")
    assert len(packs) == 1
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(list(packs))
    del batch["labels"]
    pieces = cut(packs[0]["input_ids"], packs[0]["seq_lengths"])
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0]
        separate = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in pieces])
        leaked = model(input_ids=batch["input_ids"]).logits[0]
    torch.testing.assert_close(together, separate, atol=1e-4, rtol=0)
    assert (leaked - separate).abs().max() > 0.1, "a leak would not show in this test"
