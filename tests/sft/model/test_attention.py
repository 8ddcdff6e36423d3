"""Law 2 in one process: attention within packed documents is attention within each alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.masking_utils import AttentionMaskInterface
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

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
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    ),
    "phi3": (Phi3Config, {"sliding_window": WINDOW}),
}
Measured = tuple[float, dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    attention.register()


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    configuration, extra = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(configuration(**SMALL | extra))
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


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("function", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_loss_and_gradients_of_each_alone(
    family: str, function: str, checkpointing: bool
) -> None:
    expected, model = separate(family), model_of(family)
    model.set_attn_implementation(function)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        assert_equal(measure(model, [packed_batch()], TRAINED), expected)
    finally:
        model.gradient_checkpointing_disable()


def test_reentrant_checkpointing_hands_the_boundaries_on_too() -> None:
    expected, model = separate("mistral"), model_of("mistral")
    model.set_attn_implementation("varlen")
    model.gradient_checkpointing_enable({"use_reentrant": True})
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
def test_a_pack_of_one_document_longer_than_the_window_is_that_document(family: str) -> None:
    longest = max(documents(), key=len)
    model = model_of(family)
    model.set_attn_implementation("eager")
    alone = measure(model, [{"input_ids": longest[None], "labels": longest[None]}], len(longest) - 1)
    model.set_attn_implementation("varlen")
    assert_equal(measure(model, [packed_batch((longest,))], len(longest) - 1), alone)


def test_documents_joined_without_boundaries_would_fail_this_test() -> None:
    """So that the ones above can fail."""
    expected, model = separate("qwen2"), model_of("qwen2")
    model.set_attn_implementation("varlen")
    batch = packed_batch()
    batch = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    with pytest.raises(AssertionError):
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


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3"])
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


def by_hand(tensors: list[torch.Tensor], lengths: list[int], window: int | None, scaling: float) -> torch.Tensor:
    """Softmax over the tokens that each may see, in float64."""
    query, key, value = (one[0].double() for one in tensors)
    key, value = (one.repeat_interleave(query.shape[0] // one.shape[0], 0) for one in (key, value))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token = torch.arange(sum(lengths))
    seen = (document[:, None] == document) & (token[:, None] >= token)
    if window:
        seen &= token[:, None] - token < window
    scores = (query @ key.mT * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)[None]


CAUSAL = SimpleNamespace(is_causal=True, num_key_value_groups=2)
LAYER: Any = CAUSAL


@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9, 30, 31, 4096])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_windows_and_grouped_heads_are_what_the_formula_says(window: int | None, heads: tuple[int, int]) -> None:
    tensors = states(LENGTHS, *heads)
    output, weights = attention.document_attention(
        LAYER, *tensors, None, scaling=0.3, sliding_window=window, cu_seq_lens_q=boundaries_of(LENGTHS), max_length_q=30
    )
    assert weights is None
    assert output.shape == (1, sum(LENGTHS), 4, 8)
    torch.testing.assert_close(output.double(), by_hand(tensors, LENGTHS, window, 0.3), rtol=1e-5, atol=1e-5)


def test_documents_of_one_token_attend_to_themselves() -> None:
    query, key, value = states([1, 1, 1], 2, 2)
    output, _ = attention.document_attention(LAYER, query, key, value, None, cu_seq_lens_q=boundaries_of([1, 1, 1]))
    assert torch.equal(output, value.transpose(1, 2))


def test_one_document_needs_no_boundaries() -> None:
    tensors = states([12])
    without, _ = attention.document_attention(LAYER, *tensors, None, position_ids=torch.arange(12)[None])
    given, _ = attention.document_attention(LAYER, *tensors, None, cu_seq_lens_q=boundaries_of([12]))
    torch.testing.assert_close(without, given)
    torch.testing.assert_close(given.double(), by_hand(tensors, [12], None, 8**-0.5), rtol=1e-5, atol=1e-5)


def test_positions_of_several_axes_are_not_read_as_documents() -> None:
    """Multimodal rotary embeddings count time, height and width: [3, 1, T]."""
    tensors = states([12])
    positions = torch.arange(12).expand(3, 1, 12)
    output, _ = attention.document_attention(LAYER, *tensors, None, position_ids=positions)
    torch.testing.assert_close(output.double(), by_hand(tensors, [12], None, 8**-0.5), rtol=1e-5, atol=1e-5)


def test_a_value_in_bf16_decides_the_format() -> None:
    """Autocast leaves what rotary embeddings made in fp32 beside it."""
    query, key, value = states(LENGTHS)
    output, _ = attention.document_attention(
        LAYER, query, key, value.bfloat16(), None, cu_seq_lens_q=boundaries_of(LENGTHS), max_length_q=30
    )
    assert output.dtype == torch.bfloat16
    expected = by_hand([query, key, value], LENGTHS, None, 8**-0.5)
    torch.testing.assert_close(output.double(), expected, rtol=3e-2, atol=3e-2)


def test_bf16_training_under_autocast_runs() -> None:
    model = model_of("qwen3")
    model.set_attn_implementation("varlen")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**packed_batch()).loss
    loss.backward()
    assert loss.item() == pytest.approx(separate("qwen3")[0], rel=0.02)


REFUSED = {
    "dropout": {"dropout": 0.1},
    "softcapping": {"softcap": 30.0},
    "sinks": {"s_aux": torch.zeros(4)},
    "no mask besides": {"attention_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)},
    "causal attention": {"is_causal": False},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_compute_is_refused_with_the_remedy(what: str) -> None:
    arguments: dict[str, Any] = {"attention_mask": None, "cu_seq_lens_q": boundaries_of([4, 5])} | REFUSED[what]
    with pytest.raises(ValueError, match=what) as error:
        attention.document_attention(LAYER, *states([4, 5]), **arguments)
    assert "Set model.attn_implementation to sdpa or eager" in str(error.value)


def test_a_layer_that_sees_later_tokens_is_refused() -> None:
    layer: Any = SimpleNamespace(is_causal=False)
    with pytest.raises(ValueError, match="causal attention"):
        attention.document_attention(layer, *states([4, 5]), None, cu_seq_lens_q=boundaries_of([4, 5]))


def test_boundaries_beside_several_rows_are_refused() -> None:
    tensors = [one.expand(2, -1, -1, -1) for one in states([4, 5])]
    with pytest.raises(ValueError, match="one flattened row"):
        attention.document_attention(LAYER, *tensors, None, cu_seq_lens_q=boundaries_of([4, 5]))


def test_a_mask_of_ones_beside_boundaries_is_refused_or_right() -> None:
    """With it transformers makes a causal mask over all documents."""
    model = model_of("qwen2")
    model.set_attn_implementation("varlen")
    batch = packed_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    try:
        found = measure(model, [batch], TRAINED)
    except ValueError as error:
        assert "no mask besides" in str(error)
    else:
        assert_equal(found, separate("qwen2"))


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, Any]]]:
    """What transformers asked our mask function, and what it got."""
    seen: list[tuple[bool, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        mask = attention.document_mask(*args, **kwargs)
        seen.append((kwargs["allow_is_causal_skip"], mask))
        return mask

    AttentionMaskInterface.register(attention.NAME, recorded)
    yield seen
    attention.register()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_tokens_squared_is_made_for_packed_documents(family: str, masks: list[tuple[bool, Any]]) -> None:
    """transformers calls with `allow_is_causal_skip` off where position ids restart, and the mask function relies on it."""
    model = model_of(family)
    model.set_attn_implementation("varlen")
    with torch.no_grad():
        model(**packed_batch())
    assert masks
    assert all(mask is None and not may_skip for may_skip, mask in masks)


def test_one_document_may_do_without_a_mask_and_padding_may_not(masks: list[tuple[bool, Any]]) -> None:
    model = model_of("qwen2")
    model.set_attn_implementation("varlen")
    rows = torch.stack([documents()[3], documents()[3]])
    mask = torch.ones_like(rows)
    mask[0, 20:] = 0
    with torch.no_grad():
        model(input_ids=rows, position_ids=torch.arange(30)[None])
        model(input_ids=rows, attention_mask=mask)
    assert [may_skip for may_skip, _ in masks] == [True, True]
    assert masks[0][1] is None
    assert masks[1][1].shape == (2, 1, 30, 30)


def test_several_rows_of_packed_documents_stay_apart() -> None:
    """As collators pack that do not flatten a batch; their rows have masks, since boundaries are of one row."""
    model = model_of("qwen2")
    rows = [torch.cat(documents()[:3]), torch.cat(documents()[:3]).flip(0)]
    positions = torch.cat([torch.arange(length) for length in LENGTHS[:3]]).expand(2, -1)
    outputs = {}
    for function in ("varlen", "eager"):
        model.set_attn_implementation(function)
        with torch.no_grad():
            outputs[function] = model(input_ids=torch.stack(rows), position_ids=positions).logits
    torch.testing.assert_close(outputs["varlen"], outputs["eager"], rtol=1e-4, atol=1e-4)


def plain_kernel(query: Any, key: Any, value: Any, starts: Any, _: Any, longest: int, __: int, **options: Any) -> Any:
    """What varlen_attn computes, by sdpa and its documented arguments: [T, heads, head_dim], tokens to the left and right."""
    left, right = options["window_size"]
    assert right == 0
    outputs = []
    for start, end in pairwise(starts.tolist()):
        assert end - start <= longest
        token = torch.arange(end - start)
        distance = token[:, None] - token
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        document = [one[start:end].transpose(0, 1)[None] for one in (query, key, value)]
        outputs.append(scaled_dot_product_attention(*document, attn_mask=seen, scale=options["scale"], enable_gqa=True))
    return torch.cat(outputs, 2)[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 8])
def test_the_gpus_kernel_gets_what_it_documents(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot run here: a stand-in by its documentation takes its arguments."""
    given: list[tuple[Any, ...]] = []

    def recording(*args: Any, **options: Any) -> torch.Tensor:
        given.append((args, options))
        output: torch.Tensor = plain_kernel(*args, **options)
        return output

    monkeypatch.setattr(attention, "_KERNEL", recording)
    tensors, boundaries = states(LENGTHS), boundaries_of(LENGTHS)
    output = attention._in_one_kernel(*tensors, boundaries, 30, 0.3, window)
    torch.testing.assert_close(output.double(), by_hand(tensors, LENGTHS, window, 0.3), rtol=1e-5, atol=1e-5)
    ((query, key, value, *rest), options) = given[0]
    assert query.shape == (sum(LENGTHS), 4, 8)
    assert key.shape == value.shape == (sum(LENGTHS), 2, 8)
    assert rest[0] is rest[1] is boundaries
    assert rest[2:] == [30, 30]
    assert options["window_size"] == ((window - 1, 0) if window else (-1, 0))
    assert options["scale"] == 0.3
    knows = "enable_gqa" in inspect.signature(varlen_attn).parameters
    assert ("enable_gqa" in options) == knows
    assert options.get("enable_gqa", True) is True


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


@pytest.mark.parametrize("window", [None, 8])
def test_the_gpus_kernel_has_a_gradient_for_grouped_heads(window: int | None) -> None:
    tensors = states(LENGTHS, device="meta", dtype=torch.bfloat16, requires_grad=True)
    output = attention._in_one_kernel(*tensors, boundaries_of(LENGTHS).to("meta"), 30, None, window)
    output.sum().backward()
    assert [one.grad is not None and one.grad.shape for one in tensors] == [one.shape for one in tensors]


def test_registering_again_changes_nothing() -> None:
    attention.register()
    attention.register()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[attention.NAME] is attention.document_attention


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
