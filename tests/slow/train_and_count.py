"""Train as sft.train does, and write what this rank is given each step: `torchrun ... train_and_count.py FOLDER RECIPE ...`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from sft.launch import rank as train
from sft.train.trainer import RecipeTrainer


def count(batches: list[dict[str, Any]]) -> dict[str, int]:
    """Real tokens, labels, and squares of the documents' lengths, from the tensors that the model gets."""
    counts = {"tokens": 0, "labelled": 0, "squares": 0}
    for batch in batches:
        packed = "cu_seq_lens_q" in batch
        lengths = batch["cu_seq_lens_q"].diff().long() if packed else batch["attention_mask"].sum(1)
        lengths = lengths[lengths > 1]  # fillers are one token; no document of the demo is
        counts["tokens"] += int(lengths.sum())
        counts["labelled"] += int(batch["labels"][:, 1:].ne(-100).sum())
        counts["squares"] += int((lengths**2).sum())
    return counts


def main() -> None:
    """Train the recipe on the command line."""
    file = Path(sys.argv[1]) / f"rank{os.environ['RANK']}.jsonl"
    taken = RecipeTrainer.get_batch_samples

    def take_and_count(trainer: Any, *arguments: Any) -> Any:
        batches, total = taken(trainer, *arguments)
        with file.open("a") as lines:
            lines.write(json.dumps(count(batches) | {"step": trainer.state.global_step}) + "\n")
        return batches, total

    RecipeTrainer.get_batch_samples = take_and_count
    train.main(sys.argv[2:])


if __name__ == "__main__":
    main()
