"""Stages of a model against the unsplit model, in one process; ranks that send to each other: tests/slow."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from sft.errors import ModelError
from sft.parallel.pipeline import Part, take_stage
from sft.plan.pipeline import TYPES, split_layers

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
OF_TYPE: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "mistral": {"sliding_window": 4},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
}


def small(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | OF_TYPE.get(kind, {}) | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch(packed: bool) -> dict[str, Any]:
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    if packed:
        return {"input_ids": ids.reshape(1, 18), "position_ids": torch.tensor([[*range(7), *range(11)]])}
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def parts(model: Any, count: int) -> list[Part]:
    stages, found = split_layers(4, count), []
    for index in range(count):
        one = deepcopy(model)
        take_stage(one, stages, index)
        found.append(Part(one, stages, index))
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_stages_compute_what_the_unsplit_model_does(kind: str, packed: bool) -> None:
    """Logits and gradients, of every type that the plan lets through."""
    whole, inputs = small(kind), batch(packed)
    logits = whole(**inputs, use_cache=False).logits
    logits.square().mean().backward()
    found, states, hidden = parts(whole, 3), [], None
    for part in found[:-1]:
        hidden = part.layers(hidden, inputs)
        states.append(hidden)
        hidden = hidden.detach().requires_grad_()
        states.append(hidden)
    last = found[-1].model(**found[-1].arrived(hidden, inputs), use_cache=False).logits
    torch.testing.assert_close(last, logits)
    last.square().mean().backward()
    for sent, arrived in reversed(list(zip(states[::2], states[1::2], strict=True))):
        sent.backward(arrived.grad)
    names: dict[str, Any] = {}
    for part in found:
        for name, one in part.model.named_parameters():
            names[name] = names.get(name, 0) + one.grad  # of a tied embedding there are two
    assert names.keys() == dict(whole.named_parameters()).keys()
    for name, one in whole.named_parameters():
        torch.testing.assert_close(names[name], one.grad, msg=name)


def test_a_model_whose_layers_are_elsewhere_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(ModelError, match=r"pipeline_parallel_size=2: GPT2LMHeadModel"):
        take_stage(model, split_layers(2, 2), 0)


def test_hidden_states_that_the_next_stage_would_not_expect_are_refused() -> None:
    first = parts(small("llama"), 2)[0]
    first.dtype = torch.bfloat16
    with pytest.raises(ModelError, match=r"stage 1 gives torch.float32 \[2, 9, 32\] and not torch.bfloat16"):
        first.layers(None, batch(False))
