"""Noise by the document's length, and smoothed labels as transformers has them."""

from math import sqrt
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.trainer_pt_utils import LabelSmoother

from sft.train.regularization import NoisyEmbeddings, smoothed

PACKED: dict[str, Any] = {"input_ids": torch.zeros(1, 40, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4, 40])}
PADDED: dict[str, Any] = {
    "input_ids": torch.zeros(2, 36, dtype=torch.long),
    "attention_mask": torch.tensor([[1] * 4 + [0] * 32, [1] * 36]),
}


@pytest.mark.parametrize(
    ("inputs", "short", "long"), [(PACKED, (0, slice(0, 4)), (0, slice(4, 40))), (PADDED, (0, slice(0, 4)), (1,))]
)
def test_noise_is_as_strong_in_a_pack_as_on_the_document_alone(inputs: dict[str, Any], short: Any, long: Any) -> None:
    embeddings = torch.nn.Embedding(4, 64)
    noise = NoisyEmbeddings(embeddings, alpha=8.0)
    plain = embeddings.eval()(inputs["input_ids"])
    noise.expect(inputs)
    moved = (embeddings.train()(inputs["input_ids"]) - plain).abs()
    for place, length in ((short, 4), (long, 36)):
        bound = 8 / sqrt(length * 64)
        assert 0.9 * bound < moved[place].max() <= bound + 1e-6
        assert moved[place].mean().item() == pytest.approx(bound / 2, rel=0.2)


def test_evaluation_is_without_noise() -> None:
    embeddings = torch.nn.Embedding(4, 64)
    NoisyEmbeddings(embeddings, alpha=8.0)
    embeddings.eval()
    assert torch.equal(embeddings(PACKED["input_ids"]), embeddings.weight[:1].expand(1, 40, -1))


def test_smoothed_labels_give_transformers_loss_and_gradients() -> None:
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    tokens = torch.arange(24).view(2, 12)
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    outputs = smoothed(model, inputs, 0.2)
    count = int((labels[:, 1:] != -100).sum())
    assert outputs.label_mask.sum() == count
    ours = -outputs.log_probs.sum() / count
    theirs = LabelSmoother(0.2)(model(tokens), labels, shift_labels=True)
    torch.testing.assert_close(ours, theirs)
    weight = model.model.embed_tokens.weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, theirs)))
