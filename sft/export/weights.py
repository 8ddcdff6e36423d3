"""The weights of what is handed over: copied where they lie ready, merged or put together where they do not.

final/                              ready: the model, adapters merged
checkpoint with model.safetensors   ready: one process, DDP, DeepSpeed
checkpoint with adapters            base and adapter, merged as final/ is
checkpoint in shares (FSDP2)        whole tensors, read one by one: sft/checkpoint/reshard.py
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint.reshard import open_full
from sft.checkpoint.zero import WEIGHT
from sft.data.tokenizer import new_token_ids
from sft.errors import ExportError
from sft.export.check import Reference, arithmetic_for, load, logits_of, with_model
from sft.export.source import Exported
from sft.model.load import DTYPES, load_base, lora_config

_HANDED_OVER = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that make up a model. Whatever else lies beside them, such as an optimizer's state, stays where it is."""

_CODE = "*.py"


def model_files(source: Exported) -> list[Path]:
    """What of the folder is handed over as it is."""
    patterns = (*_HANDED_OVER, _CODE) if source.base.trust_remote_code else _HANDED_OVER
    found = {path for pattern in patterns for path in source.folder.glob(pattern) if path.is_file()}
    return sorted(found)


def left_behind(source: Exported) -> list[str]:
    """Names of what stays, for the user to see."""
    handed = {path.name for path in model_files(source)}
    return sorted(path.name for path in source.folder.iterdir() if path.name not in handed and path.name[0] != ".")


def weight_files(folder: Path) -> list[Path]:
    """Of a model that lies ready."""
    return sorted(folder.glob("model*.safetensors"))


def saved_format(source: Exported) -> tuple[int, torch.dtype]:
    """Elements of the model, and what most of them are saved in; of one that must be put together, as far as the disk tells.

    Raises:
        ExportError: A file of weights is damaged.
    """
    if not source.holds_model:
        return 0, DTYPES[source.precision]
    counts: dict[torch.dtype, int] = {}
    for _, shape, dtype in _headers(source.folder):
        counts[dtype] = counts.get(dtype, 0) + shape.numel()
    return sum(counts.values()), max(counts, key=lambda dtype: counts[dtype])


def _headers(folder: Path) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    for name, tensor in _tensors(folder):
        yield name, tensor.shape, tensor.dtype


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """One at a time; mapped, so that only what is looked at is read."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dictionary
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{path} cannot be read: {error}.") from None


def check_finite(folder: Path) -> None:
    """Refuse weights that are no numbers, by name.

    Raises:
        ExportError: A tensor holds NaN or infinity.
    """
    for name, tensor in _tensors(folder):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            wrong = int((~tensor.isfinite()).sum())
            raise ExportError(
                f"{folder}: {wrong} of {tensor.numel()} elements of {name} are NaN or infinite. It is not exported; export a checkpoint "
                "from before that: --checkpoint N."
            )


def bytes_needed(source: Exported) -> int:
    """Of the folder that is to be made, as far as the disk tells."""
    if source.holds_model:
        return sum(path.stat().st_size for path in model_files(source))
    base = Path(source.base_path)
    return sum(path.stat().st_size for path in weight_files(base)) if base.is_dir() else 0


def write_weights(source: Exported, tokenizer: Any, rows: list[list[int]], folder: Path, link: bool) -> Reference:
    """Write the model's files, and tell what its logits must be.

    Args:
        source: What is handed over.
        tokenizer: Of its folder.
        rows: To compute logits of.
        folder: Empty.
        link: Have the files be links to those of the run, for a folder that is only read and then removed.

    Raises:
        UserError: The weights, or the base, cannot be read.
    """
    if source.holds_model:
        check_finite(source.folder)
        for path in model_files(source):
            _place(path, folder / path.name, link)
        if source.adapter is not None:
            return _of_base_and_adapter(source, tokenizer, rows, None)
        dtype = arithmetic_for(*saved_format(source))
        logits = with_model(
            lambda: load(source.folder, dtype, source.base.trust_remote_code), lambda model: logits_of(model, rows)
        )
        return Reference(logits, _named(source))
    tokenizer.save_pretrained(folder)
    assert source.step is not None
    if source.adapter is not None and any(source.folder.glob("adapter_model*.safetensors")):
        return _of_base_and_adapter(source, tokenizer, rows, folder)
    return _of_shares(source, tokenizer, rows, folder)


def _named(source: Exported) -> str:
    return "final/" if source.step is None else f"checkpoint-{source.step}"


def _place(path: Path, target: Path, link: bool) -> None:
    if link and path.suffix == ".safetensors":
        try:
            target.hardlink_to(path)
        except OSError:  # on another disk
            pass
        else:
            return
    shutil.copyfile(path, target)


def _base(source: Exported, tokenizer: Any) -> Any:
    return load_base(source.base, source.base_path, DTYPES[source.precision], tokenizer)


def _of_base_and_adapter(source: Exported, tokenizer: Any, rows: list[list[int]], merge_to: Path | None) -> Reference:
    from peft import PeftModel

    def build() -> Any:
        return PeftModel.from_pretrained(_base(source, tokenizer), source.adapter)

    return _with_adapters(source, build, rows, merge_to)


def _with_adapters(
    source: Exported, build: Callable[[], Any], rows: list[list[int]], merge_to: Path | None
) -> Reference:
    """Logits of the base with its adapters beside it, which adds in fp32 what the merged model holds rounded."""
    merged_in = DTYPES[source.precision]
    if merge_to is not None:
        with_model(build, lambda model: model.merge_and_unload().save_pretrained(merge_to))
        check_finite(merge_to)

    def both(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = _in_arithmetic(model, merged_in)
        with model.disable_adapter():
            untrained = logits_of(model, rows)
        return logits_of(model, rows), untrained

    logits, untrained = with_model(build, both)
    return Reference(logits, f"the base with the adapter of {_named(source)}", untrained, merged_in)


def _in_arithmetic(model: Any, dtype: torch.dtype) -> Any:
    return model.to(arithmetic_for(sum(one.numel() for one in model.parameters()), dtype))


def _of_shares(source: Exported, tokenizer: Any, rows: list[list[int]], folder: Path) -> Reference:
    """A checkpoint whose weights no single file holds: each trained parameter, whole, into the model that training began with."""
    if source.adapter is not None:
        return _with_adapters(source, lambda: _from_shares(source, tokenizer), rows, folder)

    def save(model: Any) -> list[torch.Tensor]:
        model.save_pretrained(folder)
        check_finite(folder)
        return logits_of(_in_arithmetic(model, DTYPES[source.precision]), rows)

    return Reference(with_model(lambda: _from_shares(source, tokenizer), save), _named(source))


def _from_shares(source: Exported, tokenizer: Any) -> Any:
    from peft import get_peft_model

    from sft.checkpoint.reshard import adapter_names, source_names

    assert source.writer is not None
    model, lora = _base(source, tokenizer), source.recipe.model.lora
    if lora is not None:
        model = get_peft_model(
            model, lora_config(lora, model, new_token_ids(tokenizer, source.recipe.model.new_tokens))
        )
    whole = open_full(source.folder, source.writer, adapter_names(model))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, saved in source_names(model, whole).items():
            parameters[name].copy_(whole.read(saved, WEIGHT).view_as(parameters[name]))
    return model
