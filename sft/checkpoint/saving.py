"""The model as it leaves the training, in a folder: weights, merged adapters, tokenizer. For final/, and for the check of it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from sft.checkpoint.saved_config import complete_config
from sft.files import remove
from sft.model.load import DTYPES, merge_adapter
from sft.parallel import process_group as distributed
from sft.parallel.fsdp import whole_state
from sft.plan.job import Job


def write_model(trainer: Any, job: Job, tokenizer: Any, folder: Path) -> None:
    """Write the model as it is now. It stays as it is; every rank takes part.

    Args:
        trainer: Its engine begun.
        job: Says what the model is.
        tokenizer: From load_tokenizer.
        folder: Replaced where it is there.
    """
    with distributed.met_at_the_end():
        if distributed.is_first_rank():
            remove(folder)
    # Writing takes long on one rank, and merging on the first; nobody leaves the group before.
    with distributed.met_at_the_end():
        save_final(trainer, job, folder)
    with distributed.met_at_the_end():
        if distributed.is_first_rank():
            _complete(job, tokenizer, folder)


def _complete(job: Job, tokenizer: Any, folder: Path) -> None:
    if job.recipe.model.lora is not None:
        adapter = folder.with_name(f"{folder.name}-adapter")
        remove(adapter)
        folder.rename(adapter)
        merge_adapter(job, tokenizer, adapter, folder)
        remove(folder / "adapter")
        adapter.rename(folder / "adapter")
    complete_config(folder)
    tokenizer.save_pretrained(folder)


def save_final(trainer: Any, job: Job, target: Path) -> None:
    """Write the trained weights as they are; every rank takes part.

    fp32 where the weights themselves were trained in fp32, with bf16 only inside autocast: rounding them would move the
    logits. bf16 where the model computes with bf16 weights: under DeepSpeed and FSDP2, and where AdamW keeps the fp32 copies.
    """
    if job.deepspeed is not None and job.deepspeed.stage < 3:
        # The weights are whole on each rank. The engine would copy each one, and write tied weights twice.
        if trainer.is_world_process_zero():
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(target)
        return
    if job.fsdp is not None:
        adapters = job.recipe.model.lora is not None
        dtype = None if adapters else DTYPES[job.plan.precision.value]
        # The trainer would write nothing where checkpoints are shares, and tied weights twice where they are not.
        state = whole_state(trainer.model, adapters, dtype)
        if trainer.is_world_process_zero():
            trainer.model.save_pretrained(target, state_dict=state)
            if dtype is not None:  # else it says what the shares are kept in
                config = deepcopy(trainer.model.config)
                config.dtype = dtype
                config.save_pretrained(target)
        return
    trainer.save_model(str(target))
    for name in ("training_args.bin", "README.md"):  # a pickle of one machine's paths; TRL's card
        (target / name).unlink(missing_ok=True)
