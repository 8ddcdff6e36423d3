"""Numbers and keys of the libraries that the plan reckons with."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.plan import memory, simulation
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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_trls_fused_head_takes_what_its_substitute_takes(
    autocast: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without values, and without what its Triton kernels and cuBLAS do in place."""
    from trl.kernels import chunked_logprob

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        monkeypatch.setattr(chunked_logprob, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    kept_in = torch.float32 if autocast else torch.bfloat16

    def theirs(hidden: Any, weight: Any) -> Any:
        targets = torch.zeros(len(hidden), dtype=torch.long, device="meta")
        width = HEAD_TILE[1]
        return chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, width, None, 1.0, ())[0]

    def ours(hidden: Any, weight: Any) -> Any:
        return simulation._Head.apply(hidden, weight, torch.bfloat16, False)

    def passed(head: Any) -> tuple[int, int]:
        sizes = {"dtype": kept_in, "device": "meta"}
        hidden = torch.empty(10_000, 1024, **sizes, requires_grad=True)
        weight = torch.empty(100_000, 1024, **sizes, requires_grad=not frozen)
        with simulation._Live([hidden, weight]) as live:
            loss = head(hidden, weight).sum()
            kept = live.now
            loss.backward()
        return kept, live.peak

    kept, peak = (pytest.approx(number, abs=20 * 4 * 10_000) for number in passed(ours))
    assert passed(theirs) == (kept, peak)


def test_the_keys_that_are_let_through_are_deepspeeds() -> None:
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    source = "".join(file.read_text() for file in Path(spec.origin).parent.rglob("*.py") if "config" in file.name)
    source += "".join(file.read_text() for file in Path(spec.origin).parent.rglob("constants.py"))
    assert [key for key in KNOWN_KEYS if not re.search(rf"""["']{key}["']|\b{key}\s*:""", source)] == []
