"""torch.compile for the decoder layers: the one block that repeats, compiled once, in place.

The whole model would take as many times longer to compile as it has layers, and break at the data that packing carries beside
the tokens. `module.compile()` leaves the names of the weights alone, so checkpoints are the same with and without.

Every micro-batch has another number of tokens and of documents: `dynamic=True` makes sizes symbols from the start, where the
default would compile for the first size, then again for each new thing that varies, up to a limit after which it silently
stops compiling.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from sft.errors import ModelError
from sft.model.attention import NAME as VARLEN
from sft.plan.build_tools import check_build_tools
from sft.plan.job import Job


def is_traced(attention: str, on_gpu: bool) -> bool:
    """Whether an attention function is compiled with its layer.

    `varlen` is one operator on a GPU, which torch 2.13 traces, forward and backward. Any other function is called as it is: it may
    look at the data, such as where documents end. Under checkpointing such a call in the middle keeps the whole layer from being
    compiled, silently; then the parts of the layer are compiled one by one.
    """
    return attention in ("sdpa", "eager") or (attention.startswith(VARLEN) and on_gpu and torch.__version__ >= "2.13")


def check_compiler(job: Job) -> None:
    """Refuse what is compiled on this machine where that cannot be: model.compile, and on a GPU Liger's kernels, by Triton.

    Raises:
        PlanError: There is no compiler, or no Python.h.
    """
    compiles, on_gpu = job.plan.compile.value, job.hardware.gpu is not None
    if not compiles and not (on_gpu and job.plan.kernels.value == "liger"):
        return
    what = "model.compile" if compiles else "model.kernels=liger"
    # What torch calls for a CPU, and Triton for a GPU.
    compilers = [os.environ.get("CC", "gcc"), "clang"] if on_gpu else [os.environ.get("CXX", "g++")]
    check_build_tools(what, [compilers], "set model.compile=false and model.kernels=none")


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks, as transformers marks them, also inside adapters."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: torch.nn.Module, attention: str, on_gpu: bool = False, **options: Any) -> None:
    """Compile each decoder layer at its first call.

    Args:
        model: With its adapters, before an engine wraps it.
        attention: The attention function, as planned.
        on_gpu: Whether it runs there.
        options: torch.compile's, such as backend.

    Raises:
        ModelError: The model has no layers that repeat.
    """
    traced = is_traced(attention, on_gpu)
    if not traced:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        as_it_is: Any = torch.compiler.disable
        ALL_ATTENTION_FUNCTIONS.register(attention, as_it_is(ALL_ATTENTION_FUNCTIONS[attention]))
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(
            f"model.compile=true, and {type(model).__name__} marks no layers that repeat. Set model.compile=false."
        )
    for layer in layers:
        for module in [layer] if traced else layer.children():
            module.compile(dynamic=True, **options)


def are_compiled(model: torch.nn.Module) -> bool:
    """Whether each decoder layer is compiled, whole or in all its parts."""
    layers = decoder_layers(model)
    return bool(layers) and all(
        layer._compiled_call_impl is not None or all(part._compiled_call_impl is not None for part in layer.children())
        for layer in layers
    )
