"""Writes the model as it leaves training to a folder: weights, merged adapters, configuration, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from trl import SFTTrainer

from sft.errors import WrongSave
from sft.files import read_json, remove, write_json
from sft.model.load import merge_adapter
from sft.model.weight_checks import DTYPES
from sft.parallel import process_group as distributed
from sft.parallel.fsdp import reshard
from sft.parallel.full_tensors import full_state
from sft.plan.job import Job
from sft.run.directory import Run
from sft.run.trust import final_checksums


def write_final(trainer: SFTTrainer, job: Job, run: Run, tokenizer: Any, verify: Callable[[Path], None] | None) -> None:
    """Write final/: complete, and equal to the model in memory, as `verify` finds before it is final/. Every rank takes part.

    Raises:
        WrongSave: It is another model; it is kept as `unverified` then.
    """
    work = run.path / ".final"
    write_model(trainer, job, tokenizer, work)
    if verify is not None:
        try:
            verify(work)
        except WrongSave as error:
            # The training is over: its result must not be lost in a hidden folder.
            distributed.from_rank_0(lambda: _rename(work, run.unverified))
            kept = f"The training is complete, and its model is kept in {run.unverified}. There is no final/, and nothing is evaluated."
            error.args = (f"{str(error).replace(str(work), str(run.unverified))}\n{kept}",)
            raise

    def publish() -> None:
        remove(run.unverified)  # of an earlier end of this run
        # Before final/ has its name: an export or an evaluation compares it with these.
        run.update(final_files=final_checksums(work))
        _rename(work, run.final)

    distributed.from_rank_0(publish)


def _rename(folder: Path, place: Path) -> None:
    remove(place)
    folder.rename(place)


def write_model(trainer: SFTTrainer, job: Job, tokenizer: Any, folder: Path) -> None:
    """Write the model as it is now, and leave it unchanged. Every rank takes part."""
    write_weights(trainer, job, folder)
    distributed.from_rank_0(lambda: _complete(job, tokenizer, folder))


def write_weights(trainer: SFTTrainer, job: Job, folder: Path) -> None:
    """Write the weights alone, or the adapters alone, which are not merged then. Every rank takes part."""
    distributed.from_rank_0(lambda: remove(folder))
    with distributed.barrier_at_end():  # rank 0 may write for longer than the group's timeout
        save_weights(trainer, job, folder)


def save_weights(trainer: SFTTrainer, job: Job, folder: Path) -> None:
    """Write the trained weights, or the adapters, as they are. Every rank takes part.

    In fp32 where the weights were trained in fp32 with bf16 only inside autocast: rounding them would move the logits. In bf16 where
    the model computes with bf16 weights: under DeepSpeed and FSDP2, and where AdamW keeps the fp32 copies.
    """
    if job.deepspeed is not None and job.deepspeed.stage < 3:
        # Each rank has the full weights. The engine would copy each one, and write tied weights twice.
        if trainer.is_world_process_zero():
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        return
    if job.fsdp is not None:
        adapters = job.recipe.model.lora is not None
        dtype = None if adapters else DTYPES[job.plan.precision.value]
        # The trainer would write nothing where checkpoints are sharded, and tied weights twice where they are not.
        reshard(trainer.model)
        state = full_state(trainer.model, adapters, dtype, keep=trainer.is_world_process_zero())
        if trainer.is_world_process_zero():
            trainer.model.save_pretrained(folder, state_dict=state)
            if dtype is not None:  # else config.json states the dtype of the shards
                config = deepcopy(trainer.model.config)
                config.dtype = dtype
                config.save_pretrained(folder)
        return
    trainer.save_model(str(folder))
    for name in ("training_args.bin", "README.md"):  # a pickle of one machine's paths; TRL's card
        (folder / name).unlink(missing_ok=True)


def _complete(job: Job, tokenizer: Any, folder: Path) -> None:
    """Merge adapters, and add what other programs need."""
    if job.recipe.model.lora is not None:
        adapter = folder.with_name(f"{folder.name}-adapter")
        remove(adapter)
        folder.rename(adapter)
        merge_adapter(job, tokenizer, adapter, folder)
        remove(folder / "adapter")
        adapter.rename(folder / "adapter")
    complete_config(folder)
    tokenizer.save_pretrained(folder)


def complete_config(folder: Path) -> None:
    """Make config.json one that other programs read as transformers 5 does, and that is for inference.

    transformers 5 writes the rotary embedding as `rope_parameters`. transformers 4 and programs that read config.json themselves know only
    `rope_theta` and `rope_scaling`, and silently assume 10,000 where those are missing.
    """
    config = read_json(folder / "config.json")
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            # With the theta: transformers 5 reads only rope_scaling where it exists, and GPT-NeoX no other theta.
            config["rope_scaling"] = dict(rope)
    if config.get("use_cache") is False:
        config["use_cache"] = True  # training turns it off
    write_json(folder / "config.json", config)
