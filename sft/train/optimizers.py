"""Builds the optimizer that the recipe names, and reads the live one back.

AdamW is torch's fused one, or MasterAdamW where bf16 weights need a copy (sft/parallel/optimizer.py); the 8-bit ones are bitsandbytes',
Adafactor is transformers'. Lion is ours: bitsandbytes' takes no shards, and every other one is a package of its own for four lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sft.parallel.optimizer import MasterAdamW
from sft.plan.job import Job
from sft.plan.precision import MASTER


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675): the sign of an average of gradients; one state per weight.

    All operations are element by element, so that it steps on shards as on full tensors.
    """

    def __init__(self, groups: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Decay the weights, move them against the sign of the update, and average in the gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients: list[Any] = [weight.grad for weight in weights]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            averages = [self.state[weight]["exp_avg"] for weight in weights]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(averages, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - beta2)


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the layers and fused AdamW for the rest, as one optimizer with one state.

    The groups of Muon have `use_muon`. Both see the same groups and the same state, so that schedule and checkpoint need not know.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, muon: dict[str, Any], adamw: dict[str, Any]
    ) -> None:
        groups = [dict(group) for group in groups if group["params"]]
        of_muon = [group for group in groups if group["use_muon"]]
        rest = [group for group in groups if not group["use_muon"]]
        optimizer = torch.optim.Muon
        self._steppers: dict[bool, torch.optim.Optimizer] = {}
        if of_muon:
            self._steppers[True] = optimizer(of_muon, lr=lr, **muon)
        if rest:
            self._steppers[False] = torch.optim.AdamW(rest, lr=lr, fused=True, **adamw)
        # Each has filled its groups in with its own arguments.
        super().__init__([group for one in self._steppers.values() for group in one.param_groups], {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each on its groups."""
        for use_muon, stepper in self._steppers.items():
            # Loading a checkpoint puts new dictionaries into the place of both.
            stepper.param_groups = [group for group in self.param_groups if group["use_muon"] == use_muon]
            stepper.state = self.state
            stepper.step()


def muon_groups(model: torch.nn.Module, decayed: set[str]) -> list[dict[str, Any]]:
    """The trained parameters in groups: matrices of the layers for Muon; embeddings, head, norms and biases for AdamW.

    `decayed` are the names that weight decay applies to; a group's own decay is 0 for the others.
    """
    tables = {id(weight) for module in _embeddings(model) for weight in module.parameters()}
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            use_muon = weight.ndim == 2 and id(weight) not in tables
            groups.setdefault((use_muon, name in decayed), []).append(weight)
    return [
        {"params": weights, "use_muon": use_muon, **({} if has_decay else {"weight_decay": 0.0})}
        for (use_muon, has_decay), weights in groups.items()
    ]


def _embeddings(model: Any) -> list[torch.nn.Module]:
    """Embeddings and output heads, also those that PEFT has wrapped."""
    named = (model.get_input_embeddings(), model.get_output_embeddings())
    found = [module for module in named if module is not None]
    return [*found, *(module for module in model.modules() if isinstance(module, torch.nn.Embedding))]


def steps_on_copies(job: Job) -> bool:
    """Whether AdamW itself keeps fp32 copies of the weights; under ZeRO, DeepSpeed does."""
    return job.deepspeed is None and job.plan.weights.value == MASTER


def settings(job: Job) -> dict[str, Any]:
    """The optimizer's arguments but for the learning rate and weight decay, as its groups hold them.

    For muon those of AdamW too, which the rest is stepped by.
    """
    train = job.recipe.train
    adam = {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    own = train.optimizer_arguments
    if train.optim == "lion":
        return {"betas": (own["beta1"], own["beta2"])}
    if train.optim == "adafactor":
        return {"relative_step": False, **own}
    return adam | own


def build_arguments(job: Job) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The optimizer's class and arguments, for transformers to build; None for the fused AdamW that its `optim` names, and for muon."""
    optim, arguments = job.recipe.train.optim, {"lr": job.plan.learning_rate.value, **settings(job)}
    if steps_on_copies(job):
        return MasterAdamW, {"accumulate_in_fp32": job.plan.gradients.value == "fp32", **arguments}
    if optim in ("adamw_8bit", "paged_adamw_8bit"):
        from bitsandbytes.optim import AdamW

        return AdamW, {"optim_bits": 8, "is_paged": optim.startswith("paged"), **arguments}
    if optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, arguments
    return (Lion, arguments) if optim == "lion" else None


def build_muon(job: Job, model: torch.nn.Module, decayed: list[str]) -> MuonAdamW:
    """The optimizer of `train.optim: muon`, over the model's trained parameters."""
    train = job.recipe.train
    decay = {"weight_decay": train.weight_decay}
    adamw = {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    groups = muon_groups(model, set(decayed))
    return MuonAdamW(groups, job.plan.learning_rate.value, train.optimizer_arguments | decay, adamw | decay)


_KINDS = {
    "adamw": "AdamW",
    "adamw_8bit": "AdamW, 8-bit",
    "paged_adamw_8bit": "AdamW, 8-bit, paged",
    "adafactor": "Adafactor",
    "lion": "Lion",
    "muon": "MuonAdamW",
}


def compare_kind(optimizer: Any, job: Job) -> tuple[str, str, bool]:
    """The optimizer as planned, as found, and whether it is another."""
    planned = "MasterAdamW" if steps_on_copies(job) else _KINDS[job.recipe.train.optim]
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    running = type(optimizer).__name__
    running += (f", {bits}-bit" if bits != 32 else "") + (", paged" if getattr(optimizer, "is_paged", False) else "")
    # DeepSpeed has AdamWs of its own.
    known = ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam")
    is_same = running in known if planned == "AdamW" else running == planned
    return planned, running, not is_same


def compare_arguments(optimizer: Any, job: Job) -> tuple[str, str]:
    """The optimizer's arguments as planned, and as its groups hold them."""
    planned = settings(job) | {"weight_decay": job.recipe.train.weight_decay}
    # None on biases and norms.
    found = planned | {"weight_decay": max(group["weight_decay"] for group in optimizer.param_groups)}
    for group in optimizer.param_groups:
        # Muon has an epsilon of its own.
        for name in planned.keys() & group.keys() - {"weight_decay", *(["eps"] if group.get("use_muon") else [])}:
            value = tuple(group[name]) if isinstance(group[name], list) else group[name]
            if value != planned[name]:
                found[name] = value
    return str(planned), str(found)
