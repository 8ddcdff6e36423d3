"""A rank's part of a batch."""

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.formats import IGNORED
from sft.parallel.sequence import PartOfSequences

ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [IGNORED, 2, 3, 4, 5]},
    {"input_ids": [6, 7, 8], "labels": [IGNORED, IGNORED, 8]},
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("parts", [2, 3])
def test_the_parts_of_a_batch_are_the_batch(packed: bool, parts: int) -> None:
    collator = DataCollatorForLanguageModeling(0, packed, return_position_ids=True, pad_to_multiple_of=parts)
    batch, shared = collator(ROWS), [PartOfSequences(collator, part, parts)(ROWS) for part in range(parts)]
    for name in ("input_ids", "position_ids"):
        torch.testing.assert_close(torch.cat([part[name] for part in shared], dim=1), batch[name])
    following = torch.cat([part["shift_labels"] for part in shared], dim=1)
    torch.testing.assert_close(following[:, :-1], batch["labels"][:, 1:])
    assert (following[:, -1] == IGNORED).all()
    assert not any("attention_mask" in part for part in shared)
    if packed:
        for part in shared:
            torch.testing.assert_close(part["cu_seq_lens_q"], batch["cu_seq_lens_q"])
