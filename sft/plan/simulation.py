"""Simulates a forward and backward pass on a model without values, and counts the memory that it takes.

Weights and activations are on torch's meta device: they have shapes and dtypes, and no values, so that all layers pass in seconds. What is
one kernel on a GPU, or looks at values, is a substitute here that keeps and allocates what the kernel does: SUBSTITUTES of memory.py.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any
from warnings import catch_warnings

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from sft.plan.layers import HEAD_TILE
from sft.plan.memory_estimate import Pass, PassMemory
from sft.recipe.schema import Lora

_NAME = "simulated"


class _Live(TorchDispatchMode):
    """Adds up the storages that operators make, for as long as they live."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self._known = {one.untyped_storage()._cdata for one in known}

    def leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a storage no longer, which the caller keeps."""
        key = tensor.untyped_storage()._cdata
        self._known.add(key)
        self.now -= self.sizes.pop(key, 0)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # transformers looks whether a row is one document
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.sizes and key not in self._known:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)
        self._known.discard(key)


class _Autocast(TorchFunctionMode):
    """Multiplies matrices in half precision, as torch.autocast does not on meta. Copies of weights are counted among the weights."""

    def __init__(self, dtype: torch.dtype, live: _Live) -> None:
        super().__init__()
        self._dtype, self._live, self._copies = dtype, live, dict[int, torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.linear, torch.matmul):
            args = tuple(self._cast(one) if isinstance(one, torch.Tensor) else one for one in args)
        return func(*args, **(kwargs or {}))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            return tensor.to(self._dtype)
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = self._live.leave_out(tensor.to(self._dtype))
        return self._copies[id(tensor)]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)  # which torch does not type


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
        output = value.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1])
        context.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        query, key, value = context.saved_tensors[:3]
        found = [torch.empty_like(one) for one in (query, key, value)]
        # Sums in fp32, and grouped heads one by one.
        working = [torch.empty_like(query, dtype=torch.float32)]
        if key.shape[1] != query.shape[1]:
            working += [torch.empty_like(query), torch.empty_like(query)]
        return tuple(found)


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return _apply(_Attention, query.to(value.dtype), key.to(value.dtype), value), None


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Any, weight: Any, dtype: Any, all_logits: bool) -> Any:
        context.save_for_backward(hidden, weight)
        tokens, words = len(hidden), len(weight)
        context.tile, context.dtype = (min(tokens, HEAD_TILE[0]), HEAD_TILE[1]), dtype
        working = _tile(context, hidden, weight[: HEAD_TILE[1]])
        if all_logits:  # as they are, and three times in fp32: copy, log_softmax, gradient
            working = (
                hidden.new_empty(tokens, words, dtype=dtype),
                hidden.new_empty(3, tokens, words, dtype=torch.float32),
            )
        del working
        return hidden.new_empty(tokens, dtype=torch.float32)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        hidden, weight = context.saved_tensors
        sums = [torch.empty_like(one, dtype=torch.float32) if one.requires_grad else None for one in (hidden, weight)]
        tile = _tile(context, hidden, weight[: 2 * HEAD_TILE[1]])  # a chunk is let go when the next is there
        found = [None if one is None else one.to(like.dtype) for one, like in zip(sums, (hidden, weight), strict=True)]
        del tile
        return *found, None, None


def _tile(context: Any, hidden: Any, weight: Any) -> Any:
    """Of logits, and what they are products of where that is cast."""
    cast = hidden[: HEAD_TILE[0]].to(context.dtype), weight.to(context.dtype)
    return hidden.new_empty(context.tile, dtype=context.dtype), cast


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Any, weight: Any) -> Any:
        context.save_for_backward(states, weight, states.new_empty(states.shape[:-1], dtype=torch.float32))
        return torch.empty_like(states)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient, torch.empty_like(context.saved_tensors[1])


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Any, up: Any) -> Any:
        context.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return context.saved_tensors


@contextmanager
def _liger(model: Any) -> Iterator[None]:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(lambda norm, states: _apply(_Norm, states, norm.weight), module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            module.forward = MethodType(
                lambda mlp, states: mlp.down_proj(_apply(_Gated, mlp.gate_proj(states), mlp.up_proj(states))), module
            )
    code, name = sys.modules[type(model).__module__], "apply_rotary_pos_emb"
    plain = getattr(code, name, None)
    setattr(code, name, lambda query, key, *rest, **options: (query, key))  # in place
    try:
        yield
    finally:
        setattr(code, name, plain)


def _add_adapters(model: Any, lora: Lora, in_fp32: bool) -> None:
    from peft import LoraConfig, get_peft_model

    names: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    arguments = {
        "r": lora.r,
        "rank_pattern": dict(lora.rank_pattern),
        "use_dora": lora.use_dora,
        "lora_dropout": lora.lora_dropout,
    }
    whole = list(lora.modules_to_save) or None
    config = LoraConfig(target_modules=names, modules_to_save=whole, task_type="CAUSAL_LM", **arguments)
    with catch_warnings(action="ignore"):  # of transformers, about names that peft still uses
        get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in model.parameters() if in_fp32 else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _prepare(config: Any, wanted: Pass) -> Any:
    """The empty model as it trains: its adapters, what is frozen, and which layers recompute."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    config = deepcopy(config)
    if wanted.tensor_parallel_size > 1:
        text = config.get_text_config()
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            setattr(text, name, getattr(text, name) // wanted.tensor_parallel_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, wanted.dtype),
            attn_implementation="eager" if wanted.eager else _NAME,
            trust_remote_code=False,
        ).train()
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in wanted.freeze):
            parameter.requires_grad_(False)
    if wanted.lora is not None:
        _add_adapters(model, wanted.lora, wanted.autocast is not None)
    return model


def _recompute(model: Any, every: int, mode: Any) -> None:
    """Have every n-th layer recompute, in a mode that autograd does not carry into its pass."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers, "no layer recomputes by itself"
    for layer in layers[::every]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), mode)
        )


def simulate(config: Any, wanted: Pass) -> PassMemory:
    """Pass once over a model of this configuration; whatever its code raises where it looks at values goes through."""
    model = _prepare(config, wanted)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if wanted.fp32_gradients and parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
    live = _Live([*model.parameters(), *model.buffers(), *(one.grad for one in trained if one.grad is not None)])
    dtype = getattr(torch, wanted.autocast or wanted.dtype)
    autocast: Any = _Autocast(dtype, live) if wanted.autocast else nullcontext()
    if wanted.recompute_every:
        _recompute(model, wanted.recompute_every, autocast)
    ids = torch.zeros(1, wanted.tokens, dtype=torch.long, device="meta")
    with live, _liger(model) if wanted.liger else nullcontext(), autocast:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        kept = live.now
        # Of the tokens that are trained the head takes a copy: at most of all.
        loss = _apply(_Head, hidden[0].clone(), model.get_output_embeddings().weight, dtype, wanted.all_logits).sum()
        del hidden
        loss.backward()
        del loss
    return PassMemory(kept, live.peak, sum(parameter.numel() for parameter in trained))
