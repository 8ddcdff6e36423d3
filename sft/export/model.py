"""Writes the exported model: a folder made beside its place, checked, and renamed when it is complete.

final/ and a checkpoint of full weights are copied. A checkpoint of adapters is merged into its base; one of shards (FSDP2) is gathered
tensor by tensor. What is merged or gathered is loaded again, and its logits compared with those of the model it was made from.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from sft.checkpoint.final import complete_config
from sft.checkpoint.reshard import adapter_names, open_full, source_names
from sft.checkpoint.resume import writer_of
from sft.checkpoint.zero import WEIGHT
from sft.credentials import secrets_in
from sft.data.tokenizer import load_tokenizer as load_base_tokenizer
from sft.data.tokenizer import new_token_ids
from sft.errors import ExportError
from sft.export.source import Exported
from sft.files import disk_was_full, remove
from sft.hub.names import has_tokenizer
from sft.model.adapters import load_adapters, lora_config, start_adapters
from sft.model.live import logits_distance
from sft.model.load import load_dequantized
from sft.model.weight_checks import DTYPES, check_values, check_weights

_MODEL_FILES = (
    "model*.safetensors model.safetensors.index.json config.json generation_config.json tokenizer.json tokenizer_config.json "
    "tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt chat_template.jinja"
).split()
"""Files that make up a model. The optimizer's state and whatever else lies beside them stays where it is."""

_TEXT = (".json", ".md", ".jinja", ".sh", ".txt", ".yaml", ".py", "")
_LARGEST_TEXT = 4 << 20
"""Bytes. A larger tokenizer.json holds nothing of this machine."""

_PROBES = (
    "What is the capital of France? Paris, the city of 1 + 1 = 2 lights.",
    "def f(x):\n    return x * 2  # größer 中文",
)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference of logits after a merge, which rounds each weight once: in bf16 by up to 0.4%."""

_OF_THE_UPDATE = 0.5
"""Part of what the adapters change in the logits that rounding may take. Adapters that were not merged lose all of it."""


def check_output(output: Path, run: Path) -> None:
    """Raise ExportError for a folder that exists, lies in the run, or cannot be written, before anything is computed."""
    if output.exists() or output.is_symlink():
        raise ExportError(f"--output {output} exists. Remove it, or name another folder.")
    if output.resolve().is_relative_to(run.resolve()):
        raise ExportError(f"--output {output} lies inside the run {run}. Name a folder outside.")
    parent = next(path for path in output.resolve().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ExportError(f"--output {output}: {parent} is not a folder that you can write to.")


def model_files(source: Exported) -> list[Path]:
    """The files of the folder that make up a model."""
    patterns = [*_MODEL_FILES, "*.py"] if source.base.trust_remote_code else _MODEL_FILES
    return sorted({path for pattern in patterns for path in source.folder.glob(pattern) if path.is_file()})


def make_folder(source: Exported, output: Path, finish: Callable[[Path, Any], None], link: bool = False) -> None:
    """Make the folder of a model; `finish` writes what the target needs beside it.

    With `link` the weights are linked instead of copied, for a folder that is only read and then removed. Raises UserError where it
    cannot be made, or is another model than was trained; nothing is left behind.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    beside.chmod(0o755)
    try:
        tokenizer = load_tokenizer(source)
        if source.holds_model:
            _copy(source, beside, link)
        else:
            tokenizer.save_pretrained(beside)
            _merge_or_gather(source, tokenizer, beside)
        complete_config(beside)
        finish(beside, tokenizer)
        check_private(source, beside)
        for path in beside.iterdir():  # some libraries write weights that only their owner may read
            if path.stat().st_nlink == 1:  # a link is the run's own file
                path.chmod(0o755 if path.suffix == ".sh" else 0o644)
        beside.rename(output)
    except BaseException as error:
        remove(beside)
        if disk_was_full(error):
            raise ExportError(
                f"The disk of {output.parent} is full. Free some space, or name another disk with --output."
            ) from None
        raise


def load_tokenizer(source: Exported) -> Any:
    """The tokenizer of an exported model. Raises ExportError where it cannot be loaded, or does not fit the model."""
    from transformers import AutoConfig, AutoTokenizer

    folder = source.folder if has_tokenizer(source.folder) else source.run.final
    if not has_tokenizer(folder):  # a sharded checkpoint of an unfinished run
        base = source.base.model_copy(update={"name_or_path": source.base_path})
        return load_base_tokenizer(source.recipe.model_copy(update={"model": base}))
    remote = source.base.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
    except Exception as error:  # a damaged tokenizer.json comes as the Rust library's bare Exception
        raise ExportError(f"The tokenizer in {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    if source.holds_model:
        rows = AutoConfig.from_pretrained(source.folder, trust_remote_code=remote).get_text_config().vocab_size
        if len(tokenizer) > rows:
            raise ExportError(
                f"The tokenizer in {folder} has {len(tokenizer)} tokens, and the model {rows} embedding rows."
            )
    return tokenizer


def _copy(source: Exported, folder: Path, link: bool) -> None:
    remote = source.base.trust_remote_code
    check_weights(str(source.folder), None, remote, str(source.folder))
    for path in model_files(source):
        target = folder / path.name
        if link and path.suffix == ".safetensors":
            with suppress(OSError):  # a link to another disk
                target.hardlink_to(path)
        if not target.exists():
            shutil.copyfile(path, target)
    check_values(_load(folder, "auto", remote), str(source.folder))


def _merge_or_gather(source: Exported, tokenizer: Any, folder: Path) -> None:
    """Write the model of a checkpoint that is not one by itself, and compare its logits with those before."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:256] for text in _PROBES]
    dtype = DTYPES[source.precision]
    # One model at a time: two would not fit beside each other.
    model = _build(source, tokenizer)
    expected, untrained = _logits(model, rows, dtype), None
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            untrained = _logits(model, rows, dtype)
    del model
    gc.collect()
    model = _build(source, tokenizer)
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    check_values(model, source.name)
    model.save_pretrained(folder)
    del model
    gc.collect()
    check_logits(_logits(_load(folder, dtype, source.base.trust_remote_code), rows, dtype), expected, untrained, dtype)
    gc.collect()


def _build(source: Exported, tokenizer: Any) -> Any:
    """The trained model in memory, adapters beside the base."""
    model = load_dequantized(source.base, source.base_path, DTYPES[source.precision], tokenizer)
    lora = source.recipe.model.lora
    if any(source.folder.glob("adapter_model*.safetensors")):
        return load_adapters(model, source.folder)
    if lora is not None:
        new = new_token_ids(tokenizer, source.recipe.model.new_tokens)
        model = start_adapters(lora, model, lora_config(lora, model, new))
    full = open_full(source.folder, writer_of(source.folder), adapter_names(model))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, saved in source_names(model, full).items():
            parameters[name].copy_(full.read(saved, WEIGHT).view_as(parameters[name]))
    return model


def _load(folder: Path, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ExportError(f"{folder} cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}") from None


def _logits(model: Any, rows: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    # In fp32 if the machine has the memory, so that only what is on disk differs.
    in_fp32 = model.num_parameters() * 4 * 1.3 < psutil.virtual_memory().available
    model.to(torch.float32 if in_fp32 else dtype).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]


def check_logits(
    found: list[torch.Tensor], expected: list[torch.Tensor], untrained: list[torch.Tensor] | None, dtype: torch.dtype
) -> None:
    """Refuse a written model whose logits are not those of the model it was made from.

    `untrained` are the logits of the base without its adapters; without adapters (None), logits must be equal. `dtype` is what the
    weights were rounded to. Raises ExportError where they differ by more than rounding explains.
    """

    def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
        return max(logits_distance(a, b) for a, b in zip(one, other, strict=True))

    allowed = 0.0
    if untrained is not None:
        allowed = min(_TOLERANCE[dtype], max(_OF_THE_UPDATE * distance(expected, untrained), 1e-3))
    apart = distance(expected, found)
    if not apart <= allowed:  # also NaN
        raise ExportError(
            f"The exported model is not the one that was trained: its logits differ by {apart:.2%} of their norm, and {allowed:.2%} is "
            "allowed. Nothing was exported."
        )


def check_private(source: Exported, folder: Path) -> None:
    """Raise ExportError where a text file would give away a path of this machine or a key."""
    record = source.run.record
    places = {str(source.run.path), str(source.run.path.parent), str(Path.cwd()), str(record.get("working_directory"))}
    places |= {source.base_path} if source.base_path.startswith("/") else set()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _TEXT or path.stat().st_size > _LARGEST_TEXT:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if found := [place for place in places if len(place) > 5 and place in text]:
            raise ExportError(
                f"{path.name} holds a path of this machine, {found[0]}. Take it out of that file in {source.folder}."
            )
        if keys := secrets_in(text, []):
            raise ExportError(f"{path.name} holds what looks like a key ({keys[0]}). Nothing was exported.")
