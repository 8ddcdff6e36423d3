"""Finds the smallest changes of a recipe, or more GPUs, with which a training fits; each is verified by planning it.

A lever is one thing to change, with its changes, the mildest first. Levers that leave the result as it is are pulled one at a time, then
two, then three, until something fits; then more GPUs are tried, and levers that change the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from sft.errors import PlanError
from sft.hub.data_facts import DataFacts
from sft.hub.model_facts import ModelFacts
from sft.plan.batch import divisors
from sft.plan.case import Case
from sft.plan.gpus import gpu_words
from sft.plan.hardware import Hardware, described_hardware
from sft.plan.memory_estimate import MemoryEstimate
from sft.plan.resolve import planned
from sft.recipe.load import apply_override
from sft.recipe.schema import Recipe

SHAPES: tuple[tuple[int, int], ...] = ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))  # nodes, GPUs of each
ENDLESS = 1e9  # GiB
_ERROR = 1.5
"""What arithmetic needs more than this many times is not simulated."""

UNCHANGED = "none but rounding"


@dataclass(frozen=True)
class Change:
    """Other values of some keys."""

    overrides: tuple[str, ...]
    """As on a command line."""
    cost: str
    """In time, in words."""
    result: str = ""
    """What it means for the trained model; empty: nothing but rounding."""


Lever = Sequence[Change]

# The mildest first, with their costs; fractions are of the compute.
CHECKPOINTING = {
    "4": "every fourth layer is computed again: a twelfth more",
    "2": "every second layer is computed again: a sixth more",
    "selective": "layers but their attention are computed again: up to a third more",
    "true": "layers are computed again: a third more",
    "offload": "layers are computed again, and their inputs go to the machine's memory and back",
}
ENGINES = {
    "train.deepspeed=zero1": "each step gathers weights",
    "train.deepspeed=zero2": "each micro-batch reduces gradients, each step gathers weights",
    "train.deepspeed=zero3": "each pass gathers weights, which needs fast links",
    "train.fsdp={}": "each pass gathers weights, which needs fast links",
    "train.deepspeed=zero2_offload": "gradients and weights go to the machine's memory and back in each step, and Adam runs on its cores",
    "train.deepspeed=zero3_offload": "weights come from the machine's memory in each pass, and Adam runs on its cores",
}


@dataclass(frozen=True)
class Proposal:
    """Changes with which the training fits."""

    overrides: list[str]
    """As on a command line; empty where only the machine is another."""
    cost: str
    """In time, in words."""
    result: str
    """What it means for the trained model."""
    case: Case
    machine: str | None = None
    """Another one, as `--on` takes it; None: the one that was planned for."""

    @property
    def memory(self) -> MemoryEstimate:
        """What it needs then."""
        assert self.case.plan.memory_estimate
        return self.case.plan.memory_estimate


@dataclass(frozen=True)
class Fit:
    """Whether a training fits, and what would make it."""

    lack: str | None
    """What there is too little of; None where it fits."""
    memory: MemoryEstimate | None
    """None where train.parallel=auto finds no engine."""
    proposals: tuple[Proposal, ...]


def fit(recipe: Recipe, hardware: Hardware, model: ModelFacts, data: DataFacts | None) -> Fit:
    """Plan a recipe, and propose changes where it does not fit. Raises PlanError where it could not run with any amount of memory."""
    assert hardware.gpu
    endless = replace(hardware, gpu=replace(hardware.gpu, memory_gib=ENDLESS), cpu_memory_gib=ENDLESS)
    base = replace(planned(recipe, endless, replace(model, config=None), data), model=model)
    try:
        memory = planned(recipe, hardware, model, data).plan.memory_estimate
    except PlanError:  # of train.parallel=auto alone: all else was refused above
        return Fit("no engine of train.parallel=auto fits", None, tuple(_proposals(base, hardware)))
    assert memory
    return Fit(memory.lack and memory.words, memory, tuple(_proposals(base, hardware)) if memory.lack else ())


def changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with other values, validated as a file is. Raises ValueError."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    for override in overrides:
        apply_override(values, override)
    return Recipe.model_validate_json(json.dumps(values)).placed(recipe.folder)


def _try(base: Case, hardware: Hardware, changes: Sequence[Change], machine: str | None = None) -> Proposal | None:
    """The changes, if the recipe runs and fits with them."""
    assert hardware.gpu
    overrides = [override for one in changes for override in one.overrides]
    try:
        recipe = changed(base.recipe, overrides)
        data = None if any(one.startswith("data.") for one in overrides) else base.data
        # By arithmetic first, and with room to err: a simulated pass takes seconds.
        roomy = replace(hardware, gpu=replace(hardware.gpu, memory_gib=_ERROR * hardware.gpu.memory_gib))
        if not _fits(planned(recipe, roomy, replace(base.model, config=None), data)):
            return None
        case = planned(recipe, hardware, base.model, data)
    except (PlanError, ValueError):
        return None
    cost = "; ".join(one.cost for one in changes)
    result = "; ".join(one.result for one in changes if one.result) or UNCHANGED
    return Proposal(overrides, cost, result, case, machine) if _fits(case) else None


def _fits(case: Case) -> bool:
    return case.plan.memory_estimate is not None and case.plan.memory_estimate.lack is None


def _proposals(base: Case, hardware: Hardware) -> list[Proposal]:
    """Of each set of levers its mildest changes that fit; no set with a lever too many, and at most one lever that changes the result."""
    levers, found = [lever for lever in _levers(base, hardware) if lever], dict[tuple[int, ...], Proposal]()
    for size in range(1, len(levers) + 1):
        for chosen in combinations(range(len(levers)), size):
            changing = sum(bool(levers[number][0].result) for number in chosen)
            if changing > 1 or any(set(fewer) <= set(chosen) for fewer in found):
                continue
            tried = (_try(base, hardware, changes) for changes in product(*(levers[number] for number in chosen)))
            if fitting := next(filter(None, tried), None):
                found[chosen] = fitting
        if any(one.result == UNCHANGED for one in found.values()):
            break
    kept = [one for one in found.values() if one.result == UNCHANGED]
    return [*kept, *_more_gpus(base, hardware), *(one for one in found.values() if one.result != UNCHANGED)]


def _levers(base: Case, hardware: Hardware) -> Iterator[Lever]:
    """What the recipe leaves to change; what changes the result comes last."""
    recipe, train, model = base.recipe, base.recipe.train, base.recipe.model
    micro = train.micro_batch_size
    smaller = [one for one in reversed(divisors(micro)) if one < micro] if isinstance(micro, int) else []
    yield [Change((f"train.micro_batch_size={one}",), "smaller passes use a GPU less well") for one in smaller]
    modes, mode = [*CHECKPOINTING], str(base.plan.gradient_checkpointing.value).lower()
    modes = modes[modes.index(mode) + 1 :] if mode in modes else modes
    yield [Change((f"train.gradient_checkpointing={one}",), CHECKPOINTING[one]) for one in modes]
    yield [
        Change(_engine(recipe, one), cost)
        for one, cost in ENGINES.items()
        if _leaves_engine(recipe) and (hardware.ranks > 1 or one.endswith("offload"))
    ]
    if train.optim == "adamw" and model.lora is None:
        rounded = "close to AdamW's and not equal: the optimizer's moments are rounded to 8 bits"
        yield [Change(("train.optim=adamw_8bit",), "about the same", rounded)]
    yield list(_shorter(recipe))
    adapters = f"adapters are trained and not all weights; usual learning rates are 1e-4 to 5e-4, and it is {train.learning_rate:g}"
    rounded, unpacked = "the base is rounded to 4 bits", "each pass unpacks the base"
    if model.lora is None:
        lora, nf4 = "model.lora={}", "model.quantization=nf4"
        yield [
            Change((lora,), "less: frozen weights have no gradients", adapters),
            Change((lora, nf4), unpacked, f"{adapters}; {rounded}"),
        ]
    elif model.quantization is None:
        yield [Change(("model.quantization=nf4",), unpacked, rounded)]


def _leaves_engine(recipe: Recipe) -> bool:
    """Whether another engine could take the place of the recipe's."""
    train = recipe.train
    return train.parallel is None and train.tensor_parallel_size == train.pipeline_parallel_size == 1


def _engine(recipe: Recipe, override: str) -> tuple[str, ...]:
    """The engine of an override, instead of the one that the recipe names."""
    named = [key for key in ("deepspeed", "fsdp") if getattr(recipe.train, key) is not None]
    return override, *(f"train.{key}=null" for key in named if not override.startswith(f"train.{key}="))


def _shorter(recipe: Recipe) -> Iterator[Change]:
    """Packs of a half or a quarter, or such documents without packing; the tokens of a step stay the same."""
    data, train = recipe.data, recipe.train
    for factor in (2, 4):
        length, rest = divmod(recipe.sequence_length, factor)
        if rest:
            return
        overrides = [f"data.pack_length={length}"] if data.pack_length is not None else []
        overrides += [f"data.max_length={length}"] if length < data.max_length else []
        if train.global_batch_size is not None and data.packing:
            overrides.append(f"train.global_batch_size={train.global_batch_size * factor}")
        cut = f"; those over {length} tokens meet data.overlong={data.overlong}" if length < data.max_length else ""
        yield Change(tuple(overrides), "smaller passes use a GPU less well", f"steps hold other documents{cut}")


def _more_gpus(base: Case, hardware: Hardware) -> Iterator[Proposal]:
    """The fewest with which the recipe fits, with its own engine or the cheapest that fits there."""
    assert hardware.gpu
    engines = [(), _engine(base.recipe, "train.parallel=auto")] if _leaves_engine(base.recipe) else [()]
    changes = [Change(engine, "more GPUs, for less time") for engine in engines]
    for nodes, gpus in SHAPES:
        words = f"{f'{nodes}x' if nodes > 1 else ''}{gpus}x{gpu_words(hardware.gpu.name, hardware.gpu.memory_gib)}"
        other = described_hardware(words)
        tried = (_try(base, other, [one], words) for one in changes)
        if other.ranks > hardware.ranks and (found := next(filter(None, tried), None)):
            yield found
            return


def describe(found: Proposal) -> str:
    """What is changed, as a person writes it."""
    return " ".join([*found.overrides, *([f"--on {found.machine}"] if found.machine else [])])
