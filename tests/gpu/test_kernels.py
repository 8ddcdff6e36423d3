"""Attention, optimizer and losses with the kernels that only a GPU has: `bash scripts/test.sh --gpu`."""

import math

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sft.model.attention import NAME, register
from sft.parallel.optimizer import MasterAdamW

DEVICE = "cuda"
LENGTHS = (5, 130, 1, 64, 300)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def model(kind: str) -> torch.nn.Module:
    register()
    torch.manual_seed(0)
    if kind == "mistral":  # the window is shorter than two of the documents
        made = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=48, attn_implementation="sdpa"))
    else:
        made = Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation="sdpa"))
    return made.to(DEVICE, torch.bfloat16)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator).to(DEVICE) for length in LENGTHS]


def packed_logits(network: torch.nn.Module, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each document, from one row that holds them all; as TRL's collator describes it."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)
    network.set_attn_implementation(NAME)
    logits = network(
        input_ids=torch.cat(parts)[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]).to(DEVICE)[None],
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=max(LENGTHS),
        max_length_k=max(LENGTHS),
    ).logits[0]
    return list(logits.split(LENGTHS))


def separate_logits(network: torch.nn.Module, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    network.set_attn_implementation("sdpa")
    return [network(input_ids=part[None], use_cache=False).logits[0] for part in parts]


def gradient(network: torch.nn.Module, logits: list[torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
    """Of the loss over all documents, one vector in fp64."""
    network.zero_grad()
    predictions = torch.cat([one[:-1] for one in logits]).float()
    torch.nn.functional.cross_entropy(predictions, torch.cat([part[1:] for part in parts])).backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in network.parameters()])


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_document_does_not_move_when_another_one_changes(kind: str) -> None:
    network, parts = model(kind), documents()
    with torch.no_grad():
        before = packed_logits(network, parts)
        parts[1] = (parts[1] + 7) % SIZES["vocab_size"]
        after = packed_logits(network, parts)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        moved = float((one - other).abs().max())
        assert moved > 0.1 if number == 1 else moved <= 1e-2, f"document {number} moved by {moved}"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_packed_has_the_gradient_of_separate(kind: str, checkpointing: bool) -> None:
    network, parts = model(kind), documents()
    if checkpointing:
        network.train()
        enable = "activation_checkpointing_enable"  # its name from transformers 5.23 on
        getattr(network, enable, network.gradient_checkpointing_enable)({"use_reentrant": False})
    separate = gradient(network, separate_logits(network, parts), parts)
    packed = gradient(network, packed_logits(network, parts), parts)
    assert float(torch.nn.functional.cosine_similarity(packed, separate, dim=0)) > 0.999
    assert float(packed.norm() / separate.norm()) == pytest.approx(1.0, abs=5e-3)


def flat_sizes() -> list[int]:
    """Lengths around the chunks of 65,536 that fused kernels work in; the last beyond what an int32 counts, where it fits."""
    sizes = [1, 7, 65_535, 65_537, 3 * 65_536 + 5, 2**24 + 3]
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return sizes + ([2**31 + 9] if free > 60 * 2**30 else [])


def test_the_fused_optimizer_updates_a_flat_buffer_to_its_end() -> None:
    for size in flat_sizes():
        flat = torch.nn.Parameter(torch.zeros(size, device=DEVICE))
        optimizer = torch.optim.AdamW([flat], lr=0.1, weight_decay=0.0, fused=True)
        flat.grad = torch.ones_like(flat)
        optimizer.step()
        # The first step of Adam is the learning rate, whatever the gradient.
        ends = torch.cat([flat.detach()[:3], flat.detach()[size // 2 : size // 2 + 3], flat.detach()[-70_000:]])
        assert float(ends.max()) == pytest.approx(-0.1, rel=1e-4), f"{size} elements"
        assert float(ends.min()) == pytest.approx(-0.1, rel=1e-4), f"{size} elements"


@pytest.mark.parametrize("accumulate_in_fp32", [False, True])
def test_bf16_weights_take_updates_that_their_own_rounding_would_lose(accumulate_in_fp32: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(65_537, device=DEVICE, dtype=torch.bfloat16))
    optimizer = MasterAdamW([{"params": [weight], "weight_decay": 0.0}], accumulate_in_fp32, lr=1e-3, betas=(0.9, 0.95))
    for _ in range(10):
        (weight * 1.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight.grad = None
    # Ten steps of 1e-3, each a quarter of what separates bf16's numbers below one.
    assert float(weight.detach().max()) == pytest.approx(0.99, abs=4e-3)
    assert float(weight.detach().min()) == pytest.approx(0.99, abs=4e-3)


def test_liger_is_in_each_layer() -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.models.qwen2 import modeling_qwen2

    rotary = modeling_qwen2.apply_rotary_pos_emb
    network, parts = model("qwen2"), documents()
    try:
        with torch.no_grad():
            plain = separate_logits(network, parts)
        _apply_liger_kernel_to_instance(network, fused_linear_cross_entropy=False, cross_entropy=False)
        swapped = [network.model.norm]
        for layer in network.model.layers:
            swapped += [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]
        assert all(module.forward.__module__.startswith("liger_kernel") for module in swapped)
        assert modeling_qwen2.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
        with torch.no_grad():
            fused = separate_logits(network, parts)
    finally:
        modeling_qwen2.apply_rotary_pos_emb = rotary
    for one, other in zip(fused, plain, strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 2e-2


def test_the_loss_heads_agree_in_loss_and_gradients() -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from trl.trainer.utils import add_fused_lm_head

    network, part = model("qwen2"), documents()[4]
    labels = part.clone()
    labels[:100] = -100
    plain = separate_logits(network, [part])[0][:-1]
    found = {"plain": _loss_and_gradient(network, torch.nn.functional.cross_entropy(plain.float(), labels[1:]))}
    states = network.model(input_ids=part[None], use_cache=False).last_hidden_state[0, :-1]
    liger = LigerFusedLinearCrossEntropyLoss()(network.lm_head.weight, states, labels[1:])
    found["liger"] = _loss_and_gradient(network, liger)
    add_fused_lm_head(network)
    trl = network(input_ids=part[None], labels=labels[None], fused_lm_head=True).loss
    found["trl"] = _loss_and_gradient(network, trl)
    loss, expected = found["plain"]
    assert math.isfinite(loss)
    for name, (other, computed) in found.items():
        assert other == pytest.approx(loss, rel=2e-3), name
        assert float(torch.nn.functional.cosine_similarity(computed, expected, dim=0)) > 0.999, name


def _loss_and_gradient(network: torch.nn.Module, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    network.zero_grad()
    loss.backward()
    return float(loss.detach()), torch.cat([one.grad.flatten().double() for one in network.parameters()])
