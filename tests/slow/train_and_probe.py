"""Train as sft.train does, and write the live model's logits beside the run: `torchrun ... train_and_probe.py RECIPE ...`."""

import sys
from typing import Any

import torch

from sft.launch import rank as train
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train import main as training

PROBE = torch.arange(3, 43).reshape(2, 20)


def main() -> None:
    write_final = training.write_final

    def probe_and_write(trainer: Any, job: Job, run: Run, *rest: Any) -> None:
        engine = trainer.model_wrapped
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=PROBE).logits.float()
        if trainer.is_world_process_zero():
            torch.save({"logits": logits, "engine": type(engine).__name__}, run.path / "probe.pt")
        write_final(trainer, job, run, *rest)

    training.write_final = probe_and_write
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
