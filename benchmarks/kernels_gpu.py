"""Which kernels are worth it on this GPU: grouped attention, loss heads, Liger's layers?

    python benchmarks/kernels_gpu.py
    python benchmarks/kernels_gpu.py --cpu     # the parity that a CPU can show, and no speed

Shapes are Qwen2.5-3B's, one pack of 16,384 tokens. Each comparison first asserts that outputs and gradients of both sides agree;
then both are timed in turn, round by round, forward and backward, by the GPU's own clock:

- attention within documents: key and value heads grouped, against the same kernel over heads repeated for each query head
- loss: TRL's fused head and Liger's fused linear cross-entropy, against plain logits and cross-entropy; two fifths of tokens masked
- one decoder layer with Liger's RMSNorm, RoPE and SwiGLU, against without
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from machine import described
from side_by_side import ROOT, show, turned
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(ROOT))

Side = Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""Computes an output and what has gradients; timed with its backward pass."""


def main() -> None:
    arguments = read_arguments()
    if not arguments.cpu and not torch.cuda.is_available():
        print("kernels_gpu.py needs an NVIDIA GPU, and torch sees none. --cpu checks what a CPU can.")
        raise SystemExit(2)
    device = "cpu" if arguments.cpu else "cuda"
    torch.manual_seed(0)
    tokens, scale = (512, 16) if arguments.cpu else (16384, 1)
    for title, sides, reference in (
        attention_sides(device, tokens, scale),
        loss_sides(device, tokens, scale),
        layer_sides(device, tokens, scale),
    ):
        check_parity(title, sides, reference)
        if device == "cuda":
            measure(title, sides, reference, arguments.rounds)
        # The next needs the memory.
        sides.clear()
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU: parity alone, no speed"
    print(name, described(["torch", "transformers", "trl", "liger-kernel"]), sep=", ")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="parity in fp32 on small shapes")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


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


def check_parity(title: str, sides: dict[str, Side], reference: str) -> None:
    """Refuse to go on where a side's output or a gradient is another than the reference's."""
    output, expected = gradients(sides[reference])
    # bf16 keeps three digits; sums over many tokens in another order, a little less.
    allowed = 2e-2 if output.device.type == "cuda" else 1e-5
    for name, side in sides.items():
        found, computed = gradients(side)
        # All gradients as one: the bias of a key nearly cancels, and by itself is mostly rounding.
        pairs = [(found, output), (joined(computed), joined(expected))]
        apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        if not apart <= allowed:
            print(f"{title}: {name} differs from {reference} by {apart:.1e}: no speed is shown.")
            raise SystemExit(1)
        if name != reference:
            print(f"{title}: same output and gradients, {name} and {reference} agree to {apart:.1e}", flush=True)


def measure(title: str, sides: dict[str, Side], reference: str, rounds: int) -> None:
    """Print milliseconds of each side, forward and backward, and the memory at its peak."""
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for number in range(-3, rounds):  # the first three warm up
        for name in turned(list(sides), number + 3):
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            output, inputs = sides[name]()
            torch.autograd.grad(output, inputs, torch.ones_like(output))
            end.record()
            torch.cuda.synchronize()
            memory[name] = torch.cuda.max_memory_allocated() / 2**30
            del output
            if number >= 0:
                times.setdefault(name, []).append(start.elapsed_time(end))
    show(title, times, reference, "ms")
    print("peak memory: " + ", ".join(f"{name} {peak:.2f} GiB" for name, peak in memory.items()))


if __name__ == "__main__":
    main()
