from pathlib import Path

import numpy as np
import pytest

from sft.data.store import DOCUMENT, DocumentStore, DocumentWriter, SequenceIndex

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def chunk(lengths: list[int], seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 150_000, sum(lengths), dtype=np.int32)
    trained = random.integers(0, 2, sum(lengths), dtype=np.uint8)
    documents = np.zeros(len(lengths), DOCUMENT)
    documents["length"] = lengths
    documents["digest"] = random.integers(0, 2**64 - 1, len(lengths), dtype=np.uint64)
    return tokens, trained, documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_documents_are_read_as_they_were_written_whatever_the_chunks(folder: Path) -> None:
    chunks = [chunk([3, 1, 7], 1), chunk([], 2), chunk([2], 3), chunk([5, 5], 4)]
    with DocumentWriter(folder) as writer:
        for part in chunks:
            writer.write(*part)
    store = DocumentStore.open(folder)
    assert len(store.documents) == 6
    number = 0
    for part in chunks:
        start = 0
        for record in part[2]:
            ids, trained = store.document(number)
            stop = start + record["length"]
            np.testing.assert_array_equal(ids, part[0][start:stop])
            np.testing.assert_array_equal(trained, part[1][start:stop])
            assert store.documents[number] == record
            start, number = stop, number + 1


def test_an_index_gives_each_sequence_its_documents(folder: Path) -> None:
    index = SequenceIndex(np.array([4, 2, 0, 1, 3]), np.array([2, 3, 5]))
    index.save(folder / "train.npz")
    found = SequenceIndex.load(folder / "train.npz")
    assert len(found) == 3
    assert [found.of(number).tolist() for number in range(3)] == [[4, 2], [0], [1, 3]]
    assert found.digest() == index.digest()
