"""lm_eval's transformers model, as one of several processes that share the documents: their number moves no score.

lm_eval 0.4.13 shares the documents itself, and three things are different here:

- It draws few-shot examples for the documents of one process after another, so that a document's examples depend on the number of
  processes. Here each process draws for all documents, as a single one does, and keeps its own.
- A process with fewer requests repeats its last one and keeps both answers with the document, where a vote over answers or pass@k
  counts them. It does so for models that are sharded over the processes; here each has the whole model, and nothing is repeated.
- It appends the documents of one process to those of another, which moves standard errors that resampling finds. Here they are put
  back in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig

from eval import ranks
from eval.models.placement import BatchSizes, Placement, change_whole
from eval.models.target import Target
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING = object()


def load_hf(
    target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement
) -> DataParallelHFLM:
    """Load the weights."""
    model = DataParallelHFLM(
        pretrained=target.model,
        revision=target.revision or "main",
        tokenizer=tokenizer,
        dtype=settings.dtype,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        add_bos_token=settings.add_bos_token,
        enable_thinking=settings.enable_thinking,
        device="cuda" if torch.cuda.is_available() else "cpu",
        parallelize=placement.spread,
        trust_remote_code=target.trust_remote_code,
    )
    if target.new_tokens:
        from sft.model.new_tokens import embed_new_tokens

        change_whole(model.model, lambda: embed_new_tokens(model.model, tokenizer, target.new_tokens, target.model))
    # The base model's own would stop it at another token, or repeat less. Its lengths would overrule lm_eval's.
    model.model.generation_config = GenerationConfig(
        **settings.generation, eos_token_id=list(settings.stop_token_ids), pad_token_id=model.tokenizer.pad_token_id
    )
    return model


class DataParallelHFLM(HFLM):  # type: ignore[misc]
    """HFLM whose processes communicate through eval/ranks.py, where they learn of each other's errors."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.sizes = BatchSizes()
        self.share(True)

    def share(self, among_all: bool) -> None:
        """Share the documents of the next task, or leave them to this process."""
        # lm_eval sets these where it finds several GPUs, and not for processes on a CPU.
        self._rank, self._world_size = (ranks.rank(), ranks.launched()) if among_all else (0, 1)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        # All processes find the smallest that fits on any of them, so that they decide alike.
        search = super()._detect_batch_size
        return self.sizes.decide(lambda: int(search(requests, pos)))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Batch sizes that were found. A number of requests, a bare number, counts as the same on all: none is padded."""
        if tensor.ndim == 0:
            return tensor.repeat(self.world_size)
        return torch.tensor(list(chain.from_iterable(ranks.exchange(tensor.tolist()))))

    def gather_object(self, obj: dict[str, Any], dst: int = 0) -> list[dict[str, Any]] | None:
        """Answers and scores of all documents, on rank 0: those of all processes as one, in the documents' order."""
        if self.world_size == 1:
            return [obj]
        found = ranks.collect(obj)
        return [in_order(found)] if found else None

    def barrier(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            ranks.exchange(None)


def in_order(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one process would have found.

    Args:
        found: By process; per task its samples, or its scores by metric and filter.

    >>> in_order([{"arc": {("acc", "none"): [0, 2]}}, {"arc": {("acc", "none"): [1]}}])
    {'arc': {('acc', 'none'): [0, 1, 2]}}
    """
    return {task: _task_in_order([one[task] for one in found]) for task in found[0]}


def _task_in_order(found: Sequence[Any]) -> Any:
    if isinstance(found[0], dict):
        keys = dict.fromkeys(chain.from_iterable(found))
        return {key: _interleaved([one.get(key, []) for one in found]) for key in keys}
    samples = list(chain.from_iterable(found))
    filters = list(dict.fromkeys(one["filter"] for one in samples))
    return sorted(samples, key=lambda one: (filters.index(one["filter"]), one["doc_id"]))


def _interleaved(lists: Iterable[list[Any]]) -> list[Any]:
    rounds = zip_longest(*lists, fillvalue=_NOTHING)
    return [value for one in rounds for value in one if value is not _NOTHING]


def share_documents(task: Task) -> None:
    """Have a task draw its few-shot examples as if one process asked everything."""
    build = task.build_all_requests
    if getattr(build, "shares_documents", False):
        return

    def build_all_requests(*, rank: int = 0, world_size: int = 1, **keys: Any) -> None:
        build(rank=0, world_size=1, **keys)
        task._instances = [one for one in task._instances if one.doc_id % world_size == rank]

    build_all_requests.shares_documents = True  # type: ignore[attr-defined]
    task.build_all_requests = build_all_requests


def fewest_documents(tasks: Iterable[Task], limit: int | None) -> int:
    """Of the task with the fewest."""
    numbers = [len(task.eval_docs) for task in tasks]
    return min(number if limit is None else min(number, limit) for number in numbers)
