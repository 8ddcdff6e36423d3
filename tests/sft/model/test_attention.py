"""Packed equals separate, in one process: attention within packed documents is attention within each alone."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.errors import ModelError
from sft.model import attention

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

LENGTHS = [5, 17, 1, 30, 8, 9]  # a window of 8 is below, at and above them; one has a single token
WINDOW = 8
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW} | GEMMA,
    "phi3": {"sliding_window": WINDOW},
}
Measured = tuple[float, dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    attention.register()


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SMALL | FAMILIES[family]))
    model.config.use_cache = False
    return model.train()


@cache
def documents() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(1, SMALL["vocab_size"], (length,), generator=generator) for length in LENGTHS)


def packed_batch(lengths: tuple[torch.Tensor, ...] | None = None) -> dict[str, Any]:
    """The documents as TRL's own collator packs them."""
    rows = [{"input_ids": document.tolist()} for document in lengths or documents()]
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    return batch


def boundaries_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def measure(model: Any, batches: list[dict[str, Any]], total: int) -> Measured:
    """The summed loss and all gradients."""
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        part = model(**batch, num_items_in_batch=total).loss
        part.backward()
        loss += part.item()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


TRAINED = sum(LENGTHS) - len(LENGTHS)  # the first token of a document has nothing before it


@cache
def separate(family: str) -> Measured:
    """Each document by itself, with the model's own attention."""
    model = model_of(family)
    model.set_attn_implementation("eager")
    return measure(
        model, [{"input_ids": one[None], "labels": one[None]} for one in documents() if len(one) > 1], TRAINED
    )


def assert_equal(found: Measured, expected: Measured) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0, name
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("checkpointing", [None, "recomputed", "reentrant"])
@pytest.mark.parametrize("function", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_loss_and_gradients_of_each_alone(
    family: str, function: str, checkpointing: str | None
) -> None:
    expected, model = separate(family), model_of(family)
    model.set_attn_implementation(function)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    model.enable_input_require_grads()
    try:
        assert_equal(measure(model, [packed_batch()], TRAINED), expected)
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


@pytest.mark.parametrize("family", FAMILIES)
def test_position_ids_that_restart_are_boundaries_enough(family: str) -> None:
    expected, model = separate(family), model_of(family)
    model.set_attn_implementation("varlen")
    batch = {name: value for name, value in packed_batch().items() if name in ("input_ids", "labels", "position_ids")}
    assert_equal(measure(model, [batch], TRAINED), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_what_eager_makes_of_it(family: str, side: str) -> None:
    model = model_of(family)
    rows = [document.flip(0) if side == "left" else document for document in documents()]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padded = padded.flip(1) if side == "left" else padded
    mask = (padded != 0).long()
    outputs = {}
    for function in ("varlen", "eager"):
        model.set_attn_implementation(function)
        with torch.no_grad():
            outputs[function] = model(input_ids=padded, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(outputs["varlen"], outputs["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3_text"])
def test_generation_with_a_cache_is_what_eager_generates(family: str) -> None:
    model = model_of(family)
    rows = torch.nn.utils.rnn.pad_sequence([one.flip(0) for one in documents()[:2]], batch_first=True).flip(1)
    arguments = {"attention_mask": (rows != 0).long(), "max_new_tokens": 10, "do_sample": False, "use_cache": True}
    written = {}
    model.eval()
    for function in ("varlen", "eager"):
        model.set_attn_implementation(function)
        written[function] = model.generate(rows, **arguments)
    model.train()
    assert torch.equal(written["varlen"], written["eager"])


def states(lengths: list[int], heads: int = 4, kv_heads: int = 2, **options: Any) -> list[torch.Tensor]:
    """query, key and value as a layer hands them over."""
    torch.manual_seed(2)
    return [torch.randn(1, count, sum(lengths), 8, **options) for count in (heads, kv_heads, kv_heads)]


CAUSAL = SimpleNamespace(is_causal=True, num_key_value_groups=2)
LAYER: Any = CAUSAL


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("dropout", {"dropout": 0.1}),
        ("softcapping", {"softcap": 30.0}),
        ("sinks", {"s_aux": torch.zeros(4)}),
        ("no mask besides", {"attention_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}),
        ("causal attention", {"is_causal": False}),
        ("one flattened row", {}),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_remedy(what: str, arguments: dict[str, Any]) -> None:
    tensors = states([4, 5]) if arguments else [one.expand(2, -1, -1, -1) for one in states([4, 5])]
    with pytest.raises(ValueError, match=rf"{what}.*Set model.attn_implementation to sdpa or eager"):
        attention.document_attention(
            LAYER, *tensors, **{"attention_mask": None, "cu_seq_lens_q": boundaries_of([4, 5])} | arguments
        )


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_it_is_torchs_kernel_and_never_waits_for_the_gpu(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without storage have torch check shapes and signature, and refuse whatever would read a value back."""
    monkeypatch.setattr(attention, "_one_by_one", None)
    with FakeTensorMode():
        query, key, value = states(LENGTHS, device="cuda")
        boundaries = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="cuda")
        output, _ = attention.document_attention(
            LAYER, query, key, value.to(dtype), None, sliding_window=window, cu_seq_lens_q=boundaries, max_length_q=30
        )
    assert output.shape == (1, sum(LENGTHS), 4, 8)
    assert (output.dtype, output.device.type) == (dtype, "cuda")


def test_no_mask_is_made_for_a_row_without_padding_whatever_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a pack, nor for one document that is longer than the window: its mask would be of tokens squared."""
    model = model_of("mistral")
    model.set_attn_implementation("varlen")
    monkeypatch.setattr(attention, "sdpa_mask", None)
    longest = max(documents(), key=len)
    with torch.no_grad():
        packed = model(**packed_batch((longest,)), use_cache=False).logits
        bare = model(input_ids=longest[None], use_cache=False).logits
    monkeypatch.undo()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        alone = model(input_ids=longest[None], use_cache=False).logits
    for found in (packed, bare):
        assert float((found - alone).norm() / alone.norm()) < 1e-5


PACKAGE = """\
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""


@pytest.mark.skipif(not hasattr(torch.nn.attention, "_fa3"), reason="this torch cannot switch to FlashAttention-3")
def test_torch_switches_to_the_flash_attention_that_the_name_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own function, with a package that has the operators' names and computes nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"varlen_fa3: .*FlashAttention-3 .ModuleNotFoundError.*Set it to varlen\."):
        attention.register("varlen_fa3")
    assert attention.running_switch() is None
    (tmp_path / "flash_attn_interface.py").write_text(PACKAGE)
    importlib.invalidate_caches()
    try:
        attention.register("varlen_fa3")
        assert attention.running_switch() == "FA3"
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert attention.running_switch() is None
