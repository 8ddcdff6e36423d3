"""Optimizers of ours and what they are built of: arithmetic by hand, and which weight goes where."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from sft.train.optimizers import Lion, MuonAdamW, muon_groups


def test_lion_moves_by_the_sign_of_its_average() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    lion = Lion([{"params": [weight], "weight_decay": 0.1}], lr=0.5, betas=(0.9, 0.8))
    expected, average = weight.detach().clone(), torch.zeros(3)
    for gradient in ([1.0, -4.0, 0.0], [-0.5, 0.1, 2.0]):
        weight.grad = torch.tensor(gradient)
        lion.step()
        expected = expected * (1 - 0.5 * 0.1) - 0.5 * (0.9 * average + 0.1 * weight.grad).sign()
        average = 0.8 * average + 0.2 * weight.grad
        torch.testing.assert_close(weight.detach(), expected)
    assert set(lion.state[weight]) == {"exp_avg"}


def test_lion_passes_over_weights_without_gradients() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    lion = Lion(weights, lr=0.5, betas=(0.9, 0.99), weight_decay=0.1)
    weights[0].grad = torch.ones(2)
    lion.step()
    assert weights[1].tolist() == [1, 1] and weights[0].tolist() == pytest.approx([0.45, 0.45])


@pytest.fixture
def model() -> torch.nn.Module:
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest(model: torch.nn.Module) -> None:
    decayed = {name for name, weight in model.named_parameters() if weight.ndim == 2}
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = {
        (group["use_muon"], "weight_decay" in group): {names[id(weight)] for weight in group["params"]}
        for group in muon_groups(model, decayed)
    }
    assert found.keys() == {(True, False), (False, False), (False, True)}
    assert found[True, False] == {name for name in decayed if "proj" in name}
    assert found[False, False] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert found[False, True] == {name for name in names.values() if "norm" in name or "bias" in name}


def test_muon_with_adamw_steps_as_the_two_alone_also_after_loading(model: torch.nn.Module) -> None:
    decayed = {name for name, weight in model.named_parameters() if weight.ndim == 2}
    other = copy.deepcopy(model)
    muon = {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    both = MuonAdamW(muon_groups(model, decayed), 1e-2, muon, adamw)
    groups = muon_groups(other, decayed)
    alone = [
        torch.optim.Muon([group for group in groups if group["use_muon"]], lr=1e-2, **muon),
        torch.optim.AdamW([group for group in groups if not group["use_muon"]], lr=1e-2, fused=True, **adamw),
    ]
    tokens = torch.arange(32).view(2, 16)
    for step in range(3):
        for one in (model, other):
            one.zero_grad()
            one(tokens, labels=tokens).loss.backward()
        if step == 2:  # as a resumed run begins
            state, fresh = both.state_dict(), MuonAdamW(muon_groups(model, decayed), 1e-2, muon, adamw)
            fresh.load_state_dict(state)
            both = fresh
        both.step()
        for optimizer in alone:
            optimizer.step()
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected)
