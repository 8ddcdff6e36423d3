"""Law 9, before it is too late: what the save at the end would write is loaded in another process and compared with the model.

After the first optimizer step of a start, and again on final/ before it gets its name. The model is written to a hidden folder of the
run by what writes final/; sft/checkpoint/load_saved.py loads that by `from_pretrained` alone, on the CPU. Compared are

- every tensor, bit by bit, with the engine's own, gathered one by one (sft/parallel/full_tensors.py); merged adapters up to their rounding,
- the logits of a few real rows, with those of the live engine: what is not in the tensors (config.json) is seen there,
- what generation needs: stop tokens, vocabulary, chat template, and how a text becomes tokens.

The training is left bit for bit as it was.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import TrainerCallback

from sft.checkpoint.loader_process import Checker
from sft.checkpoint.save_comparison import Comparison, Found, facts, message
from sft.checkpoint.saving import write_model
from sft.data.tokenizer import new_token_ids
from sft.errors import RunError, WrongSave
from sft.model.live import arithmetic, evaluating, unwrapped
from sft.model.load import DTYPES, weights_dtype
from sft.parallel import process_group as distributed
from sft.parallel.full_tensors import whole_tensors
from sft.parallel.progress import BETWEEN, CHECKPOINT
from sft.parallel.sharding import give_back
from sft.plan.job import Job
from sft.run.directory import Run

ROWS, LENGTH = 4, 32
FOLDER = ".canary"

# Norm of the difference of logits over their norm. The tensors are the same, so that this is what other kernels, in another order,
# on another device, make of them; the isolation probe allows hidden states the same. A wrong config.json (another
# theta, eps, tied head) differs by tens of percent.
LOGITS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 5e-2}


class SaveCanary(TrainerCallback):  # type: ignore[misc]
    """Checks the save after the first step that this process has trained, and final/ when it is asked to.

    Args:
        job: Says what the model is.
        run: Where the folder is written.
        tokenizer: From load_tokenizer.
        checker: On the first rank.
    """

    def __init__(self, job: Job, run: Run, tokenizer: Any, checker: Checker | None) -> None:
        self.job, self.run, self.tokenizer, self.checker = job, run, tokenizer, checker
        self.trainer: Any = None
        self._moved = self._checked = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step of a warm-up that begins at a rate of 0 trains nothing: an adapter would be none, whether it is saved or not."""
        self._moved = max(kwargs["lr_scheduler"].get_last_lr()) > 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step that has trained; not where that is the last, since final/ comes next."""
        if self._checked or not self._moved or state.global_step >= state.max_steps:
            return
        self._checked = True
        self.trainer.progress.at(CHECKPOINT)
        folder = self.run.path / FOLDER
        distributed.from_first_rank(lambda: check_room(folder.parent, self._bytes()))
        with untouched(self.trainer):
            write_model(self.trainer, self.job, self.tokenizer, folder)
            self.check(folder)
        if distributed.is_first_rank():
            shutil.rmtree(folder)
        self.trainer.progress.at(BETWEEN)

    def check(self, folder: Path) -> None:
        """Compare a folder with the model; every rank takes part.

        Args:
            folder: From write_model, of the model as it is.

        Raises:
            WrongSave: It is another model. The folder is kept.
            RunError: The process that loads it was ended.
        """
        with untouched(self.trainer):
            found = self._compare(folder)
        if found.problems:
            state = self.trainer.state
            raise WrongSave(message(found.problems, folder, state.global_step, state.global_step >= state.max_steps))
        if distributed.is_first_rank():
            self.run.update(save_checked={"tensors": found.tensors, "logits_differ": found.distance})
            print(
                f"Save checked in {found.seconds:.1f} s: {found.tensors} tensors, loaded by another process, are those in memory; logits "
                f"differ by {found.distance:.1e} of their norm.",
                flush=True,
            )

    def close(self) -> None:
        """End the process that loads; after the last check."""
        if self.checker is not None:
            self.checker.close()

    def _bytes(self) -> int:
        dtype = self._dtype()
        return sum(
            int(getattr(parameter, "ds_numel", parameter.numel())) * (dtype or parameter.dtype).itemsize
            for parameter in unwrapped(self.trainer).parameters()
        )

    def _dtype(self) -> torch.dtype | None:
        """What final/ is written in, where that is not what the live weights are in."""
        if self.job.recipe.model.lora is not None:
            return weights_dtype(self.job)
        return DTYPES[self.job.plan.precision.value] if self.job.fsdp else None

    def _compare(self, folder: Path) -> Found:
        started, model = time.monotonic(), unwrapped(self.trainer)
        rows = sample_rows(self.trainer.train_dataset, new_token_ids(self.tokenizer, self.job.recipe.model.new_tokens))
        first: Comparison | None = None
        if self.checker is not None:
            first = Comparison(self.checker, folder, rows, self.tokenizer, self.job.recipe.model.trust_remote_code)
        logits = live_logits(self.trainer, rows)
        # Loading may take minutes, in which nobody gathers.
        if distributed.from_first_rank(lambda: first.loads(logits) if first else True):
            for tensor in whole_tensors(model, self._dtype()):
                if first is not None:
                    first.send(tensor)
        limit = LOGITS[coarser(arithmetic(self.trainer), self._dtype())]
        found = distributed.from_first_rank(
            lambda: first.result(facts(model, self.tokenizer, first.text, self._dtype()), limit) if first else Found([])
        )
        found.seconds = time.monotonic() - started
        return found


def coarser(one: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    """The format with fewer digits.

    >>> coarser(torch.float32, torch.bfloat16)
    torch.bfloat16
    """
    return one if other is None or torch.finfo(one).eps >= torch.finfo(other).eps else other


def check_room(folder: Path, needed: int) -> None:
    """Refuse to go on where the model cannot be written.

    Args:
        folder: Of the run.
        needed: Bytes of the weights.

    Raises:
        RunError: final/ would not fit either.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"The model takes {needed / 1e9:.2f} GB on disk, and {folder} has {free / 1e9:.2f} GB free: it could not be saved at the end "
            "either. Free some space, or set output_dir to another disk."
        )


def sample_rows(sequences: Any, new: list[int]) -> list[list[int]]:
    """ROWS pieces of the training's own tokens, LENGTH each, and one more in which every second token is a new one.

    Args:
        sequences: The training's.
        new: Ids of model.new_tokens.
    """
    tokens: list[int] = []
    for number in range(len(sequences.index)):
        for document in sequences.index.of(number):
            tokens.extend(map(int, sequences.store.document(document)[0][: ROWS * LENGTH]))
        if len(tokens) >= ROWS * LENGTH:
            break
    rows: list[list[int]] = np.resize(np.array(tokens), (ROWS, LENGTH)).tolist()
    if new:
        rows.append(list(rows[0]))
        rows[-1][1::2] = np.resize(np.array(new), LENGTH // 2).tolist()
    return rows


def live_logits(trainer: Any, rows: list[list[int]]) -> torch.Tensor:
    """The engine's logits of rows of one length, fp32, on the CPU; every rank takes part."""
    ids = torch.tensor(rows, device=trainer.accelerator.device)
    # Compiled layers would be compiled once more, for a shape that the training never has.
    with evaluating(trainer), torch.compiler.set_stance("force_eager"):
        logits: torch.Tensor = trainer.model_wrapped(input_ids=ids, use_cache=False).logits
    give_back(trainer.model)
    return logits.float().cpu()


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Random numbers go on as if nobody had drawn any."""
    on_gpu = trainer.accelerator.device.type == "cuda"
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
