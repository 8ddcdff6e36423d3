"""Verifies that what is saved is the model in memory ("saved equals trained"), before it is too late.

After the first optimizer step that trains, the code that writes final/ writes the model to a hidden folder. Rank 0 compares its tensors bit
for bit with the engine's own (sft/checkpoint/live_tensors.py), and configuration and tokenizer with those in memory. Of adapters only their
own files are written, and compared: merging loads the base a second time. final/ is compared in the same way before it gets its name, and
loaded once in a fresh process, which must give the logits of the live model; where it is large, while the evaluation starts.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_callback import TrainerCallback
from trl import SFTTrainer

from sft.checkpoint.final import write_model, write_weights
from sft.checkpoint.live_tensors import LiveTensor, live_adapters, live_tensors
from sft.checkpoint.load_again import Load, exchange_of
from sft.checkpoint.manifest import size
from sft.checkpoint.reshard import adapter_names
from sft.checkpoint.trainer import CheckpointingTrainer
from sft.data.tokenizer import new_token_ids
from sft.errors import WrongSave
from sft.files import remove
from sft.hub.model_facts import empty_model
from sft.model.adapters import differing_adapters
from sft.model.live import arithmetic, evaluating, unwrapped
from sft.model.load import weights_dtype
from sft.model.weight_checks import DTYPES, outside_zero_3
from sft.parallel import process_group as distributed
from sft.parallel.fsdp import reshard
from sft.plan.job import Job
from sft.recipe.changes import MISSING, differences
from sft.recipe.schema import Model
from sft.run.directory import Run

ROWS, LENGTH = 4, 32
FOLDER = ".verification"

LARGE = 20e9
"""Bytes of a final/ that takes a CPU minutes to load: all GPUs would wait for it."""

# Norm of the difference of logits over their norm. The tensors are known to be equal, so this is what other kernels, in another order, on
# another device, make of them; the isolation probe allows hidden states the same. A wrong architecture (theta, eps, a tied head) makes tens
# of percent.
LOGITS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 5e-2}

_SHOWN = 6
_FREE_TO_DIFFER = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "router_aux_loss_coef",
}
"""Keys of config.json that saving sets, and the weight of experts' auxiliary loss, which TRL sets on the live model for the training."""
_OF_TOKENIZER = ("eos_token", "pad_token", "chat_template")
_STOPPED = "Training stops, because final/ would be wrong too. The folder is kept.\n"


class SaveVerification(TrainerCallback):  # type: ignore[misc]
    """Verifies a save after the first step that trains, and final/ when `verify_final` is called."""

    def __init__(self, trainer: CheckpointingTrainer, job: Job, run: Run, tokenizer: Any) -> None:
        self.trainer, self.job, self.run, self.tokenizer = trainer, job, run, tokenizer
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
        # Building layers with adapters draws random numbers.
        on_gpu = self.trainer.accelerator.device.type == "cuda"
        random_state = torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else [])
        started, lora = time.monotonic(), self.job.recipe.model.lora
        with self.trainer.saving(), random_state:
            if lora is None:
                write_model(self.trainer, self.job, self.tokenizer, folder)
                self._conclude(folder, started, *self._compare(folder))
            else:
                write_weights(self.trainer, self.job, folder)
                self._conclude(folder, started, *self._compare_adapters(folder))
            distributed.from_rank_0(lambda: shutil.rmtree(folder))

    def verify_final(self, folder: Path) -> None:
        """Compare a folder with the model, and load it; a WrongSave where it is another. Every rank takes part."""
        started = time.monotonic()
        problems, count = self._compare(folder)
        distance = None
        if not problems:
            problems, distance = self._load(folder)
        self._conclude(folder, started, problems, count, distance)

    def _conclude(
        self, folder: Path, started: float, problems: list[str], count: int, distance: float | None = None
    ) -> None:
        state = self.trainer.state
        if problems:
            stopped = "" if state.global_step >= state.max_steps else _STOPPED
            lines = "".join(f"  {problem}\n" for problem in problems)
            raise WrongSave(
                f"What was saved after step {state.global_step} is not the model in memory. In {folder}:\n{lines}{stopped}"
                "This is a bug of this project or of a library, not of the recipe: report it with plan.json and run.json."
            )
        if distributed.is_rank_0():
            self.run.update(save_checked={"tensors": count} | ({} if distance is None else {"logits_differ": distance}))
            loaded = "" if distance is None else f", loaded again its logits differ by {distance:.1e} of their norm"
            seconds = time.monotonic() - started
            print(f"Save verified in {seconds:.1f} s: {count} saved tensors equal those in memory{loaded}.", flush=True)

    def _compare(self, folder: Path) -> tuple[list[str], int]:
        """What is wrong with the files, and how many tensors were compared."""
        model, found = unwrapped(self.trainer), (list[str](), 0)
        reshard(self.trainer.model)
        with distributed.barrier_at_end():  # reading the files may take minutes on rank 0
            live = self.trainer.of_all_stages(live_tensors(model, self._dtype(), self.trainer.holds_tensors))
            if distributed.is_rank_0():
                problems, count = compare_tensors(as_in_files(live, model), folder)
                trusts_code = self.job.recipe.model.trust_remote_code
                found = problems or compare_settings(folder, model, self.tokenizer, trusts_code), count
            for _ in live:  # the other ranks only take part in gathering
                pass
        return distributed.from_rank_0(lambda: found)

    def _compare_adapters(self, folder: Path) -> tuple[list[str], int]:
        """As _compare, of what PEFT has saved."""
        model, found = self.trainer.accelerator.unwrap_model(self.trainer.model), (list[str](), 0)
        reshard(self.trainer.model)
        names, problems = distributed.from_rank_0(lambda: read_adapters(folder, model.config, self.job.recipe.model))
        with distributed.barrier_at_end():
            live = self.trainer.of_all_stages(live_adapters(model, names, self.trainer.holds_tensors))
            if distributed.is_rank_0():
                differing, count = compare_tensors(live, folder)
                found = problems + differing, count
            for _ in live:
                pass
        return distributed.from_rank_0(lambda: found)

    def _load(self, folder: Path) -> tuple[list[str], float | None]:
        """What is wrong with the folder once it is loaded, and the distance of its logits; None: it is loaded beside the evaluation."""
        recipe = self.job.recipe
        rows = sample_rows(self.trainer.train_dataset, new_token_ids(self.tokenizer, recipe.model.new_tokens))
        logits = live_logits(self.trainer, rows)
        # The coarser of the dtypes that the live and the saved model compute in.
        dtypes = [arithmetic(self.trainer), self._dtype() or torch.float64]
        limit = LOGITS[max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)]
        if recipe.model.quantization == "int8" and self.job.hardware.gpu is not None:
            limit = LOGITS[torch.bfloat16]  # there its layers round what goes in to 8 bits too

        def load() -> tuple[list[str], float | None]:
            request, kept = (rows, logits, limit, recipe.model.trust_remote_code), exchange_of(self.run)
            remove(kept)  # of an earlier end of this run
            if size(folder) > LARGE:
                kept.mkdir()
                torch.save(request, kept / "request.pt")
                return [], None
            with TemporaryDirectory() as exchange:
                torch.save(request, Path(exchange, "request.pt"))
                return Load(folder, Path(exchange)).compare()

        return distributed.from_rank_0(load)

    def _dtype(self) -> torch.dtype | None:
        """What final/ is written in, where it is not the dtype of the live weights."""
        if self.job.recipe.model.lora is not None:
            return weights_dtype(self.job)
        return DTYPES[self.job.plan.precision.value] if self.job.fsdp else None


def read_adapters(folder: Path, config: Any, model: Model) -> tuple[dict[str, str], list[str]]:
    """The parameter that each tensor of a saved adapter would become, by the names in its file, and what differs from the recipe.

    PEFT builds its layers from the saved configuration, in a base without values.

    Args:
        folder: What PEFT has saved.
        config: The live model's.
        model: The recipe's section.
    """
    from peft import PeftConfig, get_peft_model

    assert model.lora is not None
    plain = deepcopy(config)
    vars(plain).pop("quantization_config", None)
    try:
        saved = PeftConfig.from_pretrained(folder)
        saved.init_lora_weights = True  # there is no part of the base to start as
        with outside_zero_3(), catch_warnings(action="ignore"):
            adapted = get_peft_model(empty_model(plain, model.trust_remote_code), saved, low_cpu_mem_usage=True)
        names, in_file = adapter_names(adapted), tensors_in(folder)
        if in_file.keys() - names.keys():
            names |= {name: one for name, one in adapter_names(adapted, embeddings=True).items() if name in in_file}
        return names, list(differing_adapters(adapted, model.lora))[:_SHOWN]
    except Exception as error:  # whatever keeps PEFT from loading it
        return {}, [f"it cannot be loaded: {type(error).__name__}: {error}"]


def tensors_in(folder: Path) -> dict[str, Any]:
    """The open file of each tensor of a folder, by its name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file: Any = safe_open(path, framework="pt")
        found |= dict.fromkeys(file.keys(), file)
    return found


def compare_tensors(live: Iterable[LiveTensor], folder: Path) -> tuple[list[str], int]:
    """Compare a folder's tensors with the live ones, one by one: what is wrong, and how many were compared."""
    try:
        saved_in = tensors_in(folder)
    except (OSError, SafetensorError) as error:
        return [f"it cannot be read: {error}"], 0
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
            if line := difference(tensor.value, saved_in[name].get_tensor(name), tensor.allowed):
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
    tensors = list(live)
    names = {one.names[0]: one.names for one in tensors}
    # Where tensors are joined, so is what rounding may make of them.
    allowed = sum(one.allowed for one in tensors)
    files = revert_weight_conversion(model, {one.names[0]: one.value for one in tensors})
    return [LiveTensor(names.get(name, (name,)), value, allowed) for name, value in files.items()]


def difference(live: torch.Tensor, saved: torch.Tensor, allowed: float) -> str | None:
    """How a saved tensor differs from the live one, by more than a norm of `allowed` (0: in any bit); None where it does not."""
    if saved.shape != live.shape:
        return f"has shape {list(saved.shape)}, in memory {list(live.shape)}"
    if saved.dtype != live.dtype:
        return f"is {saved.dtype}, in memory {live.dtype}"
    if torch.equal(saved.reshape(-1).view(torch.uint8), live.reshape(-1).contiguous().view(torch.uint8)):
        return None
    apart = (saved.float() - live.float()).abs()
    if allowed and float(apart.norm()) <= allowed:
        return None
    return f"{int((apart != 0).sum())} of {live.numel()} elements differ, by {float(apart.max()):.3g} at most"


def compare_settings(folder: Path, model: Any, tokenizer: Any, trust_remote_code: bool) -> list[str]:
    """What differs in config.json, the generation config and the tokenizer, loaded from the folder."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        saved = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        stops_at = GenerationConfig.from_pretrained(folder).eos_token_id
    except Exception as error:  # whatever keeps a user from loading them
        return [f"it cannot be loaded: {type(error).__name__}: {error}"]
    # Where the tokenizer has no BOS, transformers before 5.23 clears the live model's; adapters are merged into a base that keeps it.
    free = _FREE_TO_DIFFER | ({"bos_token_id"} if tokenizer.bos_token_id is None else set())
    configs = [json.loads(one.to_json_string(use_diff=False)) for one in (config, model.config)]
    changes = [
        change
        for change in differences(*configs)
        if MISSING not in (change.old, change.new) and change.key.rpartition(".")[2] not in free
    ]
    tokens, rows = saved.get_vocab(), config.get_text_config().vocab_size
    pairs = [
        ("generation_config.json: eos_token_id", stops_at, model.generation_config.eos_token_id),
        *((f"the tokenizer: {name}", getattr(saved, name), getattr(tokenizer, name)) for name in _OF_TOKENIZER),
        ("the tokenizer: its tokens", tokens == tokenizer.get_vocab(), True),
        *((f"config.json: {one.key}", one.old, one.new) for one in changes),
    ]
    lines = [f"{name} is {one!s:.60}, in memory {other!s:.60}" for name, one, other in pairs if one != other]
    last = max(tokens.values())
    return lines + ([f"the tokenizer has {last + 1} tokens, and the embedding {rows} rows"] if last >= rows else [])


def sample_rows(sequences: Any, new: list[int]) -> list[list[int]]:
    """ROWS rows of LENGTH tokens of the training data, and one more in which every second token is one of the new ids."""
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


def live_logits(trainer: SFTTrainer, rows: list[list[int]]) -> torch.Tensor:
    """The engine's logits of rows of one length, fp32, on the CPU. Every rank takes part."""
    ids = torch.tensor(rows, device=trainer.accelerator.device)
    # Compiled layers would be compiled again, for a shape that training never has.
    with evaluating(trainer), torch.compiler.set_stance("force_eager"):
        logits: torch.Tensor = trainer.model_wrapped(input_ids=ids, use_cache=False).logits
    reshard(trainer.model)
    return logits.float().cpu()
