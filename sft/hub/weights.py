"""Finds the files that hold a model's weights, and refuses missing, broken and doubled ones before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open

from sft.errors import ModelError

_FORMATS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; each may be an index of several files."""


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads of a local model; others, such as `consolidated.safetensors`, may lie beside them.

    Raises ModelError where there is none; one that the index names is missing; or there are two sets of weights.
    """
    for name in _FORMATS:
        single, index = folder / name, folder / f"{name}.index.json"
        shards = _shards(index)
        there = [shard for shard in shards if shard.is_file()]
        if single.is_file():
            if others := [shard.name for shard in there if shard != single]:
                # transformers would load the former, other tools the latter.
                raise ModelError(
                    f"model.name_or_path={folder}: the folder holds two sets of weights: {name}, and {others[0]} and whatever else "
                    f"{index.name} names. Move the one that you do not mean out of the folder."
                )
            return [single]
        if missing := [shard.name for shard in shards if shard not in there]:
            raise ModelError(
                f"model.name_or_path={folder}: {missing[0]} is missing. Copy or download the model's files again."
            )
        if shards:
            return shards
    raise ModelError(
        f"model.name_or_path={folder}: the folder holds no weights ({_FORMATS[0]}, or {_FORMATS[0]}.index.json and the files that it "
        "names). Copy the model's files there."
    )


def has_weights(folder: Path) -> bool:
    """Whether there is any file of weights, whole or not."""
    return any(file.name.startswith(_FORMATS) for file in folder.iterdir())


def _shards(index: Path) -> list[Path]:
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error}. Copy it again.") from None


def read_dtypes(file: Path) -> dict[str, str]:
    """The dtype of each tensor of a safetensors file, by name; of a .bin file only the form is checked, and nothing is returned.

    Raises ModelError where the file is cut off, or holds no weights.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "np") as tensors:
                return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 (no dictionary)
        with file.open("rb") as opened:
            old_format = opened.read(1) == b"\x80"  # as torch wrote it before 1.6
        if old_format or is_zipfile(file):
            return {}
        problem = "torch wrote no such file"
    except SafetensorError as error:
        problem = str(error)
    raise ModelError(
        f"{file} holds no weights, or was cut off: {problem}. A pointer of Git LFS? `git lfs pull` gets what it stands for. Else copy or "
        "download it again."
    )


def check_weight_files(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a local model whose files are not whole, or whose float8 tensors lack the scales that quantization_config describes."""
    is_quantized = "quantization_config" in config or "compression_config" in config
    for file in weight_files(folder):
        for name, dtype in read_dtypes(file).items():
            if dtype.startswith("F8_") and not is_quantized:
                raise ModelError(
                    f"{file}: {name} is stored in {dtype}, and config.json has no quantization_config, without which its scales are "
                    "ignored. Get the model in bfloat16, or the config.json that belongs to these weights."
                )
