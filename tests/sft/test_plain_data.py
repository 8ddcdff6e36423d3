import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from sft.plain_data import load_metadata, plain_data_only


class Planted:
    """Its pickle makes a folder where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def test_a_planted_pickle_is_not_run_though_its_reader_would(tmp_path: Path) -> None:
    torch.save({"optimizer_state_dict": Planted(tmp_path / "ran")}, tmp_path / "states.pt")
    with plain_data_only(deepspeed=False), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "states.pt", weights_only=False)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "states.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "outside it is torch's own rule"


def test_what_deepspeed_writes_is_taken_where_deepspeed_is_in_use(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2**16, 2.0, 1000, 1.0, 2, False, False)
    values = [LossScaler(scale=1.0), ZeroStageEnum.gradients, fragment_address(start=0, numel=8), scaler]
    torch.save(values, tmp_path / "states.pt")
    with plain_data_only(deepspeed=True):
        found = torch.load(tmp_path / "states.pt", weights_only=False)
    assert found[1:3] == values[1:3]
    assert found[3].cur_scale == 2**16
    with plain_data_only(deepspeed=False), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "states.pt", weights_only=False)


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
