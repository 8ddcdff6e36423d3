"""Numbers and keys of the libraries that the plan reckons with."""

import re
from importlib.util import find_spec
from pathlib import Path

from sft.plan import memory
from sft.plan.deepspeed import KNOWN_KEYS
from sft.plan.layers import HEAD_TILE


def test_sizes_of_buffers_are_still_the_libraries() -> None:
    from accelerate.utils import DistributedDataParallelKwargs
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    tile = chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    assert tile == HEAD_TILE
    fields = DeepSpeedZeroConfig.model_fields
    assert fields["max_live_parameters"].default == fields["sub_group_size"].default == memory.LIVE
    assert not DistributedDataParallelKwargs().gradient_as_bucket_view, "DDP's buckets hold the gradients once more"


def test_the_keys_that_are_let_through_are_deepspeeds() -> None:
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    source = "".join(file.read_text() for file in Path(spec.origin).parent.rglob("*.py") if "config" in file.name)
    source += "".join(file.read_text() for file in Path(spec.origin).parent.rglob("constants.py"))
    assert [key for key in KNOWN_KEYS if not re.search(rf"""["']{key}["']|\b{key}\s*:""", source)] == []
