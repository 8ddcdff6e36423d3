"""AdamW for bf16 weights that keeps an fp32 copy of each, for one process without DeepSpeed.

bf16 has 8 significant bits: an update of less than 1/512 of a weight rounds away, and at a learning rate of 1e-5 most do.
So the step is taken on fp32 master weights, and the bf16 weights are their rounding. Bytes a trained parameter:

                                       weights  master  moments  gradients   sum
    fp32 weights, bf16 autocast          4        -        8         4        16, and fp32 activations between layers
    bf16, one micro-batch a step         2        4        8         2        16
    bf16, gradients added up in fp32     2        4        8         4        18

Gradients of several micro-batches are added up in fp32, as ds_configs/ has it; adding bf16 to bf16 would round at every
micro-batch. The norm is taken in fp32, and clipping scales the fp32 gradient that the step sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_CHUNK = 2**27
"""Elements whose gradients are fp32 at one time in the step, 512 MiB; or one weight, where that is larger."""


class MasterAdamW(torch.optim.AdamW):
    """Fused AdamW over fp32 copies of the weights.

    `param_groups` hold the copies; an fp32 weight is its own. The model must be where it will stay: moving it afterwards
    would part the two.

    Args:
        groups: As torch.optim.AdamW takes them, of the model's weights.
        accumulate_in_fp32: Add gradients up in fp32; for more than one micro-batch a step.
        arguments: AdamW's: lr, betas, eps.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], accumulate_in_fp32: bool, **arguments: Any) -> None:
        groups = [dict(group) for group in groups]
        self.weights: list[torch.Tensor] = [weight for group in groups for weight in group["params"]]
        for group in groups:
            # For an fp32 weight it is the same memory, with a gradient of its own.
            group["params"] = [weight.detach().float() for weight in group["params"]]
        self.masters: list[torch.Tensor] = [master for group in groups for master in group["params"]]
        self._scale: torch.Tensor | None = None
        super().__init__(groups, fused=True, **arguments)
        if accumulate_in_fp32:
            for weight in self.weights:
                weight.grad_dtype = torch.float32

    @property
    def grad_acc_dtype(self) -> torch.dtype:
        """What gradients of bf16 weights are added up in, as DeepSpeed's optimizer names it."""
        rounded = [weight.grad_dtype for weight in self.weights if weight.dtype != torch.float32]
        return rounded[0] or torch.bfloat16 if rounded else torch.float32

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """The norm of all gradients, in fp32; the next step scales them down to max_norm.

        The gradients themselves stay as they are: scaling would round those in bf16. `inf` never scales.
        """
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        if not gradients:
            return torch.zeros(())
        # Taken in bf16, the norm of each weight's gradient would be rounded to 8 bits.
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        self._scale = None if max_norm == float("inf") else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step on the masters, and round them into the weights."""
        assert closure is None, "the trainer has none"
        chunk: list[tuple[torch.Tensor, torch.Tensor]] = []
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is None:
                continue
            if chunk and sum(one.numel() for one, _ in chunk) + weight.numel() > _CHUNK:
                self._step_chunk(chunk)
                chunk = []
            chunk.append((weight, master))
        if chunk:
            self._step_chunk(chunk)
        self._scale = None

    def _step_chunk(self, chunk: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # AdamW passes over what has no gradient, so each call steps this chunk only.
        gradients = [weight.grad.float() for weight, _ in chunk if weight.grad is not None]
        if self._scale is not None:
            torch._foreach_mul_(gradients, self._scale)
        for (_, master), gradient in zip(chunk, gradients, strict=True):
            master.grad = gradient
        super().step()
        for _, master in chunk:
            master.grad = None
        rounded = [(weight, master) for weight, master in chunk if weight.dtype != master.dtype]
        if rounded:
            weights, masters = zip(*rounded, strict=True)
            torch._foreach_copy_(weights, masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of the weights."""
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, and the masters of what is not fp32 itself, in the order of the groups."""
        return super().state_dict() | {"masters": self._own_masters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the moments and the masters, in place."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "masters"})
        with torch.no_grad():
            for master, saved in zip(self._own_masters(), state_dict["masters"], strict=True):
                master.copy_(saved)

    def _own_masters(self) -> list[torch.Tensor]:
        pairs = zip(self.weights, self.masters, strict=True)
        return [master for weight, master in pairs if weight.dtype != master.dtype]
