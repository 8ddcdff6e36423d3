"""Train several runs in the same processes, which saves their imports: `torchrun ... train_many.py RECIPE RUNS.json`.

RUNS.json holds the overrides of each run by its name; STOP=10 among them ends it at the checkpoint of step 10. Of each that was not
stopped, told.json has what the live objects were after the last step.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sft import distributed, train, training
from sft.job import Job
from sft.run_directory import Run

STOP = "STOP="


def tell(trainer: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    from sft.sharding import computes_in, read_sharding, sharded_units

    model, optimizer = trainer.model, trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    told = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "parallelism": trainer.accelerator.parallelism_config is not None,
        "weights": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "trained": sorted({str(parameter.dtype) for parameter in trained}),
        "moments": sorted({str(state["exp_avg"].dtype) for state in optimizer.state.values()}),
        "moments_shared": all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values()),
        "share": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()),
        "total": sum(p.numel() for p in model.parameters()),
    }
    if units := sharded_units(model):
        sharding = read_sharding(model)
        told |= {
            "units": len(units),
            "mesh": list(sharding.mesh),
            "reshard": sharding.reshard,
            "offload": sharding.offload,
            "computes_in": str(computes_in(model)),
            "reduces_in": str(sharding.reduce),
            "ahead": list(sharding.ahead),
        }
    return told


def main() -> None:
    recipe, runs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    join_group, write_final = distributed.join_group, training.write_final

    def join_once(*args: Any, **keywords: Any) -> None:
        if not torch.distributed.is_initialized():
            join_group(*args, **keywords)

    def tell_and_write(trainer: Any, job: Job, run: Run, tokenizer: Any) -> None:
        told = tell(trainer)
        if trainer.is_world_process_zero():
            (run.path / "told.json").write_text(json.dumps(told))
        write_final(trainer, job, run, tokenizer)

    distributed.join_group, distributed.leave_group = join_once, lambda: None
    training.write_final = tell_and_write
    train.become_finish = lambda run: run.update(status="finished")
    for name, overrides in runs.items():
        stops = [int(word.removeprefix(STOP)) for word in overrides if word.startswith(STOP)]
        overrides = [word for word in overrides if not word.startswith(STOP)]
        name = next((word for word in overrides if word.startswith("tracking.run_name=")), f"tracking.run_name={name}")
        with suppress(Stopped), stopping(stops):
            train.main([recipe, *[word for word in overrides if word != name], name])
        start_afresh()


class Stopped(Exception):
    """Ends a run early."""


@contextmanager
def stopping(steps: list[int]) -> Iterator[None]:
    """End the run when its checkpoint of one of these steps is complete."""
    from sft.recipe_trainer import RecipeTrainer

    save = RecipeTrainer._save_checkpoint

    def save_and_stop(trainer: Any, *args: Any) -> None:
        save(trainer, *args)
        if trainer.state.global_step in steps:
            raise Stopped

    RecipeTrainer._save_checkpoint = save_and_stop  # type: ignore[method-assign]
    try:
        yield
    finally:
        RecipeTrainer._save_checkpoint = save  # type: ignore[method-assign]


def start_afresh() -> None:
    """Forget what accelerate has made of this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for variable in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[variable]
    gc.collect()


if __name__ == "__main__":
    main()
