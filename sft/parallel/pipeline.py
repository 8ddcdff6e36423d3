"""Pipeline parallelism: each rank holds some of the layers, and the micro-batches of a step pass through them (torch's 1F1B schedule).

A stage is the transformers model in which the layers of other stages are replaced by modules that pass hidden states on, so that parameters
keep their full names. All ranks of a pipeline load the same batches: only hidden states are sent, labels and the boundaries of packed
documents are at hand everywhere, and each rank knows the shape of what it will receive.

Ranks are numbered stage by stage: neighbours hold the same stage and add up its gradients, far ranks exchange hidden states only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from sft.errors import ModelError
from sft.parallel.process_group import quiet_group

Item = TypeVar("Item")
Batch = dict[str, Any]


class Elsewhere(torch.nn.Module):
    """Stands for a module of another stage: passes on what it is given, or what has arrived from the stage before."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        # What models read of a layer, such as the kind of its attention.
        self.__dict__.update({key: value for key, value in vars(module).items() if isinstance(value, str | int)})
        self.arrived: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The hidden states for the next layer."""
        arrived, self.arrived = self.arrived, None
        return hidden_states if arrived is None else arrived


def of_other_stages(causal: Any, stages: tuple[range, ...], index: int) -> list[str]:
    """Names of the modules that a stage does without: embeddings are with the first, norm and output head with the last, and tied
    embeddings with both.

    Raises:
        ModelError: The model's layers are not where transformers' decoders have them.
    """
    backbone, embedding, head = causal.base_model, causal.get_input_embeddings(), causal.get_output_embeddings()
    layers = getattr(backbone, "layers", [])
    if len(layers) != stages[-1].stop or not hasattr(backbone, "norm") or head is None:
        raise ModelError(
            f"train.pipeline_parallel_size={len(stages)}: {type(causal).__name__} has no list of {stages[-1].stop} layers between "
            "embedding, norm and head. Set it to 1."
        )
    is_first, is_last = index == 0, index == len(stages) - 1
    is_end_of_tied = head.weight is embedding.weight and (is_first or is_last)
    without = {layer for number, layer in enumerate(layers) if number not in stages[index]}
    without |= set() if is_last else {backbone.norm}
    without |= set() if is_first or is_end_of_tied else {embedding}
    without |= set() if is_last or is_end_of_tied else {head}
    return [name for name, module in causal.named_modules() if module in without]


def take_stage(model: Any, stages: tuple[range, ...], index: int) -> None:
    """Remove what belongs to other stages. Raises ModelError as `of_other_stages` does, and where nothing is left to train."""
    causal, _ = _parts(model)
    for name in of_other_stages(causal, stages, index):
        causal.set_submodule(name, Elsewhere(causal.get_submodule(name)))
    if not any(one.requires_grad for one in model.parameters()):
        raise ModelError(
            f"train.pipeline_parallel_size={len(stages)}: nothing is trained in stage {index + 1}, layers {stages[index][0]} to "
            f"{stages[index][-1]}. Use fewer stages, or train more layers (model.freeze, model.lora)."
        )


def _parts(model: Any) -> tuple[Any, Any]:
    """The causal language model inside PEFT's wrapper, and its decoder."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    return causal, causal.base_model


class Part:
    """What one stage computes, of a model after `take_stage`. `hidden` is what has arrived from the stage before; None on the first."""

    def __init__(self, model: Any, stages: tuple[range, ...], index: int) -> None:
        self.model, self.stages, self.index = model, stages, index
        self.causal, self.backbone = _parts(model)
        self.dtype = next(model.parameters()).dtype

    def shape(self, batch: Batch) -> tuple[int, ...]:
        """Of a batch's hidden states."""
        return (*batch["input_ids"].shape, self.causal.config.get_text_config().hidden_size)

    def arrived(self, hidden: torch.Tensor | None, inputs: Batch) -> Batch:
        """The model's inputs with the hidden states as embeddings, which pass to the first layer as they are: some models scale theirs."""
        if hidden is None:
            return inputs
        self.backbone.layers[self.stages[self.index].start - 1].arrived = hidden
        return {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": hidden}

    def layers(self, hidden: torch.Tensor | None, inputs: Batch) -> torch.Tensor:
        """The hidden states that leave a stage before the last; a ModelError where the next stage expects others."""
        shape, of_head = self.shape(inputs), ("labels", "shift_labels", "fused_lm_head", "use_cache")
        inputs = {name: value for name, value in inputs.items() if name not in of_head}
        states: torch.Tensor = self.backbone(**self.arrived(hidden, inputs), use_cache=False).last_hidden_state
        if states.shape != shape or states.dtype != self.dtype:
            raise ModelError(
                f"train.pipeline_parallel_size={len(self.stages)}: stage {self.index + 1} gives {states.dtype} {list(states.shape)} and "
                f"not {self.dtype} {list(shape)}: this model cannot be trained in stages. Set it to 1."
            )
        return states


class Stage(PipelineStage):
    """torch's stage, for micro-batches of different shapes: a buffer for what arrives is made when it is needed.

    torch would agree on one shape, and keep a buffer for each micro-batch of the step. What it calls instead of a module is `compute`, with
    the number of the micro-batch and the hidden states that have arrived.
    """

    def __init__(self, part: Part, device: torch.device, group: Any) -> None:
        super().__init__(part.model, part.index, len(part.stages), device, group=group)
        self.dtype, self.shapes = part.dtype, list[tuple[int, ...]]()
        self.compute: Callable[..., torch.Tensor]
        self._arriving = dict[tuple[int, int], torch.Tensor]()
        """By the number of the micro-batch and the way that it comes from."""
        self._runtime_validate = False  # against the shape that torch would have agreed on
        if hasattr(self, "_stage_meta"):  # torch 2.13 counts the inputs whose gradients are sent
            self._stage_meta.inputs = () if self.is_first else (None,)  # type: ignore[assignment]

    def forward_maybe_with_nosync(self, *hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Compute a micro-batch."""
        return self.compute(number, *hidden)

    def neighbour(self, way: int) -> int:
        """The rank of the next stage (1) or the one before (-1)."""
        return dist.get_global_rank(self.group, self.stage_index + way)  # type: ignore[arg-type]

    def _receive(self, number: int, way: int) -> list[dist.P2POp]:
        buffer = self._arriving[number, way] = torch.empty(self.shapes[number], dtype=self.dtype, device=self.device)
        return [dist.P2POp(dist.irecv, buffer, self.neighbour(way), self.group)]

    def _send(self, tensor: torch.Tensor | None, way: int) -> list[dist.P2POp]:
        assert tensor is not None
        return [dist.P2POp(dist.isend, tensor.detach().contiguous(), self.neighbour(way), self.group)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive hidden states."""
        return [] if self.is_first else self._receive(fwd_chunk_id, -1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive their gradient."""
        return [] if self.is_last else self._receive(bwd_chunk_id, 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send hidden states."""
        return [] if self.is_last else self._send(self.fwd_cache[fwd_chunk_id][0][0], 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send their gradient."""
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        return [] if self.is_first else self._send(gradients[0], -1)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        return (self._arriving.pop((fwd_chunk_id, -1)).requires_grad_(),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return (self._arriving.pop((bwd_chunk_id, 1)),)

    def _validate_fwd_input(self, *args: Any) -> None:  # torch 2.11's, against one shape
        pass

    _validate_fwd_outputs = _validate_fwd_input


class Pipeline(torch.nn.Module):
    """The engine: a stage of the model on each rank, and the exchange between them.

    Args:
        model: After `take_stage`, on the rank's device.
        stages: The layers of each.
        device: The rank's.
    """

    def __init__(self, model: Any, stages: tuple[range, ...], device: torch.device) -> None:
        super().__init__()
        count, replicas = len(stages), dist.get_world_size() // len(stages)
        mesh = init_device_mesh(device.type, (count, replicas), mesh_dim_names=("stage", "replica"))
        self.group, self.replicas = mesh["stage"].get_group(), mesh["replica"].get_group()
        index, self.replica = place(count)
        self.module, self.part = model, Part(model, stages, index)
        self.stage = Stage(self.part, device, self.group)
        ends = [[one, (count - 1) * replicas + one] for one in range(replicas)]
        self._ends, _ = dist.new_subgroups_by_enumeration(ends)  # type: ignore[no-untyped-call]
        causal = self.part.causal
        embedding, head = (
            getattr(one(), "weight", None) for one in (causal.get_input_embeddings, causal.get_output_embeddings)
        )
        self.tied = embedding if embedding is head else None
        """In the first stage and the last the embedding's weight, where it is the output head's, too."""
        # The first collective connects all ranks of the group, which point-to-point messages alone never do.
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    def own_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of this stage, without the last stage's copy of the first one's embedding."""
        copied = self.tied if self.stage.is_last else None
        return {name: one for name, one in self.module.named_parameters() if one is not copied}

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers that checkpoints hold; of a model with adapters those alone, as peft names them."""
        named, own = dict(self.module.named_parameters(remove_duplicate=False)), self.own_parameters()
        if hasattr(self.module, "peft_config"):
            from peft import get_peft_model_state_dict

            return dict(get_peft_model_state_dict(self.module, save_embedding_layers=False))
        return {name: one for name, one in self.module.state_dict().items() if name in own or name not in named}

    def layers_of_ranks(self) -> tuple[range, ...]:
        """The layers of each stage, read from the parameters of the live modules; every rank takes part."""
        layers = enumerate(self.part.backbone.layers)
        mine = [number for number, layer in layers if next(layer.parameters(), None) is not None]
        found: list[list[int]] = [[] for _ in self.part.stages]
        dist.all_gather_object(found, mine, self.group)
        spans = [range(one[0], one[-1] + 1) if one else range(0) for one in found]
        return tuple(span for span, one in zip(spans, found, strict=True) if list(span) == one)

    # Passes.

    def step(
        self,
        batches: list[Batch],
        loss_of: Callable[[Any, Batch], torch.Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> torch.Tensor:
        """Forward and backward passes of a step, after which gradients are those of all micro-batches of all replicas.

        Args:
            batches: The micro-batches, on the device.
            loss_of: The loss of one, given the model and its inputs.
            autocast: Around forward passes.

        Returns:
            On the last stage the sum of the losses, elsewhere 0.
        """
        stage, part, losses, wrapped = self.stage, self.part, list[torch.Tensor](), None

        def compute(number: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
            with autocast():
                if stage.is_last:
                    return loss_of(part.model, part.arrived(hidden, batches[number]))
                return part.layers(hidden, batches[number])

        stage.compute, stage.shapes = compute, [part.shape(batch) for batch in batches]
        stage.chunks, stage.has_backward = len(batches), True
        stage.clear_runtime_states()
        schedule = Schedule1F1B(stage, len(batches), loss_fn=lambda loss, _: loss, scale_grads=False)
        # Shapes are known, and groups connected.
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        numbers = [{"number": number} for number in range(len(batches))]
        try:
            schedule._step_microbatches(None, numbers, [None] * len(batches), losses, return_outputs=False)
        except RuntimeError as error:
            wrapped = error
        if wrapped is not None:
            # torch wraps whatever a stage raises, such as a GPU out of memory. Out here neither error refers to the other.
            raise wrapped.__cause__ or wrapped
        self._sum_gradients()
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=stage.device)

    def forward(self, **inputs: Any) -> Any:
        """A forward pass through all stages, without gradients; every rank of the pipeline gets the last one's output."""
        stage, part, hidden, box = self.stage, self.part, None, [None]
        if not stage.is_first:
            hidden = torch.empty(part.shape(inputs), dtype=part.dtype, device=stage.device)
            dist.recv(hidden, stage.neighbour(-1), self.group)
        if stage.is_last:
            box = [send_to_device(part.model(**part.arrived(hidden, inputs)), "cpu")]
        else:
            dist.send(part.layers(hidden, inputs).contiguous(), stage.neighbour(1), self.group)
        last = dist.get_global_rank(self.group, len(part.stages) - 1)
        dist.broadcast_object_list(box, last, self.group, stage.device)
        return send_to_device(box[0], stage.device)

    # Gradients.

    def _sum_gradients(self) -> None:
        """Add up the gradients of all replicas, and those of a tied embedding's two copies."""
        trained = [one for one in self.module.parameters() if one.requires_grad]
        for parameter in trained:  # as many on each replica
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if dist.get_world_size(self.replicas) > 1:
            for work in [dist.all_reduce(one.grad, group=self.replicas, async_op=True) for one in trained]:
                work.wait()
        if self.tied is not None and self.tied.grad is not None:
            dist.all_reduce(self.tied.grad, group=self._ends)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of all stages' gradients; every rank takes part."""
        gradients = [one.grad for one in self.own_parameters().values() if one.grad is not None]
        squares = torch.stack([norm.double() ** 2 for norm in torch._foreach_norm(gradients)]).sum()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().float()

    def collect(self, items: Iterable[Item]) -> Iterator[Item]:
        """On rank 0 what each stage has, stage by stage; elsewhere nothing. Every rank takes part, to the end of the iterator."""
        group, replicas = quiet_group(), dist.get_world_size(self.replicas)
        if dist.get_rank() > 0:
            for box in chain(((item,) for item in items), [()]):
                if self.replica == 0 and not self.stage.is_first:
                    dist.send_object_list([box], 0, group)
            return
        yield from items
        for stage in range(1, len(self.part.stages)):
            while True:
                received: list[tuple[Item, ...]] = [()]
                dist.recv_object_list(received, stage * replicas, group)
                if not received[0]:
                    break
                yield received[0][0]


def place(stages: int) -> tuple[int, int]:
    """This rank's stage, and its number among those that hold the same stage."""
    return divmod(dist.get_rank(), dist.get_world_size() // stages)
