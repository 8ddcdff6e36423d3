"""Train as sft.train does, and write what the live objects were: `observe.py RECIPE [key=value ...]`.

In the run's folder `observed/`: `logits.pt`, the model's after its last step; `live.json`, what engine and optimizer hold;
`rank-N.jsonl`, what each rank was given, a line a step. It touches nothing of ours: the hooks are transformers' own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback

from sft.launch import rank as train
from sft.program import run_main

PROMPTS = torch.arange(502, 542).reshape(2, 20)
"""Tokens of the demo; the last would be the first new one."""


def counted(batches: list[dict[str, Any]]) -> dict[str, int]:
    """Real tokens and labels, from the tensors that the model gets."""
    counts = {"tokens": 0, "target_tokens": 0}
    for batch in batches:
        packed = "cu_seq_lens_q" in batch
        lengths = batch["cu_seq_lens_q"].diff().long() if packed else batch["attention_mask"].sum(1)
        counts["tokens"] += int(lengths[lengths > 1].sum())  # dummies are one token; no document of the demo is
        counts["target_tokens"] += int(batch["labels"][:, 1:].ne(-100).sum())
    return counts


def live(trainer: Any) -> dict[str, Any]:
    """What engine and optimizer hold after the last step."""
    from torch.distributed.tensor import DTensor

    engine, optimizer = trainer.model_wrapped, trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    parameters = list(trainer.model.parameters())
    found: dict[str, Any] = {
        "engine": type(engine).__name__,
        "weights": sorted({str(one.dtype) for one in parameters}),
        "trained": sorted({str(one.dtype) for one in parameters if one.requires_grad}),
        "moments": sorted({str(state["exp_avg"].dtype) for state in optimizer.state.values() if "exp_avg" in state}),
        "local": sum(one.to_local().numel() if isinstance(one, DTensor) else one.numel() for one in parameters),
        "total": sum(one.numel() for one in parameters),
        "mesh": next((list(one.device_mesh.shape) for one in parameters if isinstance(one, DTensor)), None),
    }
    if hasattr(engine, "zero_optimization_stage"):
        found |= {
            "stage": engine.zero_optimization_stage(),
            "reduce_bucket_size": engine.optimizer.reduce_bucket_size,
            "allgather_bucket_size": engine.zero_allgather_bucket_size(),
            "stage3_prefetch_bucket_size": engine.zero_prefetch_bucket_size(),
            "stage3_param_persistence_threshold": engine.zero_param_persistence_threshold(),
        }
    return found


class Observer(TrainerCallback):  # type: ignore[misc]
    """Writes at the end of the training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.folder = trainer, Path(trainer.args.output_dir).parent / "observed"
        self.folder.mkdir(exist_ok=True)
        taken, file = trainer.get_batch_samples, self.folder / f"rank-{trainer.args.process_index}.jsonl"

        def take(*arguments: Any) -> Any:
            batches, total = taken(*arguments)
            with file.open("a") as lines:
                lines.write(json.dumps(counted(batches) | {"step": trainer.state.global_step + 1}) + "\n")
            return batches, total

        if (
            getattr(trainer.accelerator.parallelism_config, "sp_size", 1) == 1
        ):  # else a rank has a part of each sequence
            trainer.get_batch_samples = take

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every rank takes part: the logits of a sharded model are made by all."""
        engine, found = self.trainer.model_wrapped, live(self.trainer)
        training = engine.training
        engine.eval()
        sequences = getattr(self.trainer.accelerator.parallelism_config, "sp_size", 1) > 1
        logits = None
        if not sequences:  # its layers take a part of each sequence from every rank
            with torch.no_grad():
                logits = engine(input_ids=PROMPTS, use_cache=False).logits.float()
        engine.train(training)
        if self.trainer.is_world_process_zero():
            (self.folder / "live.json").write_text(json.dumps(found))
            if logits is not None:
                torch.save(logits, self.folder / "logits.pt")


def main() -> None:
    """Have the trainer observed, and train."""
    begin = Trainer.train

    def begin_observed(trainer: Any, *arguments: Any, **named: Any) -> Any:
        trainer.add_callback(Observer(trainer))
        return begin(trainer, *arguments, **named)

    Trainer.train = begin_observed
    run_main(train.main)


if __name__ == "__main__":
    main()
