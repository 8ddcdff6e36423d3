import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from sft.checkpoint.plain_data import load_metadata, plain_data_only


class Planted:
    """Its pickle makes a folder where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


@pytest.mark.filterwarnings("ignore")  # torch says that it is not distributed
def test_torchs_shares_are_read_and_a_planted_description_of_them_is_not(tmp_path: Path) -> None:
    written = {"weight": torch.arange(6.0), "group": {"lr": 0.1, "betas": (0.9, 0.95)}}
    save(written, storage_writer=FileSystemWriter(tmp_path))
    read = {"weight": torch.zeros(6), "group": {"lr": 0.0, "betas": (0.0, 0.0)}}
    with plain_data_only(deepspeed=False):
        load(read, storage_reader=FileSystemReader(tmp_path))
    assert torch.equal(read["weight"], written["weight"])
    assert read["group"] == written["group"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    with plain_data_only(deepspeed=False), pytest.raises(BaseException, match="does not belong in a checkpoint"):
        load(read, storage_reader=FileSystemReader(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("torch.distributed.checkpoint.metadata", "os.system"), ("torch", "load"), ("os", "mkdir")],
)
def test_a_description_names_only_what_torch_writes(module: str, name: str) -> None:
    pickled = b"\x80\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
    pickled += pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + pickle.STACK_GLOBAL + pickle.STOP
    with pytest.raises(pickle.UnpicklingError, match="does not belong"):
        load_metadata(io.BytesIO(pickled))
