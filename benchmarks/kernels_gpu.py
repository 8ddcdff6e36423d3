"""Which kernels are worth it on this GPU: grouped attention, loss heads, Liger's layers? `python benchmarks/gpu.py --parts kernels`.

Shapes are Qwen2.5-3B's, one pack of 16,384 tokens. Each comparison first asserts that outputs and gradients of both sides agree;
then both are timed in turn, round by round, forward and backward, by the GPU's own clock. A CPU shows small shapes in fp32, and no speed.

- attention within documents: key and value heads grouped, against the same kernel over heads repeated for each query head
- loss: TRL's fused head and Liger's fused linear cross-entropy, against plain logits and cross-entropy; two fifths of tokens masked
- one decoder layer with Liger's RMSNorm, RoPE and SwiGLU, against without
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from side_by_side import turned
from torch.nn.functional import cross_entropy

Side = Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""Computes an output and what has gradients; timed with its backward pass."""


def rows(device: str, rounds: int = 20) -> Iterator[dict[str, Any]]:
    """Of each side of each comparison: how far it is from the reference, milliseconds, ratio to the reference, and peak memory.

    Raises SystemExit at the end where a side computes something else; of that comparison no speed is shown.
    """
    torch.manual_seed(0)
    tokens, scale = (512, 16) if device == "cpu" else (16384, 1)
    differing = []
    for make in (attention_sides, loss_sides, layer_sides):
        title, sides, reference = make(device, tokens, scale)
        apart = distances(sides, reference)
        # bf16 keeps three digits; sums over many tokens in another order, a little less.
        wrong = [name for name in sides if not apart[name] <= (2e-2 if device == "cuda" else 1e-5)]
        measured = measure(sides, reference, rounds) if device == "cuda" and not wrong else {}
        for name in sides:
            yield {"what": f"{title}: {name}", "apart": apart[name] if name != reference else None} | measured.get(
                name, {}
            )
        differing += [f"{title}: {name} differs from {reference} by {apart[name]:.1e}" for name in wrong]
        sides.clear()  # the next needs the memory
    if differing:
        raise SystemExit("; ".join(differing))


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def random(*shape: int, device: str, gradient: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype_of(device)).requires_grad_(gradient)


def boundaries(tokens: int, device: str) -> tuple[torch.Tensor, int]:
    """Documents of lognormal lengths, from their first tokens to the last."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(max(1, int(torch.empty(1).log_normal_(5.5 if tokens > 1000 else 3.0, 1.0))))
    lengths[-1] -= sum(lengths) - tokens
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device=device, dtype=torch.int32), max(lengths)


def attention_sides(device: str, tokens: int, scale: int) -> tuple[str, dict[str, Side], str]:
    from sft.model.attention import document_attention

    heads, kv_heads, head_dim = 16, 2, 128 // scale
    query = random(1, heads, tokens, head_dim, device=device)
    key, value = (random(1, kv_heads, tokens, head_dim, device=device) for _ in range(2))
    starts, longest = boundaries(tokens, device)
    module = torch.nn.Module()

    def attend(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        output, _ = document_attention(module, query, key, value, None, cu_seq_lens_q=starts, max_length_q=longest)
        return output, inputs

    inputs = (query, key, value)
    repeat = heads // kv_heads
    sides: dict[str, Side] = {
        "heads grouped": lambda: attend(key, value),
        "heads repeated": lambda: attend(*(kept.repeat_interleave(repeat, dim=1) for kept in (key, value))),
    }
    return f"attention within documents, {tokens} tokens", sides, "heads repeated"


def loss_sides(device: str, tokens: int, scale: int) -> tuple[str, dict[str, Side], str]:
    from trl.trainer import utils as trl_utils

    hidden, vocabulary = 2048 // scale, 151936 // (scale * scale)
    states = random(tokens, hidden, device=device)
    weight = (torch.randn(vocabulary, hidden, device=device) * 0.02).to(dtype_of(device)).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    labels[torch.rand(tokens, device=device) < 0.4] = -100
    labelled = labels != -100

    def fused() -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        # As its forward is called by trl.trainer.utils.add_fused_lm_head.
        tile = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
        found = trl_utils._ChunkedLogProbFunction.apply(
            states[labelled], weight, None, labels[labelled], 1.0, tile, None, 1.0, ("log_probs",)
        )
        return -found[0].mean(), (states, weight)

    sides: dict[str, Side] = {
        "TRL's fused head": fused,
        "logits and cross-entropy": lambda: (cross_entropy((states @ weight.T).float(), labels), (states, weight)),
    }
    if device == "cuda":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        sides["Liger's fused cross-entropy"] = lambda: (liger(weight, states, labels), (states, weight))
        sides["Liger's, labelled tokens only"] = lambda: (
            liger(weight, states[labelled], labels[labelled]),
            (states, weight),
        )
    return f"loss, {tokens} tokens x {vocabulary}", sides, "logits and cross-entropy"


def layer_sides(device: str, tokens: int, scale: int) -> tuple[str, dict[str, Side], str]:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2 import modeling_qwen2

    from sft.model.attention import NAME, register

    register()
    config = Qwen2Config(
        vocab_size=64, hidden_size=2048 // scale, intermediate_size=11008 // scale, num_hidden_layers=1,
        num_attention_heads=16, num_key_value_heads=2, attn_implementation=NAME, max_position_embeddings=tokens,
    )  # fmt: skip
    plain = Qwen2ForCausalLM(config).to(device, dtype_of(device))
    models: dict[str, Any] = {"plain layer": plain}
    # Liger replaces the rotary embedding in the module, for every model of the process: each side is given its own.
    rotary = {"plain layer": modeling_qwen2.apply_rotary_pos_emb}
    if device == "cuda":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        models["Liger's layer"] = copy.deepcopy(plain)
        _apply_liger_kernel_to_instance(models["Liger's layer"], fused_linear_cross_entropy=False, cross_entropy=False)
        rotary["Liger's layer"] = modeling_qwen2.apply_rotary_pos_emb
    ids = torch.randint(64, (1, tokens), device=device)
    starts, longest = boundaries(tokens, device)
    within = [torch.arange(int(n), device=device) for n in starts.diff()]
    arguments = {"input_ids": ids, "position_ids": torch.cat(within)[None], "use_cache": False}
    arguments |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}

    def forward(name: str) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        model, modeling_qwen2.apply_rotary_pos_emb = models[name], rotary[name]
        return model.model(**arguments).last_hidden_state, list(model.model.layers.parameters())

    sides: dict[str, Side] = {name: (lambda name=name: forward(name)) for name in models}
    return f"one decoder layer, {tokens} tokens", sides, "plain layer"


def gradients(side: Side) -> tuple[torch.Tensor, list[torch.Tensor]]:
    output, inputs = side()
    generator = torch.Generator(output.device).manual_seed(1)
    given = torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)
    return output.detach(), list(torch.autograd.grad(output, inputs, given if output.dim() else None))


def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def distances(sides: dict[str, Side], reference: str) -> dict[str, float]:
    """How far each side's output or gradients are from the reference's, relative to their length; the larger of the two."""
    output, expected = gradients(sides[reference])
    found = {}
    for name, side in sides.items():
        other, computed = gradients(side)
        # All gradients as one: the bias of a key nearly cancels, and by itself is mostly rounding.
        pairs = [(other, output), (joined(computed), joined(expected))]
        found[name] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    return found


def measure(sides: dict[str, Side], reference: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each side, forward and backward, the reference's in relation to them, and the memory at its peak."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, float] = {}
    for number in range(rounds + 3):  # the first three warm up
        for name in turned(list(sides), number):
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            output, inputs = sides[name]()
            torch.autograd.grad(output, inputs, torch.ones_like(output))
            end.record()
            torch.cuda.synchronize()
            memory[name] = torch.cuda.max_memory_allocated() / 2**30
            del output
            times[name].append(start.elapsed_time(end))
    middle = {name: median(found[3:]) for name, found in times.items()}
    return {
        name: {"milliseconds": middle[name], "ratio": middle[reference] / middle[name], "peak_gib": memory[name]}
        for name in sides
    }
