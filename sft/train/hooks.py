"""Makes the recipe's own callbacks, and shows their errors as a mistake in the user's file."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.errors import RecipeError, RunError
from sft.recipe.local_code import callbacks, code_file, explained, load_code
from sft.recipe.schema import Recipe

_EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def own_callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """The callbacks of train.callbacks, in its order.

    Raises:
        RecipeError: One is no class of TrainerCallback, or cannot be made with its arguments.
    """
    found = []
    for callback in callbacks(recipe):
        key = f"train.callbacks={callback.path}"
        file = code_file(recipe, callback.path).resolve()
        made = load_code(recipe, "train.callbacks", callback.path)
        if not (isinstance(made, type) and issubclass(made, TrainerCallback)):
            raise RecipeError(f"{key} is no subclass of transformers.TrainerCallback. Have it inherit from that.")
        try:
            one = made(**callback.arguments)
        except Exception as error:
            given = ", ".join(callback.arguments) or "none"
            raise RecipeError(f"{key} cannot be made with its arguments ({given}): {explained(error, file)}.") from None
        for event in _EVENTS:
            if getattr(made, event) is not getattr(TrainerCallback, event):
                setattr(one, event, _guarded(getattr(one, event), f"{key} fails in {event}", file))
        found.append(one)
    return found


def _guarded(method: Callable[..., Any], what: str, file: Path) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise RunError(f"{what}: {explained(error, file)}. Correct it, and start again.") from None

    return call
