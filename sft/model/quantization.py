"""Quantizes a frozen base while it loads, reads back what was quantized, and dequantizes it for final/. The work is bitsandbytes'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from sft.hub.flops import full_shape
from sft.model.weight_checks import DTYPES
from sft.plan.job import Job
from sft.plan.precision import quant_storage
from sft.recipe.schema import Model

LAYERS = ("Linear4bit", "Linear8bitLt")
_SAYS_QUANTIZED = ("is_loaded_in_4bit", "is_loaded_in_8bit")


def quantization_config(model: Model, compute: torch.dtype, storage: torch.dtype) -> Any:
    """transformers' description of the recipe's quantization; None without one.

    Args:
        model: The recipe's section.
        compute: What the layers compute in.
        storage: Of the tensors that hold 4-bit weights.
    """
    if model.quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    if model.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model.quantization,
        bnb_4bit_use_double_quant=model.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
    )


def quantized_layers(model: Any) -> list[tuple[str, Any]]:
    """The layers whose weights are quantized, by name."""
    return [(name, layer) for name, layer in model.named_modules() if is_quantized(layer)]


def is_quantized(layer: Any) -> bool:
    """Whether it is one of bitsandbytes' layers, without adapters around it."""
    return type(layer).__name__ in LAYERS and not hasattr(layer, "base_layer")


def keep_training_arithmetic(model: Any) -> None:
    """Make layers on a CPU compute the same in evaluation as in training.

    In evaluation bitsandbytes rounds the scales of 4-bit weights to bf16, for good, and computes without gradients from then on; its int8
    layers round what goes in to 8 bits, which they do not in training.
    """
    for _, layer in quantized_layers(model):
        if type(layer).__name__ == "Linear4bit":
            layer.support_avx512bf16_for_cpu = False
        elif layer.weight.device.type == "cpu":
            layer.training = True
            layer.train = lambda mode=True, layer=layer: layer


def numels(model: Any) -> dict[str, int]:
    """Elements of each parameter by name, before quantization and sharding."""
    whole = {f"{name}.weight".lstrip("."): prod(full_shape(layer, "weight")) for name, layer in quantized_layers(model)}
    return {
        name: whole.get(name, int(getattr(parameter, "ds_numel", parameter.numel())))
        for name, parameter in model.named_parameters()
    }


def dequantize(model: Any, dtype: torch.dtype) -> Any:
    """The model with plain layers on the CPU in place of quantized ones; layer by layer, so that a GPU never holds it dequantized."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight
    from transformers.pytorch_utils import Conv1D

    for name, layer in quantized_layers(model):
        weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None)).to("cpu", dtype)
        with torch.device("meta"):
            if layer.source_cls is Conv1D:  # stored transposed
                plain, weight = Conv1D(layer.out_features, layer.in_features), weight.T
            else:
                plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight, plain.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
        model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    for name in _SAYS_QUANTIZED:
        vars(model).pop(name, None)
    return model.to("cpu")


@contextmanager
def adapters_stay_fp32(model: Any) -> Iterator[None]:
    """While a trainer is built: TRL rounds the adapters of a model that says it is quantized to bf16, and AdamW would step on those."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    said = {name: getattr(base, name) for name in _SAYS_QUANTIZED if getattr(base, name, False)}
    for name in said:
        setattr(base, name, False)
    try:
        yield
    finally:
        for name in said:
            setattr(base, name, True)


def describe_planned(job: Job) -> str:
    """What the plan quantizes to, in the words of `describe_running`."""
    model, compute = job.recipe.model, DTYPES[job.plan.precision.value]
    if model.quantization in (None, "int8"):
        return model.quantization or "none"
    nested = ", double quantization" if model.bnb_4bit_use_double_quant else ""
    return f"{model.quantization}{nested}, stored as {_name(storage(job))}, computed in {_name(compute)}"


def storage(job: Job) -> torch.dtype:
    """Of the tensors that hold 4-bit weights."""
    planned = quant_storage(job.recipe, job.hardware, job.deepspeed, job.plan.precision.value)
    return torch.uint8 if planned == "uint8" else DTYPES[planned]


def describe_running(model: Any) -> str:
    """What the live layers are quantized to, such as `nf4, double quantization, stored as uint8, computed in bf16`; `none` without any."""
    kinds = set()
    for _, layer in quantized_layers(model):
        if type(layer).__name__ == "Linear8bitLt":
            kinds.add("int8" if layer.weight.dtype == torch.int8 else "not quantized")
            continue
        state = layer.quant_state
        nested = ", double quantization" if state.nested else ""
        words = f"stored as {_name(layer.weight.dtype)}, computed in {_name(layer.compute_dtype)}"
        kinds.add(f"{state.quant_type}{nested}, {words}")
    return "; ".join(sorted(kinds)) or "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
