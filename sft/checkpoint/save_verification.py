"""Verifies that what is saved is the model in memory ("saved equals trained"), before it is too late.

After the first optimizer step that trains, the code that writes final/ writes the model to a hidden folder. Rank 0 compares its tensors bit
for bit with the engine's own (sft/checkpoint/live_tensors.py), and the tokenizer with the one in memory. Of adapters only their
own files are written, and compared: merging loads the base a second time. final/ is compared in the same way before it gets its name; while
the evaluation starts, a fresh process loads it, merged, and must find the logits of the live model (sft/checkpoint/load_again.py).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_callback import TrainerCallback
from trl import SFTTrainer

from sft.checkpoint.final import write_model, write_weights
from sft.checkpoint.live_tensors import LiveTensor, live_adapters, live_tensors
from sft.checkpoint.load_again import request_load
from sft.checkpoint.trainer import CheckpointingTrainer
from sft.data.tokenizer import new_token_ids
from sft.errors import WrongSave
from sft.model.live import evaluating, unwrapped
from sft.model.weight_checks import DTYPES
from sft.parallel import process_group as distributed
from sft.parallel.fsdp import reshard
from sft.plan.job import Job
from sft.run.directory import Run

ROWS, LENGTH = 4, 32
FOLDER = ".verification"

# Norm of the difference of logits over their norm. The tensors are known to be equal, so this is what other kernels, in another order, on
# another device, make of them; the isolation probe allows hidden states the same. A wrong architecture (theta, eps, a tied head) makes tens
# of percent.
LOGITS = {"fp32": 1e-3, "bf16": 0.15, "fp16": 5e-2}

_SHOWN = 6
_OF_TOKENIZER = ("eos_token", "pad_token", "chat_template")
_STOPPED = "Training stops, because final/ would be wrong too. The folder is kept.\n"


class SaveVerification(TrainerCallback):  # type: ignore[misc]
    """Verifies a save after the first step that trains, and final/ when `verify_final` is called."""

    def __init__(self, trainer: CheckpointingTrainer, job: Job, run: Run, tokenizer: Any) -> None:
        self.trainer, self.job, self.run, self.tokenizer = trainer, job, run, tokenizer
        self._adapters = job.recipe.model.lora is not None
        self._trains = self._verified = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note whether the step trains: at a learning rate of 0 an adapter stays zero, saved or not."""
        self._trains = max(kwargs["lr_scheduler"].get_last_lr()) > 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Verify a save after the first step that trains; the last step is followed by final/."""
        if self._verified or not self._trains or state.global_step >= state.max_steps:
            return
        self._verified = True
        folder = self.run.path / FOLDER
        with self.trainer.saving():
            if self._adapters:
                write_weights(self.trainer, self.job, folder)
            else:
                write_model(self.trainer, self.job, self.tokenizer, folder)
            self._verify(folder, has_settings=not self._adapters)
            distributed.from_rank_0(lambda: shutil.rmtree(folder))

    def verify_final(self, folder: Path) -> None:
        """Compare a folder with the model, and request that the evaluation loads it. Every rank takes part.

        Raises:
            WrongSave: It is another model.
        """
        recipe = self.job.recipe
        if recipe.model.lora is None:
            self._verify(folder, has_settings=True)
        else:
            if not recipe.model.lora.takes_from_base:  # else merging has made others of them, of the whole base
                self._verify(folder / "adapter", has_settings=False)
            self._verify_settings(folder)
        rows = sample_rows(len(self.tokenizer), new_token_ids(self.tokenizer, recipe.model.new_tokens))
        logits, untrained = live_logits(self.trainer, rows), None
        if self._adapters:
            with self.trainer.accelerator.unwrap_model(self.trainer.model).disable_adapter():
                untrained = live_logits(self.trainer, rows)
        # On a GPU layers of int8 round what goes in to 8 bits.
        rounds = recipe.model.quantization == "int8" and self.job.hardware.gpu is not None
        limit = LOGITS["bf16" if rounds else self.job.plan.precision.value]
        request = (rows, logits, untrained, limit, recipe.model.trust_remote_code)
        distributed.from_rank_0(lambda: request_load(self.run, request))

    def _verify(self, folder: Path, has_settings: bool) -> None:
        started = time.monotonic()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        reshard(self.trainer.model)
        if self._adapters:
            in_file = distributed.from_rank_0(lambda: set(tensors_in(folder)))
            tensors = live_tensors(live_adapters(model, in_file), None, self.trainer.holds_tensors)
        else:
            # In the dtype of final/, where that is not the dtype of the live weights.
            dtype = DTYPES[self.job.plan.precision.value] if self.job.fsdp else None
            tensors = live_tensors(model.state_dict(keep_vars=True), dtype, self.trainer.holds_tensors)
        problems, count = list[str](), 0
        with distributed.barrier_at_end():  # reading the files may take minutes on rank 0
            live = self.trainer.of_all_stages(tensors)
            if distributed.is_rank_0():
                problems, count = compare_tensors(live if self._adapters else as_in_files(live, model), folder)
            for _ in live:  # the other ranks only take part in gathering
                pass
        self._refuse(problems, folder)
        if has_settings:
            self._verify_settings(folder)
        if distributed.is_rank_0():
            self.run.update(save_checked={"tensors": count})
            print(
                f"Save verified in {time.monotonic() - started:.1f} s: {count} saved tensors equal those in memory.",
                flush=True,
            )

    def _verify_settings(self, folder: Path) -> None:
        trusts_code, model = self.job.recipe.model.trust_remote_code, unwrapped(self.trainer)
        problems = compare_settings(folder, model, self.tokenizer, trusts_code) if distributed.is_rank_0() else []
        self._refuse(problems, folder)

    def _refuse(self, problems: list[str], folder: Path) -> None:
        """Raise a WrongSave on every rank, with the problems of rank 0."""
        problems = distributed.from_rank_0(lambda: problems)
        if not problems:
            return
        state = self.trainer.state
        stopped = "" if state.global_step >= state.max_steps else _STOPPED
        lines = "".join(f"  {problem}\n" for problem in problems)
        raise WrongSave(
            f"What was saved after step {state.global_step} is not the model in memory. In {folder}:\n{lines}{stopped}"
            "This is a bug of this project or of a library, not of the recipe: report it with plan.json and run.json."
        )


def tensors_in(folder: Path) -> dict[str, Any]:
    """The open file of each tensor of a folder, by its name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file: Any = safe_open(path, framework="pt")
        found |= dict.fromkeys(file.keys(), file)
    return found


def compare_tensors(live: Iterable[LiveTensor], folder: Path) -> tuple[list[str], int]:
    """Compare a folder's tensors with the live ones, one by one: what is wrong, and how many were compared."""
    saved_in = tensors_in(folder)
    if not saved_in:
        return ["it holds no model.safetensors"], 0
    lines, count, unread = list[str](), 0, set(saved_in)
    for tensor in live:
        count += 1
        names = [name for name in tensor.names if name in saved_in]
        unread -= set(names)
        if not names:
            lines.append(f"{tensor.names[0]}: is not in the saved model")
        for name in names:
            if line := difference(tensor.value, saved_in[name].get_tensor(name)):
                lines.append(f"{name}: {line}")
    lines += [f"{name}: is in the saved model only" for name in sorted(unread)]
    return [*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} more tensors"] if len(lines) > _SHOWN else [])], count


def as_in_files(live: Iterable[LiveTensor], model: Any) -> Iterable[LiveTensor]:
    """The tensors under the names and in the shapes that transformers gives them in files.

    Most models have the same in memory. Others merge experts or split projections when they are loaded; only they are held in memory
    at once.
    """
    if not getattr(model, "_weight_conversions", None):
        return live
    names = {one.names[0]: one for one in live}
    files = revert_weight_conversion(model, {name: one.value for name, one in names.items()})
    return [LiveTensor(names[name].names if name in names else (name,), value) for name, value in files.items()]


def difference(live: torch.Tensor, saved: torch.Tensor) -> str | None:
    """How a saved tensor differs from the live one in any bit; None where it does not."""
    if saved.shape != live.shape:
        return f"has shape {list(saved.shape)}, in memory {list(live.shape)}"
    if saved.dtype != live.dtype:
        return f"is {saved.dtype}, in memory {live.dtype}"
    if torch.equal(saved.reshape(-1).view(torch.uint8), live.reshape(-1).contiguous().view(torch.uint8)):
        return None
    apart = (saved.float() - live.float()).abs()
    return f"{int((apart != 0).sum())} of {live.numel()} elements differ, by {float(apart.max()):.3g} at most"


def compare_settings(folder: Path, model: Any, tokenizer: Any, trust_remote_code: bool) -> list[str]:
    """What differs in the generation config and the tokenizer, loaded from the folder; config.json shows in the logits."""
    try:
        saved = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        stops_at = GenerationConfig.from_pretrained(folder).eos_token_id
    except Exception as error:  # whatever keeps a user from loading them
        return [f"it cannot be loaded: {type(error).__name__}: {error}"]
    pairs = [
        ("generation_config.json: eos_token_id", stops_at, model.generation_config.eos_token_id),
        *((f"the tokenizer: {name}", getattr(saved, name), getattr(tokenizer, name)) for name in _OF_TOKENIZER),
        ("the tokenizer: its tokens", saved.get_vocab() == tokenizer.get_vocab(), True),
    ]
    return [f"{name} is {one!s:.60}, in memory {other!s:.60}" for name, one, other in pairs if one != other]


def sample_rows(vocabulary: int, new: list[int]) -> list[list[int]]:
    """ROWS rows of LENGTH random tokens, the same ones each time; those of model.new_tokens come first."""
    drawn = np.random.default_rng(0).integers(vocabulary, size=ROWS * LENGTH)
    drawn[: len(new)] = new[: ROWS * LENGTH]
    rows: list[list[int]] = drawn.reshape(ROWS, LENGTH).tolist()
    return rows


def live_logits(trainer: SFTTrainer, rows: list[list[int]]) -> torch.Tensor:
    """The engine's logits of rows of one length, fp32, on the CPU. Every rank takes part."""
    ids = torch.tensor(rows, device=trainer.accelerator.device)
    # Compiled layers would be compiled again, for a shape that training never has.
    with evaluating(trainer), torch.compiler.set_stance("force_eager"):
        logits: torch.Tensor = trainer.model_wrapped(input_ids=ids, use_cache=False).logits
    reshard(trainer.model)
    return logits.float().cpu()
