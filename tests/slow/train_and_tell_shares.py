"""Train as sft.train does, and write what the live objects were after the last step: `train_and_tell_shares.py RECIPE ...`."""

import json
from typing import Any

from sft.launch import rank as train
from sft.plan.job import Job
from sft.program import run_main
from sft.run.directory import Run
from sft.train import main as training


def tell(trainer: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    from sft.model.live import computes_in
    from sft.parallel.fsdp import read_sharding, sharded_units

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
            "ahead": list(sharding.prefetch),
        }
    return told


def main() -> None:
    write_final = training.write_final

    def tell_and_write(trainer: Any, job: Job, run: Run, *rest: Any) -> None:
        told = tell(trainer)
        if trainer.is_world_process_zero():
            (run.path / "told.json").write_text(json.dumps(told))
        write_final(trainer, job, run, *rest)

    training.write_final = tell_and_write
    run_main(train.main)


if __name__ == "__main__":
    main()
