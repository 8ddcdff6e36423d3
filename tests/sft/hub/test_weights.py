"""A model whose files are not whole is refused before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from sft.errors import ModelError
from sft.hub.weights import check_weight_files, has_weights, weight_files


@pytest.fixture(params=["safetensors", "bin"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two shards and their index, with the maker's own file beside them."""
    files = {f"w{n}": f"part-{n}.{request.param}" for n in (1, 2)}
    for name, file in files.items():
        if request.param == "bin":
            torch.save({name: torch.zeros(2500)}, tmp_path / file)
        else:
            save_file({name: np.zeros(2500, np.float16)}, tmp_path / file)
    index = "model.safetensors" if request.param == "safetensors" else "pytorch_model.bin"
    (tmp_path / f"{index}.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(99))
    return tmp_path


BROKEN: dict[str, Callable[[bytes], bytes | None]] = {
    "is missing": lambda whole: None,
    "was cut off": lambda whole: whole[: len(whole) // 2],
    "Git LFS": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_weights_are_refused(words: str, folder: Path) -> None:
    check_weight_files(folder, {})
    weights = weight_files(folder)[1]
    content = BROKEN[words](weights.read_bytes())
    weights.unlink() if content is None else weights.write_bytes(content)
    with pytest.raises(ModelError, match=rf"{weights.name} .*{words}.*again"):
        check_weight_files(folder, {})


def test_none_and_two_sets_of_weights_are_refused(folder: Path) -> None:
    whole = folder / next(folder.glob("*.index.json")).name.removesuffix(".index.json")
    whole.write_bytes(b"")
    with pytest.raises(ModelError, match=rf"two sets of weights: {whole.name}, and part-1"):
        weight_files(folder)
    for file in folder.glob("part-*"):
        file.unlink()
    assert weight_files(folder) == [whole]
    whole.unlink()
    next(folder.glob("*.index.json")).unlink()
    with pytest.raises(ModelError, match=r"holds no weights"):
        weight_files(folder)


def test_float8_needs_its_scales(tmp_path: Path) -> None:
    save_torch({"w2": torch.zeros(9, 9).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"w2 is stored in F8_E4M3.*quantization_config"):
        check_weight_files(tmp_path, {})
    check_weight_files(tmp_path, {"quantization_config": {"quant_method": "fp8"}})


def test_a_folder_without_any_file_of_weights_has_none(folder: Path, tmp_path: Path) -> None:
    assert has_weights(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert not has_weights(tmp_path / "empty")
