"""Train as sft.train does, with a loss that is not finite for the row that has a `~`: `train_and_poison.py FOLDER KIND RECIPE ...`.

KIND is nan, inf (with finite gradients) or gradient (not finite, with a finite loss). FOLDER gets, for each rank, a line a step: whether
the step changed anything that this rank's optimizer holds.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.trainer_callback import TrainerCallback

from sft.launch import rank as train
from sft.program import run_main
from sft.train import trainer as recipe_trainer


def digest(trainer: Any) -> str:
    """Of what the innermost optimizer steps on, and of its state."""
    optimizer, shares = trainer.optimizer, []
    while hasattr(optimizer, "optimizer"):
        shares = getattr(
            optimizer, "fp32_partitioned_groups_flat", shares
        )  # ZeRO-3's, which it lends to AdamW for the step
        optimizer = optimizer.optimizer
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    held += [*shares, *(value for state in optimizer.state.values() for value in state.values())]
    found = hashlib.sha256()
    for value in held:
        value = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
        found.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Changes(TrainerCallback):  # type: ignore[misc]
    def __init__(self, file: Path) -> None:
        self.file, self.before, self.trainer = file, "", None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = digest(self.trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.file.open("a") as lines:
            lines.write(f"{state.global_step} {'same' if digest(self.trainer) == self.before else 'changed'}\n")


def main() -> None:
    folder, kind = Path(sys.argv.pop(1)), sys.argv.pop(1)
    plain = recipe_trainer.plain_loss
    changes = Changes(folder / f"rank{os.environ.get('RANK', '0')}.txt")

    def poisoned(trainer: Any, model: Any, inputs: Any, tokens: Any) -> Any:
        changes.trainer = trainer
        if changes not in trainer.callback_handler.callbacks:
            trainer.add_callback(changes)
            changes.before = digest(trainer)
        loss, outputs = plain(trainer, model, inputs, tokens)
        (token,) = trainer.processing_class.encode("~", add_special_tokens=False)
        if (inputs["input_ids"] == token).any() and trainer.model.training:
            if kind == "nan":
                loss = loss * float("nan")
            elif kind == "inf":
                loss = loss + float("inf")
            else:
                loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss, outputs

    recipe_trainer.plain_loss = poisoned
    run_main(train.main)


if __name__ == "__main__":
    main()
