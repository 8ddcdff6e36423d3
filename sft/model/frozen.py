"""Leaves parameters as they are that model.freeze names, while the others are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sft.errors import ModelError


def frozen_names(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The parameters that a pattern is found in.

    >>> frozen_names(["embed", r"layers\\.[01]\\."], ["embed_tokens.weight", "layers.1.up.weight", "layers.10.up.weight"])
    ['embed_tokens.weight', 'layers.1.up.weight']
    """
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def check_frozen(patterns: Sequence[str], empty: Any) -> None:
    """Refuse patterns that match no parameter of the model, and ones that leave nothing to train.

    Raises:
        ModelError: All that is wrong.
    """
    names = [name for name, _ in empty.named_parameters()]
    for pattern in patterns:
        if not frozen_names([pattern], names):
            parts = sorted({part for name in names for part in name.split(".") if not part.isdecimal()})
            raise ModelError(
                f"model.freeze: {pattern} is found in no parameter's name. Names are like {names[0]}; their parts: {', '.join(parts)}."
            )
    if len(frozen_names(patterns, names)) == len(names):
        raise ModelError("model.freeze leaves all parameters as they are, so that nothing is trained. Name fewer.")


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Leave the parameters as they are that a pattern is found in. A tied weight goes by its first name."""
    names = [name for name, _ in model.named_parameters()]
    for name in frozen_names(patterns, names):
        model.get_parameter(name).requires_grad_(False)
