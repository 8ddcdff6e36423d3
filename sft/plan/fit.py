"""Finds the smallest changes of a recipe, or of the machine, with which a training fits; each is verified by planning it.

A lever is a thing to change, and has its alternatives, the mildest first. The levers are pulled one at a time, then two, then three, until
something fits. Those that leave the result as it is come first, then other machines, then levers that change the result, each with
as few of the first as it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.batch import divisors
from sft.plan.case import Case
from sft.plan.engine import REMEDY
from sft.plan.gpus import gpu_words
from sft.plan.hardware import Hardware, described_hardware
from sft.plan.memory_estimate import MemoryEstimate
from sft.plan.parallelism import FSDP2
from sft.plan.plan import DataSize
from sft.plan.resolve import planned
from sft.plan.time import compute_per_token
from sft.recipe.schema import Recipe

SHAPES: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))  # nodes, GPUs of each
MEMORIES = (24, 40, 80, 141)  # GB of the GPUs that are sold
ENDLESS = 1e9  # GiB
_ERROR = 1.5
"""What arithmetic needs more than this many times is not simulated."""

Values = Mapping[str, Any]
"""Changed keys of a recipe."""

Lever = Sequence[Values]
"""The alternatives of one thing to change, the mildest first."""

_UNCHANGED = "none but rounding"
_OFFLOADED = "gradients and weights go to the machine's memory and back in each step, and Adam runs on its cores"


@dataclass(frozen=True)
class Proposal:
    """A change with which the training fits."""

    values: Values
    """Empty where only the machine is another."""
    case: Case
    cost: str
    """In time, by arithmetic."""
    result: str
    """What it means for the trained model."""
    machine: str | None = None
    """Another one, as `--on` takes it; None: the one that was planned for."""

    @property
    def memory(self) -> MemoryEstimate:
        """What it needs then."""
        assert self.case.plan.memory_estimate
        return self.case.plan.memory_estimate

    @property
    def overrides(self) -> list[str]:
        """As on a command line."""
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.values.items()]


@dataclass(frozen=True)
class Fit:
    """Whether a training fits, and what would make it."""

    lack: str | None
    """What there is too little of; None where it fits."""
    memory: MemoryEstimate | None
    """None where train.parallel=auto finds no engine."""
    proposals: tuple[Proposal, ...]


def fit(recipe: Recipe, hardware: Hardware, model: ModelFacts, data: DataSize | None) -> Fit:
    """Plan a recipe, and propose changes where it does not fit. Raises PlanError where it could not run with any amount of memory."""
    assert hardware.gpu
    endless = replace(hardware, gpu=replace(hardware.gpu, memory_gib=ENDLESS), cpu_memory_gib=ENDLESS)
    base = replace(planned(recipe, endless, replace(model, config=None), data), model=model)
    try:
        memory = planned(recipe, hardware, model, data).plan.memory_estimate
    except PlanError as error:  # of train.parallel=auto alone: all else was refused above
        lacks = str(error).partition("by arithmetic: ")[2].partition(f". {REMEDY}")[0]
        return Fit(lacks, None, tuple(_proposals(base, hardware)))
    assert memory
    return Fit(memory.lack and memory.words, memory, tuple(_proposals(base, hardware)) if memory.lack else ())


def changed(recipe: Recipe, values: Values) -> Recipe:
    """The recipe with other values, validated as a file is. Raises ValueError."""
    stated = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        *parents, leaf = key.split(".")
        section = stated
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return Recipe.model_validate_json(json.dumps(stated)).placed(recipe.folder)


def _fitting(base: Case, hardware: Hardware, values: Values) -> Case | None:
    """The recipe planned with other values, if it runs and fits."""
    assert hardware.gpu
    try:
        recipe = changed(base.recipe, values)
        data = None if any(key.startswith("data.") for key in values) else base.data
        # By arithmetic first, and with room to err: a simulated pass takes seconds.
        roomy = replace(hardware, gpu=replace(hardware.gpu, memory_gib=_ERROR * hardware.gpu.memory_gib))
        if not _fits(planned(recipe, roomy, replace(base.model, config=None), data)):
            return None
        case = planned(recipe, hardware, base.model, data)
    except (PlanError, ValueError):
        return None
    return case if _fits(case) else None


def _fits(case: Case) -> bool:
    return case.plan.memory_estimate is not None and case.plan.memory_estimate.lack is None


def _proposals(base: Case, hardware: Hardware) -> list[Proposal]:
    free = _free_levers(base.recipe, hardware, base)
    enough = list(_fewest(base, hardware, free))
    found = [*enough, *_machines(base, hardware)]
    for lever in _levers_that_change_the_result(base.recipe):
        # Beside adapters that fit, a quantized base is no smaller change.
        if "model.quantization" not in lever[0] or not any("model.lora" in one.values for one in found):
            found += list(_fewest(base, hardware, free, lever, [one.values for one in enough]))[:1]
    return found


def _fewest(
    base: Case, hardware: Hardware, free: Sequence[Lever], also: Lever | None = None, enough: Sequence[Values] = ()
) -> Iterator[Proposal]:
    """The changes that pull the fewest levers, of each set of levers the mildest; none that pulls what is `enough` alone."""
    for count in range(1 if also is None else 0, len(free) + 1):
        fits = False
        for levers in combinations(free, count):
            every = [*([also] if also else []), *levers]
            for alternatives in sorted(product(*map(_numbered, every)), key=lambda one: sum(place for place, _ in one)):
                values = {key: value for _, each in alternatives for key, value in each.items()}
                if any(_keys(one) <= _keys(values) for one in enough):
                    continue
                if found := _fitting(base, hardware, values):
                    yield Proposal(values, found, _cost(base, found, hardware), _result(base.recipe, values))
                    fits = True
                    break
        if fits:
            return


def _keys(values: Values) -> set[str]:
    """The levers that are pulled: the engine is one."""
    return {key.replace("fsdp", "deepspeed") for key in values}


def _numbered(lever: Lever) -> list[tuple[int, Values]]:
    return list(enumerate(lever))


def _free_levers(recipe: Recipe, hardware: Hardware, base: Case) -> list[Lever]:
    """Micro-batch, checkpointing and engine, as far as the recipe leaves something to change."""
    train, mode = recipe.train, base.plan.gradient_checkpointing.value
    micro = train.micro_batch_size
    smaller = [one for one in reversed(divisors(micro)) if one < micro] if isinstance(micro, int) else []
    modes: list[bool | int | str] = [4, 2, "selective", True, "offload"]
    start = 0 if mode is False else modes.index(mode) + 1 if mode in modes and mode is not True else 2
    start = 4 if mode is True else len(modes) if mode == "offload" else start
    engines: list[Values] = []
    if train.parallel is None and train.tensor_parallel_size == train.pipeline_parallel_size == 1:
        # Of what fits, the engine that communicates least comes first.
        names = ["zero2_offload", "zero3_offload"]
        names = names if hardware.ranks == 1 else ["zero1", "zero2", "zero3", *names]
        others = {"train.fsdp": None} if train.fsdp is not None else {}
        engines = [{"train.deepspeed": name} | others for name in names if name != train.deepspeed]
        if hardware.ranks > 1 and train.fsdp is None:
            engines.insert(-2, {"train.fsdp": {}} | ({"train.deepspeed": None} if train.deepspeed else {}))
    levers: list[Lever] = [
        [{"train.micro_batch_size": one} for one in smaller],
        [{"train.gradient_checkpointing": one} for one in modes[start:]],
        engines,
    ]
    return [lever for lever in levers if lever]


def _levers_that_change_the_result(recipe: Recipe) -> Iterator[Lever]:
    model = recipe.model
    if recipe.train.optim == "adamw" and model.lora is None:
        yield [{"train.optim": "adamw_8bit"}]
    if packs := list(_shorter(recipe)):
        yield packs
    if model.lora is None:
        yield [{"model.lora": {}}]
    if model.quantization is None:
        adapters: dict[str, Any] = {"model.lora": {}} if model.lora is None else {}
        yield [adapters | {"model.quantization": "nf4"}]


def _result(recipe: Recipe, values: Values) -> str:
    """What a change means for the trained model."""
    parts = []
    if "train.optim" in values:
        parts.append("close to AdamW's and not equal: the optimizer's moments are rounded to 8 bits")
    if "data.pack_length" in values or (recipe.data.packing and "data.max_length" in values):
        parts.append("steps of as many tokens hold other documents")
    if "data.max_length" in values:
        parts.append(f"documents over {values['data.max_length']} tokens meet data.overlong={recipe.data.overlong}")
    if "model.lora" in values:
        rate = f"they usually take a learning rate of 1e-4 to 5e-4, and train.learning_rate is {recipe.train.learning_rate:g}"
        parts.append(f"adapters of rank 16 are trained and not all weights; {rate}")
    if "model.quantization" in values:
        parts.append("the base is rounded to 4 bits")
    return "; ".join(parts) or _UNCHANGED


def _shorter(recipe: Recipe) -> Iterator[Values]:
    """Packs of a half or a quarter, or such documents without packing; the tokens of a step stay the same."""
    data, train = recipe.data, recipe.train
    for factor in (2, 4):
        length, rest = divmod(recipe.sequence_length, factor)
        if rest:
            return
        values: dict[str, Any] = {"data.pack_length": length} if data.pack_length is not None else {}
        values |= {"data.max_length": length} if length < data.max_length else {}
        if train.global_batch_size is not None and data.packing:
            values["train.global_batch_size"] = train.global_batch_size * factor
        yield values


def _machines(base: Case, hardware: Hardware) -> Iterator[Proposal]:
    """With how many more GPUs the recipe fits; and with how many of each larger memory, where those are fewer."""
    gpu, shapes = hardware.gpu, SHAPES
    assert gpu
    for memory in [gpu.memory_gib, *(memory for memory in MEMORIES if memory > gpu.memory_gib + 1)]:
        same = memory == gpu.memory_gib
        kind = gpu_words(gpu.name if same else "", memory)
        for index, (nodes, gpus) in enumerate(shapes):
            words = f"{f'{nodes}x' if nodes > 1 else ''}{gpus}x{kind}"
            other = described_hardware(words)
            if same and other.ranks <= hardware.ranks:
                continue
            tried = ((values, _fitting(base, other, values)) for values in _engines_elsewhere(base.recipe))
            values, found = next(((values, found) for values, found in tried if found), ({}, None))
            if found:
                cost = _cost_of_machine(base, found, other.ranks / hardware.ranks)
                yield Proposal(values, found, cost, _UNCHANGED, words)
                shapes = shapes[:index]  # more memory is a remedy only where fewer GPUs do
                break


def _engines_elsewhere(recipe: Recipe) -> list[Values]:
    """For another machine: the recipe's engine, and the cheapest that fits."""
    if (
        recipe.train.parallel is not None
        or recipe.train.tensor_parallel_size > 1
        or recipe.train.pipeline_parallel_size > 1
    ):
        return [{}]
    named = {f"train.{key}": None for key in ("deepspeed", "fsdp") if getattr(recipe.train, key) is not None}
    return [{}, {"train.parallel": "auto"} | named]


def _cost_of_machine(base: Case, case: Case, ratio: float) -> str:
    times = f"at best 1/{ratio:g} of" if ratio > 1 else f"about {1 / ratio:g} x"
    cost = "about the same compute" if ratio == 1 else f"{times} the time, and as many GPU-hours"
    return f"{cost}; {_OFFLOADED}" if case.offloads and not base.offloads else cost


def _cost(base: Case, case: Case, hardware: Hardware) -> str:
    """What a change costs in time, by arithmetic."""
    before, after = compute_per_token(base), compute_per_token(case)
    parts = []
    if not before or not after:
        parts.append("the compute of a token is not known for this model")
    elif abs(after / before - 1) > 0.005:
        parts.append(f"{after / before:.2f} x the compute")
    if case.plan.gradient_checkpointing.value == "offload":
        parts.append("each layer's input goes to the machine's memory and back")
    if case.recipe.train.micro_batch_size != base.recipe.train.micro_batch_size:
        parts.append(
            f"passes of {case.plan.micro_batch_size.value} instead of {base.plan.micro_batch_size.value} sequences"
        )
    if case.plan.engine.value != base.plan.engine.value and hardware.ranks > 1:
        sent = [f"{_sent(one) / 1e9:,.0f} GB" for one in (case, base)]
        parts.append(f"each GPU sends or receives {sent[0]} a step instead of {sent[1]}")
    if case.offloads:
        parts.append(_OFFLOADED)
    return "; ".join(parts) or "about the same compute"


def _sent(case: Case) -> float:
    """Bytes that a rank sends or receives in a step, as order_of_engines (sft/plan/engine.py) counts them."""
    micro, parameters = case.plan.gradient_accumulation_steps.value, case.model.parameters or 0
    width = 4 if case.plan.precision.value == "fp32" else 2
    trained = case.adapter_parameters or parameters
    if case.plan.engine.value == FSDP2:  # reduces in fp32
        return micro * (2 * width * parameters + 4 * trained)
    stage = case.deepspeed.stage if case.deepspeed else 0
    if stage == 3:
        return micro * width * (2 * parameters + trained)
    if stage == 0:
        return 8.0 * trained
    return width * trained * (3 if stage == 1 else micro + 1)


def describe(found: Proposal) -> str:
    """What is changed, as a person writes it."""
    return " ".join([*found.overrides, *([f"--on {found.machine}"] if found.machine else [])])
