"""Train as sft.train does, and print where step 3 reads a value from a tensor, for which the host waits for a GPU: `host_waits.py RECIPE`.

Batches are made on the CPU: what the collator reads there does not count.
"""

import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sft.launch import rank as train
from sft.program import run_main
from sft.train.batches import Accounted
from sft.train.speed import StepClock
from sft.train.trainer import RecipeTrainer

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
STEP = 3


class Reads(TorchDispatchMode):
    """Counts the places in our code and the trainers', outside of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            stack = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][:-1]
            if not any(frame.name == Accounted.__call__.__name__ for frame in stack):
                self.places[f"{stack[-1].filename}: {stack[-1].line}"] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Count from the first batch of the step to its end."""
    reads, get, end = Reads(), RecipeTrainer.get_batch_samples, StepClock.on_step_end

    def get_batch_samples(trainer: Any, *arguments: Any) -> Any:
        if trainer.state.global_step == STEP - 1:
            reads.__enter__()
        return get(trainer, *arguments)

    def on_step_end(clock: Any, args: Any, state: Any, *arguments: Any, **named: Any) -> None:
        if state.global_step == STEP:
            reads.__exit__(None, None, None)
            print(*(f"read {count} x {place}" for place, count in reads.places.items()), sep="\n", flush=True)
        end(clock, args, state, *arguments, **named)

    RecipeTrainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
    StepClock.on_step_end = on_step_end  # type: ignore[method-assign]
    run_main(train.main)


if __name__ == "__main__":
    main()
