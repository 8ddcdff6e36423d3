"""Splits the layers into pipeline stages, and refuses what cannot run in stages.

P stages pass M micro-batches a step from one to the next and back. While a pipeline fills and drains, its stages wait:

    bubble = (P - 1) / (M + P - 1)      of the step's time, if all stages take equally long
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from sft.hub.model_facts import ModelFacts
from sft.plan.case import Case
from sft.plan.plan import Decision, stated
from sft.recipe.schema import Recipe

PIPELINE = "pipeline parallel"
"""The engine's name."""

TYPES = frozenset("gemma gemma2 gemma3_text granite llama mistral olmo2 phi3 qwen2 qwen3 smollm3".split())
"""Types of models whose layers pass on nothing but hidden states, each compared with the unsplit model."""


def bubble(stages: int, micro_batches: int) -> float:
    """The fraction of a step in which a stage waits.

    >>> bubble(4, 12), bubble(1, 8)
    (0.2, 0.0)
    """
    return (stages - 1) / (micro_batches + stages - 1)


def split_layers(layers: int, stages: int, head: float = 0.0) -> tuple[range, ...]:
    """The layers of each stage, so that the slowest takes the least time.

    Later stages get those left over: under 1F1B the first stages hold the activations of more micro-batches.

    Args:
        layers: All of them, each of equal cost; at least one for each stage.
        stages: Two or more.
        head: What the output head costs, in layers; it is with the last stage.

    >>> split_layers(8, 3), split_layers(28, 4, head=3.0)[-1]
    ((range(0, 2), range(2, 5), range(5, 8)), range(23, 28))
    """

    def slowest(last: int) -> float:
        return max(ceil((layers - last) / (stages - 1)), last + head)

    last = min(range(layers - stages + 1, 0, -1), key=slowest)
    each, more = divmod(layers - last, stages - 1)
    counts = [each + (number >= stages - 1 - more) for number in range(stages - 1)] + [last]
    ends = [sum(counts[: number + 1]) for number in range(stages)]
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def layers_of_stages(recipe: Recipe, model: ModelFacts) -> tuple[range, ...]:
    """The layers of each stage, by the weights of layers and head; empty where they are not known or too few."""
    stages, layers = recipe.train.pipeline_parallel_size, model.num_hidden_layers
    if stages == 1 or layers is None or layers < stages:
        return ()
    head = (model.vocab_size or 0) * (model.hidden_size or 0)
    return split_layers(layers, stages, head / model.layer_size if model.layer_size else 0.0)


def describe(stages: tuple[range, ...]) -> str:
    """The layers of each stage in words.

    >>> describe((range(0, 2), range(2, 3)))
    '0-1 | 2'
    """
    return " | ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in stages)


def resolve_pipeline_parallel(recipe: Recipe, model: ModelFacts, micro_batches: int) -> Decision[int]:
    """Stages, with the layers of each and the time that they wait."""
    size, how = recipe.train.pipeline_parallel_size, ""
    if size > 1:
        idle = f"{bubble(size, micro_batches):.1%} idle ({size - 1} / ({micro_batches} + {size - 1}))"
        how = f": layers {describe(layers_of_stages(recipe, model))}; with {micro_batches} micro-batches a step {idle}"
    return Decision(size, stated(recipe.train, "pipeline_parallel_size") + how)


def pipeline_refusals(case: Case) -> Iterator[str]:
    """What cannot run in stages, a line each."""
    recipe, model, size = case.recipe, case.model, case.recipe.train.pipeline_parallel_size
    key, layers = f"train.pipeline_parallel_size={size}", case.model.num_hidden_layers
    if size == 1:
        return
    if model.model_type is not None and model.model_type not in TYPES:
        yield (
            f"{key}: models of type {model.model_type} were not tested in stages, and their layers may exchange more than hidden states. "
            f"Set it to 1, or use a model of type {', '.join(sorted(TYPES))}."
        )
    elif layers is None:
        name = recipe.model.name_or_path
        yield f"{key}: how many layers {name} has is known once it is downloaded: hf download {name}"
    elif layers < size:
        yield f"{key}, and the model has {layers} layers: each stage needs one. Set it to at most {layers}."
    micro_batches = case.plan.gradient_accumulation_steps.value
    if micro_batches < size:
        yield (
            f"{key}, and a step has {micro_batches} micro-batch(es): stages would wait {bubble(size, micro_batches):.0%} of the time, and "
            "the 1F1B schedule needs one for each stage or more. Lower train.micro_batch_size, raise the batch, or use fewer stages."
        )
