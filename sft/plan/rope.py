"""Decides how many positions a model has where model.rope_scaling extends them, and refuses models whose positions cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from sft.hub.model_facts import PER_LAYER, ModelFacts
from sft.plan.plan import Decision
from sft.recipe.schema import Recipe


def original_positions(recipe: Recipe, model: ModelFacts) -> int | None:
    """Positions that the model was pretrained with; None where they are not known."""
    rope = recipe.model.rope_scaling
    return (rope and rope.original_max_position_embeddings) or model.max_position_embeddings


def positions(recipe: Recipe, model: ModelFacts) -> int | None:
    """Positions that the model has in training, and in final/."""
    rope, original = recipe.model.rope_scaling, original_positions(recipe, model)
    return int(rope.factor * original) if rope and original else model.max_position_embeddings


def resolve_rope(recipe: Recipe, model: ModelFacts) -> Decision[str]:
    """`none`, or the kind of scaling, and how far it reaches."""
    rope = recipe.model.rope_scaling
    if rope is None:
        return Decision("none", "the default: the model's own positions")
    known = original_positions(recipe, model)
    reach = f"{known} positions become {positions(recipe, model)}" if known else f"{rope.factor:g} times the positions"
    return Decision(rope.rope_type, f"the recipe: {reach}; final/config.json holds it")


def rope_refusals(recipe: Recipe, model: ModelFacts) -> Iterator[str]:
    """Why the model's positions cannot be scaled so."""
    rope = recipe.model.rope_scaling
    if rope is None or model.model_type is None:
        return
    key, kind = f"model.rope_scaling={rope.rope_type}", model.rope_type
    if model.architecture is None or kind is None or kind == PER_LAYER:
        yield (
            f"{key}: models of type {model.model_type} have no rotary positions, others in each kind of layer, or code of their own that "
            "may not read it. Remove it, or set what they have in config.json."
        )
    elif kind != "default" and rope.original_max_position_embeddings is None:
        yield (
            f"{key}: the model's {model.max_position_embeddings} positions are already scaled ({kind}). Remove it, or state those it "
            "was pretrained with: model.rope_scaling.original_max_position_embeddings."
        )
