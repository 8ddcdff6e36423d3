"""Extended positions: the configuration that is saved, and the frequencies that turn."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, Qwen2Config

from sft.errors import ModelError
from sft.model.rope import planned_rope, running_rope, scale_positions
from sft.recipe.schema import RopeScaling

YARN = RopeScaling(rope_type="yarn", factor=4.0)
LLAMA3 = RopeScaling(
    rope_type="llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
)


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "limit"), [(YARN, 256), (RopeScaling(rope_type="linear", factor=2.0), 128), (LLAMA3, 128)]
)
def test_the_scaling_is_in_the_configuration_and_in_the_layers(rope: RopeScaling, limit: int) -> None:
    scaled = scale_positions(config(), rope)
    assert scaled.max_position_embeddings == limit
    assert scaled.rope_parameters["rope_theta"] == 5000.0
    model, plain = (AutoModelForCausalLM.from_config(one) for one in (scaled, config()))
    assert running_rope(model) == planned_rope(rope)
    assert not torch.allclose(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    model.model.rotary_emb.inv_freq.copy_(plain.model.rotary_emb.inv_freq)
    assert "other frequencies" in running_rope(model)
    assert running_rope(plain) != planned_rope(rope)


def test_a_class_that_replaces_the_scaling_is_refused() -> None:
    """Phi-3 keeps the original positions elsewhere, which win."""
    own = Phi3Config(max_position_embeddings=4096, original_max_position_embeddings=4096)
    with pytest.raises(ModelError, match=r"rope_parameters in the model's config.json"):
        scale_positions(own, YARN.model_copy(update={"original_max_position_embeddings": 2048}))
