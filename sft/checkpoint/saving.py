"""The model as it leaves the training, in a folder: weights, merged adapters, tokenizer. For final/, and for the check of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft.checkpoint.saved_config import complete_config
from sft.files import remove
from sft.parallel import process_group as distributed
from sft.plan.job import Job


def write_model(trainer: Any, job: Job, tokenizer: Any, folder: Path) -> None:
    """Write the model as it is now. It stays as it is; every rank takes part.

    Args:
        trainer: Its engine begun.
        job: Says what the model is.
        tokenizer: From load_tokenizer.
        folder: Replaced where it is there.
    """
    from sft.train.arguments import save_final

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
    from sft.model.load import merge_adapter

    if job.recipe.model.lora is not None:
        adapter = folder.with_name(f"{folder.name}-adapter")
        remove(adapter)
        folder.rename(adapter)
        merge_adapter(job, tokenizer, adapter, folder)
        remove(folder / "adapter")
        adapter.rename(folder / "adapter")
    complete_config(folder)
    tokenizer.save_pretrained(folder)
