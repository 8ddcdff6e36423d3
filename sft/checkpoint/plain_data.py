"""No code in checkpoints: what is loaded from one is tensors, plain values, and the few classes named here.

transformers and accelerate load with weights_only; DeepSpeed's files, the plain values among torch's shares, and the .metadata of
those are unpickled as they are, which calls whatever the file says.
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

IN_METADATA = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What torch writes into .metadata, by module."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class, where it is one of those that torch writes."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(
                f"{module}.{name} does not belong in a checkpoint's .metadata: it is not loaded."
            )
        return super().find_class(module, name)


def load_metadata(file: IO[bytes]) -> Any:
    """What pickle.load gives, where nothing but torch's own description is in the file.

    Raises:
        pickle.UnpicklingError: Something else is.
    """
    return _Metadata(file).load()


def deepspeed_classes() -> list[Any]:
    """What DeepSpeed writes beside tensors and plain values; none where it is not in use."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def plain_data_only(deepspeed: bool) -> Iterator[None]:
    """A stretch in which every `torch.load` takes plain data only, whatever its caller says.

    Args:
        deepspeed: DeepSpeed's own classes are taken too.

    Raises:
        pickle.UnpicklingError: A file holds something else.
    """
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
    """A file of torch.save, its tensors mapped.

    Args:
        file: In torch's zip format.
        allowed: Classes that it may hold beside tensors and plain values.

    Raises:
        RunError: It is missing, or holds another class.
    """
    try:
        with torch.serialization.safe_globals(allowed or []):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
