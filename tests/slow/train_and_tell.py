"""Train as sft.train does, and write what the live DeepSpeed engine has: `torchrun ... train_and_tell.py RECIPE ...`."""

import json
import sys
from typing import Any

from sft.launch import rank as train
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train import main as training


def main() -> None:
    write_final = training.write_final

    def tell_and_write(trainer: Any, job: Job, run: Run, *rest: Any) -> None:
        engine = trainer.model_wrapped
        told = {
            "stage": engine.zero_optimization_stage(),
            "reduce_bucket_size": engine.optimizer.reduce_bucket_size,
            "allgather_bucket_size": engine.zero_allgather_bucket_size(),
            "stage3_prefetch_bucket_size": engine.zero_prefetch_bucket_size(),
            "stage3_param_persistence_threshold": engine.zero_param_persistence_threshold(),
            "optimizer": type(engine.basic_optimizer).__name__,
        }
        if trainer.is_world_process_zero():
            (run.path / "told.json").write_text(json.dumps(told))
        write_final(trainer, job, run, *rest)

    training.write_final = tell_and_write
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
