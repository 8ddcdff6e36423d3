"""model.compile: the same gradients from one graph, whatever the number of tokens and documents. test_same_result.py trains with it."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sft.model.attention import IN_ONE_KERNEL, register
from sft.model.compiled_layers import compile_layers

pytestmark = [
    pytest.mark.slow,
    # What torch's own compiler runs into while it looks at tensors.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning"),
    # The range of versions knows only the old name.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]
LENGTHS = [[5, 9, 3], [7, 11], [4, 4, 13, 6, 2], [30, 2], [8, 8, 8], [3, 17]]


def by_document(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, cu_seq_lens_q: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention that reads on the CPU where documents end, as no graph can."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bounds = cu_seq_lens_q.tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(*(x[:, :, start:end] for x in (query, key, value)), is_causal=True)
        for start, end in pairwise(bounds)
    ]  # fmt: skip
    return torch.cat(parts, 2).transpose(1, 2), None


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def varlen_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, *rest: Any
) -> Tensors:
    """What torch's operator computes on a GPU, for the CPU."""
    states = [one.transpose(0, 1)[None] for one in (query, key, value)]
    output = by_document(None, *states, None, bounds)[0][0]
    return output.contiguous(), query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: Any, lse: Any, bounds: torch.Tensor, *rest: Any
) -> Tensors:  # fmt: skip
    """By its formula: beneath autograd, where the operator is called, nothing is recorded."""
    gradients = tuple(torch.empty_like(one) for one in (query, key, value))
    for start, end in pairwise(bounds.tolist()):
        do, q, k, v = (one[start:end].transpose(0, 1) for one in (grad, query, key, value))
        groups, scale = len(q) // len(k), q.shape[-1] ** -0.5
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (
            (q @ k.mT * scale).masked_fill(torch.ones(end - start, end - start).triu(1) > 0, -torch.inf).softmax(-1)
        )
        change = do @ v.mT
        change = scores * (change - (change * scores).sum(-1, keepdim=True)) * scale
        for target, found in zip(gradients, (change @ k, change.mT @ q, scores.mT @ do), strict=True):
            target[start:end] = found.view(target.shape[1], -1, *found.shape[1:]).sum(1).transpose(0, 1)
    return gradients  # type: ignore[return-value]


@pytest.fixture
def kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own operator, fake kernels and derivative for `varlen`, with the two kernels that only a GPU has."""
    _varlen_attn.register_kernel("cpu", varlen_forward)
    _varlen_attn_backward.register_kernel("cpu", varlen_backward)
    monkeypatch.setitem(IN_ONE_KERNEL, "cpu", (torch.float32,))
    register()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS.register("by_document", by_document)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def model_with(attention: str, checkpointing: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=3, use_cache=False, **sizes))
    model.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def trained_on(model: Qwen2ForCausalLM, lengths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of a pack."""
    model.zero_grad()
    ids = torch.randint(0, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    model(
        input_ids=ids, labels=ids, position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=max(lengths), max_length_k=max(lengths),
    ).loss.backward()  # fmt: skip
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]).norm(), gradients


@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, marks=pytest.mark.extra), True], ids=["", "checkpointing"]
)
@pytest.mark.parametrize("attention", ["sdpa", "by_document", "varlen"])
def test_sizes_that_change_compile_nothing_new_and_change_nothing(
    attention: str, checkpointing: bool, kernel_on_cpu: None
) -> None:
    plain, compiled = model_with(attention, checkpointing), model_with(attention, checkpointing)
    compile_layers(compiled, attention, on_gpu=True, backend="aot_eager")
    for step, lengths in enumerate(LENGTHS):
        (norm, gradients), (expected_norm, expected) = trained_on(compiled, lengths), trained_on(plain, lengths)
        assert norm == pytest.approx(expected_norm.item(), rel=1e-5)
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)
        if step == 0:
            # All layers share what the first one compiled.
            assert 0 < counters["stats"]["unique_graphs"] <= (6 if attention == "by_document" else 1)
            torch._dynamo.config.error_on_recompile = True
