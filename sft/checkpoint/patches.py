"""Replaces functions of libraries while a checkpoint is loaded.

`pickle` in `torch.distributed.checkpoint.filesystem`, and TORCH_FORCE_WEIGHTS_ONLY_LOAD, while loading
    DeepSpeed and torch unpickle freely, which calls whatever a file says.
    Noticed by tests/sft/checkpoint/test_foreign_files.py.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import filesystem

from sft.errors import RunError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

_METADATA = "torch.distributed.checkpoint.metadata"
IN_METADATA = {
    *("collections.OrderedDict", "torch.Size", "torch.serialization._get_layout"),
    *("pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath", "pathlib._local.PurePosixPath"),
    *(f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{_METADATA}.{name}StorageMetadata" for name in ("Bytes", "Chunk", "Tensor")),
    *(f"{_METADATA}.TensorProperties", "torch.distributed.checkpoint.filesystem._StorageInfo"),
}
"""What torch writes into .metadata."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of those that torch writes."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in IN_METADATA:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's .metadata: not loaded.")
        return super().find_class(module, name)


def load_metadata(file: IO[bytes]) -> Any:
    """Like pickle.load, for a file that holds only torch's own description; else an UnpicklingError."""
    return _Metadata(file).load()


def deepspeed_classes() -> list[Any]:
    """What DeepSpeed writes beside tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def plain_data_only(deepspeed: bool) -> Iterator[None]:
    """Make every `torch.load` take only tensors and plain values, whatever its caller says; else an UnpicklingError."""
    before, reader = os.environ.get(_FORCE), cast(Any, filesystem)
    os.environ[_FORCE] = "1"
    reader.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)
    try:
        with torch.serialization.safe_globals(deepspeed_classes() if deepspeed else []):
            yield
    finally:
        reader.pickle = pickle
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def load_mapped(file: Path, allowed: list[Any] | None = None) -> Any:
    """A file of torch.save, its tensors mapped from disk; a RunError where it is missing or holds another class."""
    try:
        with torch.serialization.safe_globals(allowed or []):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
