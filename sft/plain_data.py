"""The description of FSDP2's shares, .metadata, is a pickle that torch loads as it is, which calls whatever the file says.

Here it is held to the classes that torch writes. Of what torch.load reads sft/safe_loading.py takes care.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import filesystem

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


@contextmanager
def plain_metadata() -> Iterator[None]:
    """A stretch in which torch reads the .metadata of shares with `load_metadata`.

    Raises:
        pickle.UnpicklingError: One holds something else than torch writes.
    """
    reader = cast(Any, filesystem)
    reader.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)
    try:
        yield
    finally:
        reader.pickle = pickle
