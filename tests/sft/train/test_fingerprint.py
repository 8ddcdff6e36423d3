"""Fingerprints of batches as the trainer's own collator makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.formats import IGNORED
from sft.parallel.sequence import PartOfSequences
from sft.train.fingerprint import KEY, Fingerprint, Fingerprinted, batch_hash

Document = tuple[list[int], list[int]]
DOCUMENTS: list[Document] = [
    ([5, 6, 7, 8], [IGNORED, IGNORED, 7, 8]),
    ([9, 10, 11], [9, 10, 11]),
    ([12, 13], [IGNORED, 13]),
    ([5, 6, 7, 8, 9, 10], [IGNORED] * 5 + [10]),
    ([20, 21, 22, 23, 24], [IGNORED, 21, 22, IGNORED, 24]),
    ([30, 31], [30, 31]),
]
FILLER: Document = ([0], [IGNORED])


def row(*documents: Document) -> dict[str, Any]:
    """A sequence as Sequences gives it; of several documents only where they are packed."""
    return {
        "input_ids": np.concatenate([ids for ids, _ in documents]),
        "labels": np.concatenate([labels for _, labels in documents]),
        "seq_lengths": [len(ids) for ids, _ in documents],
    }


def collator(packed: bool) -> Any:
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)


def packs(*sequences: list[Document]) -> int:
    """Hash of one batch of packs."""
    return batch_hash(collator(packed=True)([row(*documents) for documents in sequences]))


def padded(*documents: Document) -> int:
    """Hash of one batch of a document a sequence."""
    return batch_hash(collator(packed=False)([row(document) for document in documents]))


class Ranks:
    """accelerate's sum over ranks, where this rank is told what the others have."""

    def __init__(self, *others: Fingerprint) -> None:
        self.others, self.device = others, torch.device("cpu")

    def reduce(self, halves: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        for other in self.others:
            value = int(fingerprint_of(other), 16)
            halves = halves + torch.tensor([value & 0xFFFFFFFF, value >> 32])
        return halves


def fingerprint_of(one: Fingerprint) -> str:
    one.gather(Ranks())
    assert one.line is not None
    return one.line


def of_batches(*hashes: int) -> Fingerprint:
    one = Fingerprint()
    one.add([{KEY: value} for value in hashes])
    return one


def test_packs_and_padded_documents_of_one_step_have_one_fingerprint() -> None:
    one_pack, two_packs = packs(DOCUMENTS), packs(DOCUMENTS[3:], DOCUMENTS[:3])
    assert one_pack == two_packs == padded(*DOCUMENTS)


def test_micro_batches_and_ranks_do_not_show() -> None:
    whole = fingerprint_of(of_batches(packs(DOCUMENTS)))
    accumulated = of_batches(padded(*DOCUMENTS[4:]), padded(*DOCUMENTS[:2]), padded(*DOCUMENTS[2:4]))
    assert fingerprint_of(accumulated) == whole
    first, others = of_batches(packs(DOCUMENTS[:1])), [of_batches(packs([document])) for document in DOCUMENTS[1:]]
    first.gather(Ranks(*others))
    assert first.line == whole


def test_padding_and_fillers_do_not_show() -> None:
    assert packs(DOCUMENTS, [FILLER], [FILLER]) == packs(DOCUMENTS)
    assert padded(*DOCUMENTS, FILLER) == padded(*DOCUMENTS)
    assert padded(FILLER) == packs([FILLER]) == 0


@pytest.mark.parametrize(
    "changed",
    [
        DOCUMENTS[1:],  # skipped
        [*DOCUMENTS, DOCUMENTS[0]],  # replayed
        [([5, 6, 7, 9], [IGNORED, IGNORED, 7, 9]), *DOCUMENTS[1:]],  # another token
        [([5, 7, 6, 8], [IGNORED, IGNORED, 6, 8]), *DOCUMENTS[1:]],  # two tokens swapped
        [([5, 6, 7, 8], [IGNORED, 6, 7, 8]), *DOCUMENTS[1:]],  # one trained token more
        [([5, 6, 7, 8], [IGNORED, IGNORED, 8, 7]), *DOCUMENTS[1:]],  # two labels swapped
        [([12, 6, 7, 8], [IGNORED, IGNORED, 7, 8]), DOCUMENTS[1], ([5, 13], [IGNORED, 13]), *DOCUMENTS[3:]],
        [([5, 6], [IGNORED, IGNORED]), ([7, 8], [7, 8]), *DOCUMENTS[1:]],  # cut in two
    ],
)
def test_what_is_trained_shows(changed: list[Document]) -> None:
    assert len({packs(DOCUMENTS), packs(changed), padded(*changed)}) == 2


def test_a_document_that_begins_at_another_place_shows() -> None:
    """Position ids are what tells the documents of a pack apart."""
    batch = collator(packed=True)([row(*DOCUMENTS)])
    whole = batch_hash(batch)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    assert batch_hash(batch) != whole


def test_the_label_of_a_first_token_has_no_loss_and_does_not_show() -> None:
    assert padded(([9, 10, 11], [IGNORED, 10, 11])) == padded(DOCUMENTS[1])


def test_lines_add_up_to_the_line_of_all_their_steps() -> None:
    hashes = [padded(document) for document in DOCUMENTS]
    one, all_lines = Fingerprint(), []
    for batch in hashes:
        one.add([{KEY: batch}])
        all_lines.append(int(fingerprint_of(one), 16))
    assert len(set(all_lines)) == len(DOCUMENTS)
    assert f"{sum(all_lines) % 2**64:016x}" == fingerprint_of(of_batches(*hashes))


def test_ranks_that_share_a_batch_count_once_and_padding_for_them_not_at_all() -> None:
    def batch(rank: int) -> dict[str, Any]:
        whole = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
        return PartOfSequences(Fingerprinted(whole, counts=rank == 0), rank, 2)([row(*DOCUMENTS)])

    assert batch(0)["input_ids"].shape == batch(1)["input_ids"].shape == (1, 12)
    assert [batch(rank)[KEY] for rank in (0, 1)] == [packs(DOCUMENTS), 0]


def test_a_batch_without_its_hash_is_our_bug_and_no_zero() -> None:
    with pytest.raises(KeyError):
        Fingerprint().add([{"input_ids": torch.zeros(1, 1)}])


def test_a_fingerprint_is_the_same_in_every_version() -> None:
    """Those of old runs must stay comparable."""
    assert f"{packs(DOCUMENTS):016x}" == "8714d200422ab0a0"
