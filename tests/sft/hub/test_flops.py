"""The FLOPs of a step against hand arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from sft.hub.flops import (
    AttentionLayers,
    Matmuls,
    ModelFlops,
    attention_area,
    attention_layers,
    matmul_weights,
    model_flops,
)

# transformers 5.23 renames what peft 0.21 still asks for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QKVO = 32 * 32 * 2 + 2 * 32 * 16
MLP = 3 * 32 * 64
BODY, HEAD = 3 * (QKVO + MLP), 100 * 32


def model_of(config: Any) -> Any:
    """Without memory for its weights, which are not needed."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_step_of_a_model_of_3b_counts_body_head_and_attention() -> None:
    """Qwen2.5-3B, all weights trained, a step of 64 documents of 1,000 tokens with 400 labels each."""
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "vocab_size": 151936}
    config = Qwen2Config(**sizes, num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True)
    flops = model_flops(model_of(config))
    assert flops is not None
    layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 11008
    assert layer == 77_070_336
    assert flops.matmuls == Matmuls(trained=36 * layer, head_trained=151936 * 2048)
    assert flops.attention == (AttentionLayers(36, 2048),)
    body = 6 * 2_774_532_096 * 64_000
    head = 6 * 311_164_928 * 25_600
    attention = 6 * 36 * 2048 * 64 * 1000**2
    assert (body, head, attention) == (1_065_420_324_864_000, 47_794_932_940_800, 28_311_552_000_000)
    found = flops.of(np.full(64, 1000), 64 * 400)
    assert found == body + head + attention


@pytest.mark.parametrize("tied", [True, False])
def test_the_input_embedding_counts_nothing_and_the_head_once(tied: bool) -> None:
    weights = matmul_weights(model_of(Qwen2Config(**SMALL, tie_word_embeddings=tied)))
    assert weights == Matmuls(trained=BODY, head_trained=HEAD)


def test_frozen_weights_take_four_flops_and_adapters_six() -> None:
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    weights = matmul_weights(get_peft_model(model_of(LlamaConfig(**SMALL)), lora))
    # Of each layer in x out, an adapter has r x (in + out).
    adapters = 3 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert weights == Matmuls(trained=adapters, frozen=BODY, head_frozen=HEAD)
    flops = ModelFlops(weights, ()).of(np.array([10, 20]), 7)
    assert flops == 30 * (6 * adapters + 4 * BODY) + 7 * 4 * HEAD


def test_of_experts_those_that_a_token_is_routed_to_count() -> None:
    config = Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    router, expert = 4 * 32, 3 * 32 * 16
    assert matmul_weights(model_of(config)) == Matmuls(trained=3 * (QKVO + router + 2 * expert), head_trained=HEAD)


@pytest.mark.parametrize("length", [5, 40])
def test_a_window_takes_its_band(length: int) -> None:
    window = 6
    pairs = sum(min(place, window) for place in range(1, length + 1))
    # The diagonal counts half, as in half of the square.
    assert attention_area(np.array([length]), window) == pairs - min(length, window) / 2
    assert attention_area(np.array([length])) == length**2 / 2


def test_layers_have_the_windows_of_the_configuration() -> None:
    assert attention_layers(LlamaConfig(**SMALL)) == (AttentionLayers(3, 32),)
    assert attention_layers(MistralConfig(**SMALL, sliding_window=7)) == (AttentionLayers(3, 32, 7),)
    half = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    assert attention_layers(half) == (AttentionLayers(2, 32), AttentionLayers(1, 32, 5))
    gemma = Gemma3TextConfig(**SMALL | {"num_hidden_layers": 6}, head_dim=16, sliding_window=9)
    assert attention_layers(gemma) == (AttentionLayers(5, 64, 9), AttentionLayers(1, 64))


def test_what_the_formula_does_not_hold_for_is_not_known() -> None:
    state_space = MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2)
    assert attention_layers(state_space) is None
    assert model_flops(model_of(state_space)) is None
    sizes = Gemma4TextConfig(**SMALL, head_dim=16, global_head_dim=32, num_global_key_value_heads=1)
    assert attention_layers(sizes) is None  # full attention has larger heads than windows have
    linear = Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "linear_attention", "full_attention"])
    assert attention_layers(linear) is None
