"""FSDP2: configures it, chooses which modules are sharded as units, and reads how torch has sharded the live model.

accelerate calls torch's fully_shard when training begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import TrainerCallback

from sft.errors import ModelError
from sft.parallel.patches import only_these_are_wrapped
from sft.plan.job import Job
from sft.plan.parallelism import mesh_shape
from sft.recipe.schema import Fsdp


def plugin_arguments(fsdp: Fsdp) -> dict[str, Any]:
    """The recipe's section in the words of transformers' fsdp_config."""
    return {
        "version": 2,
        "reshard_after_forward": fsdp.sharding_strategy != "shard_grad_op",
        "auto_wrap_policy": "NO_WRAP" if fsdp.min_num_params else "TRANSFORMER_BASED_WRAP",
        "cpu_offload": fsdp.offload_params,
        "state_dict_type": f"{fsdp.state_dict_type.upper()}_STATE_DICT",
        # The plan decides about the layers' own checkpointing: sft/model/gradient_checkpointing.py.
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": False,  # decided by how the model was loaded: units_as_planned
    }


def policies(fsdp: Fsdp, compute: torch.dtype, on_gpu: bool) -> dict[str, Any]:
    """torch's own objects among the arguments of accelerate's plugin.

    accelerate's policy for bf16 would reduce gradients in bf16, and round to bf16 what leaves the model, which is the loss. Its
    offload pins memory, which needs a GPU.
    """
    half = compute != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    offload = {"cpu_offload": CPUOffloadPolicy(pin_memory=on_gpu)} if fsdp.offload_params else {}
    return {"mixed_precision_policy": policy, **offload}


@contextmanager
def units_as_planned(trainer: Any, fsdp: Fsdp) -> Iterator[None]:
    """Decide which modules accelerate shards as units, while it does.

    Its choice of layers refuses a model that names a layer it does not have, as parts of larger models do.

    Raises:
        ModelError: The model marks no layers.
    """
    model = trainer.model
    trainer.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = model.is_loaded_on_rank_0
    if fsdp.min_num_params is not None:
        with only_these_are_wrapped(size_units(model, fsdp.min_num_params)):
            yield
        return
    layers = {type(one).__name__ for one in model.modules() if isinstance(one, GradientCheckpointingLayer)}
    if not layers:
        raise ModelError(
            f"train.fsdp: {type(model).__name__} marks no layers that repeat. Set train.fsdp.min_num_params, so that modules are "
            "sharded by their size."
        )
    trainer.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers)
    yield


def size_units(model: Any, least: int) -> list[Any]:
    """The modules to shard as units, from the inside out: each with so many parameters that no inner unit has taken.

    Not the embeddings and the model itself, which accelerate handles, nor lists of modules, which are never called.
    """
    left_out = (model.get_input_embeddings(), model.get_output_embeddings(), model)
    units: list[Any] = []
    taken: set[int] = {id(parameter) for module in left_out[:2] for parameter in module.parameters()}

    def visit(module: Any) -> None:
        for child in module.children():
            visit(child)
        if module in left_out or isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            return
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        if own and sum(parameter.numel() for parameter in own) >= least:
            units.append(module)
            taken.update(map(id, own))

    visit(model)
    return units


class Prefetch(TrainerCallback):  # type: ignore[misc]
    """Gathers so many layers before they are needed, in the order of the layers and back."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is sharded, and has not been called."""
        layers = [unit for unit in sharded_units(kwargs["model"]) if isinstance(unit, GradientCheckpointingLayer)]
        for place, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + self.ahead])
            layer.set_modules_to_backward_prefetch(layers[max(0, place - self.ahead) : place][::-1])


def reshard(model: Any) -> None:
    """Make each unit hold its shards again: after a forward pass alone some keep full weights for the backward pass."""
    for unit in sharded_units(model):
        unit.reshard()


# What torch made of the model, for the runtime check.


def sharded_units(model: Any) -> list[Any]:
    """The modules that fully_shard was called on, in the order of registration; the model itself is the first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shards(model: Any) -> list[DTensor]:
    """This rank's shards, one per parameter that FSDP2 has taken; after `reshard`."""
    parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return [parameter for parameter in parameters if parameter.device_mesh.size() > 1]


def _parameter_groups(state: Any) -> list[Any]:
    """The parameters that a unit gathers together: none where its inner units have taken all."""
    # From torch 2.11 on it may have several.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def sharding_readings(trainer: Any, job: Job) -> list[tuple[str, object, object]]:
    """What was planned of the sharding and what torch has made of the live model, by name; all units must have the same."""
    fsdp, model = job.fsdp, trainer.model
    assert fsdp is not None
    half = job.plan.precision.value != "fp32"
    states = [unit._get_fsdp_state() for unit in sharded_units(model)]
    groups = [group for state in states for group in _parameter_groups(state)]
    meshes = {tuple(shard.device_mesh.shape) for shard in shards(model)}
    reshards = {group.post_forward_mesh_info is not None for group in groups}
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    sharded = sum(isinstance(layer, FSDPModule) for layer in layers)
    sync = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
    readings: list[tuple[str, object, object]] = [
        ("mesh (copies, ranks of each)", {mesh_shape(fsdp, job.hardware)}, {(1, *mesh)[-2:] for mesh in meshes}),
        ("parameters not sharded", 0, len(list(model.parameters())) - len(shards(model))),
        # The root keeps its weights for the backward pass, which follows at once.
        ("reshard_after_forward", fsdp.sharding_strategy != "shard_grad_op", any(reshards)),
        ("offload_params", {fsdp.offload_params}, {isinstance(one.offload_policy, CPUOffloadPolicy) for one in groups}),
        ("dtype of computation", {torch.bfloat16 if half else None}, {one.mp_policy.param_dtype for one in groups}),
        (
            "dtype of gradient reduction",
            {torch.float32 if half else None},
            {one.mp_policy.reduce_dtype for one in groups},
        ),
        ("gradients reduced at each micro-batch", True, bool(sync)),
    ]
    if fsdp.min_num_params is None:
        readings.append(("layers sharded as units", len(layers), sharded))
    if fsdp.prefetch:
        ahead = max(len(state._states_to_forward_prefetch) for state in states)
        behind = max(len(state._states_to_backward_prefetch) for state in states)
        readings.append(("prefetch", (min(fsdp.prefetch, sharded - 1),) * 2, (ahead, behind)))
    return readings
