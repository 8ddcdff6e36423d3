from itertools import chain

import numpy as np
import pytest

from sft.data.packing import pack


def sequences(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """The documents of each sequence."""
    members, ends = pack(lengths, max_length)
    return [part.tolist() for part in np.split(members, ends[:-1])] if len(ends) else []


def first_fit(lengths: np.ndarray, max_length: int) -> int:
    """How many sequences it takes to put each document where it first fits, in their order."""
    spaces: list[int] = []
    for length in lengths.tolist():
        place = next((index for index, space in enumerate(spaces) if space >= length), None)
        if place is None:
            spaces.append(max_length - length)
        else:
            spaces[place] -= length
    return len(spaces)


def lengths_of_many_kinds(max_length: int) -> list[np.ndarray]:
    random = np.random.default_rng(max_length)
    short = np.clip(random.lognormal(np.log(max_length / 8 + 1), 1, 700).astype(int), 1, max_length)
    return [
        random.integers(1, max_length + 1, 600),
        short,
        random.integers(max_length // 2 + 1, max_length + 1, 200),
        np.full(300, max_length),
        np.full(300, 1),
        np.full(301, max(1, max_length // 3)),
        random.choice([1, max_length, max(1, max_length // 2)], 500),
    ]


@pytest.mark.parametrize("max_length", [2, 3, 16, 128, 1000, 4096])
def test_every_document_is_in_one_sequence_and_none_is_too_long(max_length: int) -> None:
    for lengths in lengths_of_many_kinds(max_length):
        packs = sequences(lengths, max_length)
        assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
        assert all(lengths[part].sum() <= max_length for part in packs)
        assert all(packs)


@pytest.mark.parametrize("max_length", [2, 3, 16, 128, 1000])
def test_packing_is_never_worse_than_the_first_place_that_fits(max_length: int) -> None:
    for lengths in lengths_of_many_kinds(max_length):
        least = -(-int(lengths.sum()) // max_length)
        assert least <= len(sequences(lengths, max_length)) <= first_fit(lengths, max_length)


@pytest.mark.parametrize("max_length", [16, 128, 1000])
def test_packs_are_as_full_as_those_of_trl_over_all_documents_at_once(max_length: int) -> None:
    from datasets import Dataset, Features, List, Value
    from trl import pack_dataset

    features = Features({"input_ids": List(Value("int32"))})
    for lengths in lengths_of_many_kinds(max_length):
        rows = Dataset.from_dict({"input_ids": [[1] * length for length in lengths.tolist()]}, features=features)
        theirs = pack_dataset(rows, max_length, "bfd", {"batch_size": len(rows), "desc": None})
        assert len(sequences(lengths, max_length)) <= len(theirs)


def test_two_documents_at_most_share_a_sequence_of_two_tokens() -> None:
    packs = sequences(np.array([1, 2, 1, 1, 2, 1, 1]), 2)
    assert sorted(len(part) for part in packs) == [1, 1, 1, 2, 2]


def test_documents_as_long_as_a_sequence_stand_alone() -> None:
    assert sequences(np.array([7, 7, 7]), 7) == [[0], [1], [2]]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_nothing_is_packed_to_nothing(kind: type) -> None:
    members, ends = pack(np.zeros(0, kind), 16)
    assert (len(members), len(ends)) == (0, 0)
    assert (members.dtype, ends.dtype) == (np.int64, np.int64)


def test_lengths_may_be_of_the_kind_that_is_stored() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 300)
    assert sequences(lengths.astype(np.int32), 64) == sequences(lengths, 64)


def test_a_sequence_may_hold_any_number_of_documents() -> None:
    assert [len(part) for part in sequences(np.ones(2500, int), 2500)] == [2500]


def test_packs_are_nearly_full_where_documents_are_many() -> None:
    lengths = np.array([5, 9, 16, 1, 3, 3, 12, 7, 8, 2, 15, 4, 6, 16, 10] * 100)
    assert lengths.sum() / (16 * len(sequences(lengths, 16))) > 0.99
