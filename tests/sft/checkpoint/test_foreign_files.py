"""What comes from elsewhere is data: no file of it is run. ruff (S in pyproject.toml) finds calls that would."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint import save as save_shards

from sft.checkpoint.patches import plain_data_only
from sft.checkpoint.reshard import _open_distributed
from sft.data.tokenizer import load_tokenizer
from sft.errors import ModelError
from sft.hub.demo import Demo
from sft.launch.job import open_job
from sft.model.load import load_model
from sft.plan.hardware import Hardware
from sft.program import exit_on_error


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def test_the_loaders_of_yaml_make_plain_values() -> None:
    import yaml

    from eval.tasks.files import _TextLoader
    from sft.recipe.load import _Loader

    for loader in (_Loader, _TextLoader):
        assert issubclass(loader, yaml.SafeLoader)
        with pytest.raises(yaml.YAMLError):
            yaml.load("!!python/object/apply:os.system ['true']", loader)


def load(folder: Path, recipe_file: Path, demo: Demo, outputs: Path) -> Any:
    words = [f"output_dir={outputs}", f"model.name_or_path={folder}", f"data.train={demo.train}"]
    job = open_job(recipe_file, words, Hardware(None, 1, 1, 2, 8.0))
    return load_model(job, load_tokenizer(job.recipe))


def test_a_bin_file_with_a_program_in_it_is_refused_and_not_run(
    recipe_file: Path, demo: Demo, outputs: Path, tmp_path: Path
) -> None:
    folder, expected = tmp_path / "model", load_file(demo.model / "model.safetensors")
    shutil.copytree(demo.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(expected, folder / "pytorch_model.bin")
    assert torch.equal(
        load(folder, recipe_file, demo, outputs).get_input_embeddings().weight, expected["model.embed_tokens.weight"]
    )
    torch.save(expected | {"evil": Evil(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds other things than tensors.*not loaded.*safetensors"):
        load(folder, recipe_file, demo, outputs)
    assert not (tmp_path / "ran").exists()


def test_what_deepspeed_loads_as_anything_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    torch.save({"loss_scaler": LossScaler(1.0), "step": torch.ones(1)}, good)
    torch.save({"evil": Evil(tmp_path / "ran")}, bad)
    with plain_data_only(deepspeed=True):
        assert torch.load(good, weights_only=False)["step"] == 1
    with pytest.raises(SystemExit) as ended, exit_on_error(), plain_data_only(deepspeed=True):
        torch.load(bad, weights_only=False)
    assert ended.value.code == 2
    assert not (tmp_path / "ran").exists()
    told = capsys.readouterr().err
    assert "posix.system" in told
    assert "add_safe_globals" not in told


@pytest.mark.filterwarnings("ignore")  # torch says that it is not distributed
def test_torchs_shards_are_read_and_a_planted_description_of_them_is_not(tmp_path: Path) -> None:
    written = {"weight": torch.arange(6.0), "group": {"lr": 0.1, "betas": (0.9, 0.95)}}
    save_shards(written, storage_writer=FileSystemWriter(tmp_path))
    read = {"weight": torch.zeros(6), "group": {"lr": 0.0, "betas": (0.0, 0.0)}}
    with plain_data_only(deepspeed=False):
        load_shards(read, storage_reader=FileSystemReader(tmp_path))
    assert torch.equal(read["weight"], written["weight"])
    assert read["group"] == written["group"]
    names, read_full = _open_distributed(tmp_path)  # what an export and a resume on other ranks read with
    assert torch.equal(read_full("weight"), written["weight"])
    assert "weight" in names
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    refused = "does not belong in a checkpoint|metadata is None"  # torch 2.11 keeps the reason to itself
    with plain_data_only(deepspeed=False), pytest.raises(BaseException, match=refused):
        load_shards(read, storage_reader=FileSystemReader(tmp_path))
    with pytest.raises(BaseException, match="does not belong in a checkpoint"):
        _open_distributed(tmp_path)
    assert not (tmp_path / "ran").exists()
