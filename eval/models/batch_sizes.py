"""Batch sizes that lm_eval's search finds on a GPU: the tuned model is asked in those that were found for the base model.

The search looks at the memory that is free in that moment. Two sizes round differently, which in half precision moves answers.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
