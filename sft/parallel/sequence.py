"""Each rank of a group computes a part of every sequence (DeepSpeed's Ulysses): what it is given, and what is counted.

Within attention the ranks exchange tokens for heads. DeepSpeed's own adapter of the data loader lets the ranks of a group take turns
with batches of their own, so that what a step holds would depend on their number; it deals the same order in each epoch and cannot
skip batches when a run goes on. Here the ranks of a group load one batch, and each keeps its part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sft.data.formats import IGNORED

Batch = dict[str, Any]


class PartOfSequences:
    """A collator that keeps this rank's part of the tokens."""

    def __init__(self, whole: Callable[[list[Batch]], Batch], part: int, parts: int) -> None:
        self.whole, self.part, self.parts = whole, part, parts

    def __call__(self, rows: list[Batch]) -> Batch:
        """The tokens, with their places in the whole sequence and what follows each; boundaries of packed documents stay whole."""
        batch = self.whole(rows)
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        length = labels.shape[1] // self.parts
        mine = slice(self.part * length, (self.part + 1) * length)
        # Padding is at the end, where causal attention never looks: the mask says nothing, and is of the whole length.
        named = {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}
        by_token = {"input_ids", "position_ids", "seq_idx"}
        parted = {name: value[:, mine] if name in by_token else value for name, value in named.items()}
        return parted | {"labels": labels[:, mine], "shift_labels": labels[:, mine]}


def share_batches(loader: Any, groups: int, group: int) -> None:
    """Let the ranks of a group load the same batches; this rank is one of the group of this number."""
    shard = loader.batch_sampler
    assert (shard.num_processes, shard.process_index) == (dist.get_world_size(), dist.get_rank())
    shard.num_processes, shard.process_index = groups, group


def labels_of_all(batches: list[Batch], accelerator: Any) -> torch.Tensor:
    """Labels of all micro-batches of all ranks, each of which has labels of its own."""
    mine = sum(batch["shift_labels"].ne(IGNORED).sum() for batch in batches)
    total: torch.Tensor = accelerator.gather(torch.as_tensor(mine, device=accelerator.device)).sum()
    return total


def sequence_parallel_ranks(trainer: Any, attention: str) -> int:
    """Ranks that share the tokens of a sequence, by DeepSpeed's engine and the attention function that it has put in place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attention not in ALL_ATTENTION_FUNCTIONS:
        return 1
    exchanges = "UlyssesSPAttentionHF" in ALL_ATTENTION_FUNCTIONS[attention].__qualname__
    return int(getattr(trainer.model_wrapped, "sequence_parallel_size", 1)) if exchanges else 1
