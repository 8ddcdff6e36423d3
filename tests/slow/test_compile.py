"""model.compile: the same gradients from one graph, whatever the number of tokens and documents. test_same_result.py trains with it."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("attention", ["sdpa", "by_document"])
def test_sizes_that_change_compile_nothing_new_and_change_nothing(attention: str, checkpointing: bool) -> None:
    plain, compiled = model_with(attention, checkpointing), model_with(attention, checkpointing)
    compile_layers(compiled, attention, backend="aot_eager")
    for step, lengths in enumerate(LENGTHS):
        (norm, gradients), (expected_norm, expected) = trained_on(compiled, lengths), trained_on(plain, lengths)
        assert norm == pytest.approx(expected_norm.item(), rel=1e-5)
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)
        if step == 0:
            # All layers share what the first one compiled.
            assert 0 < counters["stats"]["unique_graphs"] <= (1 if attention == "sdpa" else 6)
            torch._dynamo.config.error_on_recompile = True
