"""FSDP2, set up: mixed precision, CPU ranks, which modules are sharded one by one, prefetching, and the whole model again.

accelerate calls torch's fully_shard when the training begins; sft/parallel/sharding.py reads what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import fsdp_utils
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import TrainerCallback

from sft.errors import ModelError
from sft.parallel.sharding import give_back, sharded_units
from sft.recipe.schema import Fsdp


def policies(fsdp: Fsdp, compute: torch.dtype, on_gpu: bool) -> dict[str, Any]:
    """torch's own objects among the arguments of accelerate's plugin.

    accelerate's policy for bf16 would reduce gradients in bf16, and round to bf16 what leaves the model, which is the loss. Its
    offload pins memory, for which there must be a GPU.

    Args:
        fsdp: The recipe's section.
        compute: What weights are gathered and computed in; gradients are reduced in fp32.
        on_gpu: Whether the job runs on GPUs.
    """
    half = compute != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    offload = {"cpu_offload": CPUOffloadPolicy(pin_memory=on_gpu)} if fsdp.offload_params else {}
    return {"mixed_precision_policy": policy, **offload}


@contextmanager
def cpu_ranks_may_shard() -> Iterator[None]:
    """Have accelerate take CPU ranks for FSDP while it makes its state.

    Its list of devices leaves CPU ranks out, and it trains them with DDP without a word; torch's fully_shard itself runs on them.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            # Each later AcceleratorState copies the type from there.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


def prefetch(model: Any, ahead: int) -> None:
    """Gather so many layers before they are needed, in the order of the layers and back.

    Args:
        model: Sharded, before its first forward pass.
        ahead: Layers.
    """
    layers = [unit for unit in sharded_units(model) if isinstance(unit, GradientCheckpointingLayer)]
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, place - ahead) : place][::-1])


class PrefetchAsAsked(TrainerCallback):  # type: ignore[misc]
    """Sets the layers that are gathered ahead, once the model is sharded.

    Args:
        ahead: train.fsdp.prefetch.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first forward pass."""
        prefetch(kwargs["model"], self.ahead)


def whole_state(model: Any, adapters_only: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """The weights gathered in the first rank's memory, each once; nothing on the others. Every rank takes part.

    Args:
        model: Sharded; stays as it is.
        adapters_only: Leave out what is frozen.
        dtype: Rounded to it before they are gathered; None: as the shares are.
    """
    give_back(model)
    parameters = dict(model.named_parameters())
    # A weight of two names, such as a tied embedding, would be gathered for each.
    once = parameters.keys() | {name for name, _ in model.named_buffers()}
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if name not in once or (adapters_only and name in parameters and not parameters[name].requires_grad):
            continue
        rounded = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        gathered = rounded.full_tensor() if isinstance(rounded, DTensor) else rounded
        if torch.distributed.get_rank() == 0:
            state[name] = gathered.cpu()
    return state


def plugin_arguments(fsdp: Fsdp) -> dict[str, Any]:
    """The section in the words of transformers' fsdp_config."""
    return {
        "version": 2,
        "reshard_after_forward": fsdp.sharding_strategy != "shard_grad_op",
        "auto_wrap_policy": "NO_WRAP" if fsdp.min_num_params else "TRANSFORMER_BASED_WRAP",
        "cpu_offload": fsdp.offload_params,
        "state_dict_type": f"{fsdp.state_dict_type.upper()}_STATE_DICT",
        # The layers' own checkpointing is what the plan decides about; sft/model/gradient_checkpointing.py.
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": False,
    }


def size_units(model: Any, least: int) -> list[Any]:
    """The modules to shard one by one: from the inside out, each that has so many parameters that no part of it has taken.

    Not the embeddings and the model itself, which accelerate takes care of, nor a list of modules, which is never called.

    Args:
        model: Not sharded.
        least: Parameters.
    """
    left_out = (model.get_input_embeddings(), model.get_output_embeddings(), model)
    units: list[Any] = []
    taken: set[int] = {id(parameter) for module in left_out[:2] for parameter in module.parameters()}

    def visit(module: Any) -> None:
        for part in module.children():
            visit(part)
        if module in left_out or isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            return
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        if own and sum(parameter.numel() for parameter in own) >= least:
            units.append(module)
            taken.update(map(id, own))

    visit(model)
    return units


@contextmanager
def units_as_asked(trainer: Any, fsdp: Fsdp) -> Iterator[None]:
    """Which modules accelerate shards one by one, while it does.

    Its own choice by size takes lists of modules too, which torch refuses; its choice of layers refuses a model that names a layer
    that it does not have, as parts of larger models do.

    Args:
        trainer: Its accelerator made, its model whole.
        fsdp: The recipe's section.

    Raises:
        ModelError: The model marks no layers.
    """
    model, plugin = trainer.model, trainer.accelerator.state.fsdp_plugin
    if fsdp.min_num_params is None:
        layers = {type(one).__name__ for one in model.modules() if isinstance(one, GradientCheckpointingLayer)}
        if not layers:
            raise ModelError(
                f"train.fsdp, and {type(model).__name__} marks no layers that repeat. Set train.fsdp.min_num_params, so that modules "
                "are shared out by their size."
            )
        plugin.transformer_cls_names_to_wrap = sorted(layers)
        yield
        return
    units = {id(unit) for unit in size_units(model, fsdp.min_num_params)}
    original = fsdp_utils.fsdp2_prepare_auto_wrap_policy
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = lambda plugin, model: lambda module: id(module) in units
    try:
        yield
    finally:
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = original
