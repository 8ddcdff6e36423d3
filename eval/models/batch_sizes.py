"""Batch sizes that lm_eval's search finds on a GPU: the tuned model is asked in those that were found for the base model.

The search looks at the memory that is free in that moment. Two sizes round differently, which in half precision moves answers.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft.errors import EvaluationError

Found = dict[str, list[int]]
"""Per task the sizes of its searches, in their order: `batch_sizes_found` of results.json."""


@dataclass
class Searches:
    """The searches of one task.

    Args:
        given: What was found for the base model; empty where there is nothing to follow.
        strict: Whether a smaller size, where there is no room for the given one, is a failure.
    """

    given: Sequence[int] = ()
    strict: bool = False
    found: list[int] = field(default_factory=list)

    def decide(self, search: Callable[[], int]) -> int:
        """The size of the next batches.

        Args:
            search: Finds the largest that fits.

        Raises:
            EvaluationError: The given one does not.
        """
        size, number = search(), len(self.found)
        if number < len(self.given):
            if size < self.given[number] and self.strict:
                raise EvaluationError(
                    f"the base model was asked in batches of {self.given[number]}, and there is memory for {size} now: in half precision "
                    f"that moves answers. Set eval.batch_size={size}, or end what else uses the GPU."
                )
            size = min(size, self.given[number])
        self.found.append(size)
        return size


def is_searched(settings: Mapping[str, Any]) -> bool:
    """Whether sizes are found by search, of settings as results.json has them."""
    return bool(settings.get("backend") == "hf" and settings.get("batch_size") == "auto")


def differing_sizes(base: Mapping[str, Any], tuned: Mapping[str, Any]) -> list[str]:
    """Each task that was asked in batches of other sizes, with both; none in fp32, whose rounding moves no score worth the name.

    Args:
        base: results.json of the base model.
        tuned: results.json of the tuned model.
    """
    settings = tuned["settings"]
    if not is_searched(settings) or settings["dtype"] == "float32":
        return []
    found: list[Found] = [one.get("batch_sizes_found", {}) for one in (base, tuned)]
    return [
        f"  {task}: base {', '.join(map(str, found[0][task]))}, tuned {', '.join(map(str, found[1][task]))}"
        for task in sorted(found[0].keys() & found[1].keys())
        if found[0][task] != found[1][task]
    ]
