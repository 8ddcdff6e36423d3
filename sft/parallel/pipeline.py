"""Pipeline parallelism: each rank holds some of the layers, and the micro-batches of a step pass through them (torch's 1F1B schedule).

A stage is the transformers model in which the layers of other stages are replaced by modules that pass hidden states on, so that parameters
keep their full names. All ranks of a pipeline load the same batches: only hidden states are sent, labels and the boundaries of packed
documents are at hand everywhere, and each rank knows the shape of what it will receive.

Ranks are numbered stage by stage: neighbours hold the same stage and share the batches, far ranks exchange hidden states only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from sft.errors import ModelError
from sft.parallel.process_group import quiet_group

Item = TypeVar("Item")
Batch = dict[str, Any]

_BUCKET = 2**25
"""Elements of gradients that are reduced at once."""


class Elsewhere(torch.nn.Module):
    """Stands for a module of another stage: passes hidden states on."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        # What models read of a layer, such as the kind of its attention.
        plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int) and name[0] != "_"}
        self.__dict__.update(plain | {"training": module.training})
        self.arrived: torch.Tensor | None = None
        """Passed on instead of what it is called with: the hidden states of the stage before."""
        self.passed: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The hidden states that arrived, or those given."""
        self.passed = hidden_states if self.arrived is None else self.arrived
        self.arrived = None
        return self.passed

    def take(self) -> torch.Tensor:
        """What it was called with, which it forgets."""
        assert self.passed is not None
        passed, self.passed = self.passed, None
        return passed


def take_stage(model: Any, stages: tuple[range, ...], index: int) -> bool:
    """Remove the layers of all stages but one; embeddings stay with the first, norm and output head with the last.

    Returns:
        Whether the embedding is tied: then it stays with the last stage, too, where it is the head.

    Raises:
        ModelError: The model's layers are not where transformers' decoders have them.
    """
    causal, backbone = _parts(model)
    layers, head = getattr(backbone, "layers", []), causal.get_output_embeddings()
    if len(layers) != stages[-1].stop or not hasattr(backbone, "norm") or head is None:
        raise ModelError(
            f"train.pipeline_parallel_size={len(stages)}: {type(causal).__name__} has no list of {stages[-1].stop} layers between "
            "embedding, norm and head. Set it to 1."
        )
    tied = head.weight is causal.get_input_embeddings().weight
    is_first, is_last = index == 0, index == len(stages) - 1
    for number in set(range(len(layers))) - set(stages[index]):
        layers[number] = Elsewhere(layers[number])
    if not is_first and not (tied and is_last):
        causal.set_input_embeddings(Elsewhere(causal.get_input_embeddings()))
    if not is_last:
        backbone.norm = Elsewhere(backbone.norm)
        causal.set_output_embeddings(Elsewhere(head))
    return tied


def _parts(model: Any) -> tuple[Any, Any]:
    """The causal language model inside PEFT's wrapper, and its decoder."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    return causal, causal.base_model


class Stage(PipelineStage):
    """torch's stage, for micro-batches of different shapes: a buffer for what arrives is made when it is needed.

    torch would agree on one shape, and keep a buffer for each micro-batch of the step. `module` is called with the hidden states that have
    arrived, except on the first stage, and with `number`, the micro-batch's.
    """

    def __init__(
        self, module: torch.nn.Module, index: int, stages: int, device: torch.device, group: Any, dtype: torch.dtype
    ) -> None:
        super().__init__(module, index, stages, device, group=group)
        self.dtype, self.shapes = dtype, list[tuple[int, ...]]()
        self._states: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._runtime_validate = False  # against the shape that torch would have agreed on
        if hasattr(self, "_stage_meta"):  # torch 2.13 counts the inputs whose gradients are sent
            self._stage_meta.inputs = () if self.is_first else (None,)  # type: ignore[assignment]

    def expect(self, shapes: list[tuple[int, ...]]) -> None:
        """A step of micro-batches with hidden states of these shapes begins."""
        self.shapes, self.chunks, self.has_backward = shapes, len(shapes), True
        self.clear_runtime_states()

    def _peer(self, way: int) -> int:
        return dist.get_global_rank(self.group, self.stage_index + way)  # type: ignore[arg-type]

    def _receive(self, number: int, way: int, buffers: dict[int, torch.Tensor]) -> list[dist.P2POp]:
        buffers[number] = torch.empty(self.shapes[number], dtype=self.dtype, device=self.device)
        return [dist.P2POp(dist.irecv, buffers[number], self._peer(way), self.group)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive hidden states."""
        return [] if self.is_first else self._receive(fwd_chunk_id, -1, self._states)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive their gradient."""
        return [] if self.is_last else self._receive(bwd_chunk_id, 1, self._gradients)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send hidden states."""
        if self.is_last:
            return []
        (states,), _ = self.fwd_cache[fwd_chunk_id]
        return [dist.P2POp(dist.isend, states.detach().contiguous(), self._peer(1), self.group)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send their gradient."""
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        if self.is_first:
            return []
        assert gradients[0] is not None
        return [dist.P2POp(dist.isend, gradients[0].contiguous(), self._peer(-1), self.group)]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        return (self._states.pop(fwd_chunk_id).requires_grad_(),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return (self._gradients.pop(bwd_chunk_id),)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:  # torch 2.11's, against one shape
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass


class _MicroBatch(torch.nn.Module):
    """What a stage computes of a micro-batch, as torch calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.compute: Callable[[torch.Tensor | None, int], torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor | None = None, *, number: int) -> torch.Tensor:
        """Hidden states for the next stage, or on the last stage the loss."""
        assert self.compute is not None
        return self.compute(hidden, number)


class Pipeline(torch.nn.Module):
    """The engine: a stage of the model on each rank, and the exchange between them.

    Args:
        model: After `take_stage`, on the rank's device.
        stages: The layers of each.
        tied: Whether the first stage's embedding is the last one's output head.
        device: The rank's.
    """

    def __init__(self, model: Any, stages: tuple[range, ...], tied: bool, device: torch.device) -> None:
        super().__init__()
        self.module = model
        count, ranks = len(stages), dist.get_world_size()
        mesh = init_device_mesh(device.type, (count, ranks // count), mesh_dim_names=("stage", "replica"))
        self.group, self.replicas = mesh["stage"].get_group(), mesh["replica"].get_group()
        self.index, self.replica = place(count)
        self.stages, self.is_first, self.is_last = stages, self.index == 0, self.index == count - 1
        causal, backbone = _parts(model)
        own = stages[self.index]
        self._entry = None if self.is_first else backbone.layers[own.start - 1]
        self._exit = None if self.is_last else backbone.layers[own.stop]
        self._hidden_size = causal.config.get_text_config().hidden_size
        self._run_micro_batch = _MicroBatch()
        dtype = next(model.parameters()).dtype
        self.stage = Stage(self._run_micro_batch, self.index, count, device, self.group, dtype)
        self.tied: torch.Tensor | None = None
        if tied:
            ends = [[one, (count - 1) * (ranks // count) + one] for one in range(ranks // count)]
            self._ends, _ = dist.new_subgroups_by_enumeration(ends)  # type: ignore[no-untyped-call]
            self.tied = causal.get_input_embeddings().weight if self.is_first or self.is_last else None
        # The first collective connects all ranks of the group, which point-to-point messages alone never do.
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    @property
    def own_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of this stage, without the last stage's copy of the first one's embedding."""
        copied = self.tied if self.is_last else None
        return {name: one for name, one in self.module.named_parameters() if one is not copied}

    @property
    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Its parameters and what else checkpoints hold; of a model with adapters only what is trained."""
        parameters, own = dict(self.module.named_parameters(remove_duplicate=False)), self.own_parameters
        adapters = hasattr(self.module, "peft_config")
        return {
            name: tensor
            for name, tensor in self.module.state_dict().items()
            if name not in parameters or (name in own and (own[name].requires_grad or not adapters))
        }

    # A step.

    def step(
        self,
        batches: list[Batch],
        compute: Callable[[Any, Batch], torch.Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> torch.Tensor:
        """Forward and backward passes of a step, after which gradients are those of all micro-batches of all replicas.

        Args:
            batches: The micro-batches, on the device.
            compute: The loss of one, given the model to call with its inputs.
            autocast: Around forward passes.

        Returns:
            On the last stage the sum of the losses, elsewhere 0.
        """

        def run(hidden: torch.Tensor | None, number: int) -> torch.Tensor:
            with autocast():
                if self.is_last:
                    return compute(self._last(hidden), batches[number])
                return self._inner(hidden, batches[number])

        self._run_micro_batch.compute = run
        self.stage.expect([self._shape(batch) for batch in batches])
        schedule = Schedule1F1B(self.stage, len(batches), loss_fn=lambda loss, _: loss, scale_grads=False)
        # Shapes are known, and groups connected.
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        losses: list[torch.Tensor] = []
        wrapped: RuntimeError | None = None
        try:
            numbers = [{"number": number} for number in range(len(batches))]
            schedule._step_microbatches(None, numbers, [None] * len(batches), losses, return_outputs=False)
        except RuntimeError as error:
            wrapped = error
        if wrapped is not None:
            # torch wraps whatever a stage raises, such as a GPU out of memory. Out here neither error refers to the other.
            raise wrapped.__cause__ or wrapped
        self._sum_gradients()
        zero = torch.zeros((), device=self.stage.device)
        return torch.stack(losses).detach().sum() if losses else zero

    def _shape(self, batch: Batch) -> tuple[int, ...]:
        return (*batch["input_ids"].shape, self._hidden_size)

    def _last(self, hidden: torch.Tensor | None) -> Callable[..., Any]:
        """The last stage's model, for hidden states that have arrived."""

        def call(input_ids: torch.Tensor, **inputs: Any) -> Any:
            assert self._entry is not None
            self._entry.arrived = hidden
            return self.module(inputs_embeds=hidden, **inputs)

        return call

    def _inner(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The hidden states after this stage's layers."""
        shape, heads = self._shape(batch), ("labels", "shift_labels", "fused_lm_head", "logits_to_keep")
        inputs = {name: value for name, value in batch.items() if name not in heads} | {"use_cache": False}
        if self._entry is not None:
            self._entry.arrived = hidden
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": hidden}
        _parts(self.module)[1](**inputs)
        assert self._exit is not None
        states: torch.Tensor = self._exit.take()
        if states.shape != shape or states.dtype != self.stage.dtype:
            raise ModelError(
                f"train.pipeline_parallel_size={len(self.stages)}: stage {self.index + 1} gives {states.dtype} {list(states.shape)} and "
                f"not {self.stage.dtype} {list(shape)}: this model cannot be trained in stages. Set it to 1."
            )
        return states

    def forward(self, **inputs: Any) -> Any:
        """A forward pass through all stages, without gradients; every rank of the pipeline gets the last one's output."""
        stage, hidden, output = self.stage, None, None
        if not self.is_first:
            hidden = torch.empty(self._shape(inputs), dtype=stage.dtype, device=stage.device)
            dist.recv(hidden, stage._peer(-1), self.group)
        if self.is_last:
            output = self._last(hidden)(**inputs)
            output = type(output)(
                **{name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in output.items()}
            )
        else:
            dist.send(self._inner(hidden, inputs).contiguous(), stage._peer(1), self.group)
        box = [output]
        last = dist.get_global_rank(self.group, len(self.stages) - 1)
        dist.broadcast_object_list(box, last, self.group, stage.device)
        found: Any = box[0]
        return type(found)(
            **{name: one.to(stage.device) if isinstance(one, torch.Tensor) else one for name, one in found.items()}
        )

    # Gradients.

    def _sum_gradients(self) -> None:
        """Add up the gradients of all replicas, and those of a tied embedding's two copies."""
        gradients = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        if dist.get_world_size(self.replicas) > 1:
            for bucket in _buckets(gradients):
                flat = torch.cat([one.flatten() for one in bucket])
                dist.all_reduce(flat, group=self.replicas)
                for one, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                    one.copy_(part.view_as(one))
        if self.tied is not None and self.tied.grad is not None:
            dist.all_reduce(self.tied.grad, group=self._ends)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of all stages' gradients; every rank takes part."""
        gradients = [one.grad for one in self.own_parameters.values() if one.grad is not None]
        squares = torch.stack([norm.double() ** 2 for norm in torch._foreach_norm(gradients)]).sum()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().float()

    # What the stages hold.

    def collect(self, items: Iterable[Item]) -> Iterator[Item]:
        """On rank 0 what each stage has, stage by stage; elsewhere nothing. Every rank takes part, to the end of the iterator."""
        group, replicas = quiet_group(), dist.get_world_size(self.replicas)
        for item in items:
            if dist.get_rank() == 0:
                yield item
            elif self.replica == 0:
                dist.send_object_list([(item,)], 0, group)
        if self.replica == 0 and not self.is_first:
            dist.send_object_list([None], 0, group)
        for stage in range(1, len(self.stages)) if dist.get_rank() == 0 else ():
            while (found := _received(stage * replicas, group)) is not None:
                yield found[0]


def place(stages: int) -> tuple[int, int]:
    """This rank's stage, and its number among those that hold the same stage."""
    return divmod(dist.get_rank(), dist.get_world_size() // stages)


def _received(source: int, group: Any) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, source, group)
    return box[0]


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists of at most _BUCKET elements, or of one."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def layers_on_ranks(pipeline: Pipeline) -> tuple[range, ...]:
    """The layers that each stage of this rank's pipeline holds, read from the parameters of the live modules; every rank takes part."""
    layers = _parts(pipeline.module)[1].layers
    mine = [number for number, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    found: list[list[int]] = [[] for _ in pipeline.stages]
    dist.all_gather_object(found, mine, pipeline.group)
    return tuple(range(one[0], one[-1] + 1) if one == list(range(one[0], one[-1] + 1)) else range(0) for one in found)
