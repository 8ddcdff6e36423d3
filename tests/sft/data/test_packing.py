from itertools import chain

import numpy as np
import pytest

from sft.data.packing import pack


def sequences(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """The documents of each sequence."""
    members, ends = pack(lengths, max_length)
    return [part.tolist() for part in np.split(members, ends[:-1])] if len(ends) else []


def lengths_of_many_kinds(max_length: int) -> list[np.ndarray]:
    random = np.random.default_rng(max_length)
    short = np.clip(random.lognormal(np.log(max_length / 8 + 1), 1, 700).astype(int), 1, max_length)
    return [
        random.integers(1, max_length + 1, 600),
        short,
        np.full(300, max_length),
        np.full(301, max(1, max_length // 3)),
    ]


@pytest.mark.parametrize("max_length", [2, 3, 16, 128, 1000, 4096])
def test_every_document_is_in_one_sequence_and_none_is_too_long(max_length: int) -> None:
    for lengths in lengths_of_many_kinds(max_length):
        packs = sequences(lengths, max_length)
        assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
        assert all(lengths[part].sum() <= max_length for part in packs)
        assert all(packs)


@pytest.mark.parametrize("max_length", [16, 128, 1000])
def test_packs_are_as_full_as_those_of_trl_over_all_documents_at_once(max_length: int) -> None:
    from datasets import Dataset, Features, List, Value
    from trl import pack_dataset

    features = Features({"input_ids": List(Value("int32"))})
    for lengths in lengths_of_many_kinds(max_length):
        rows = Dataset.from_dict({"input_ids": [[1] * length for length in lengths.tolist()]}, features=features)
        theirs = pack_dataset(rows, max_length, "bfd", {"batch_size": len(rows), "desc": None})
        assert len(sequences(lengths, max_length)) <= len(theirs)
