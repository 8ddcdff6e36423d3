"""The rows of model.new_tokens in the model's embeddings: they start as the mean of the other tokens' rows, and train.

A random row would differ between ranks and starts, and could outweigh every token in the output; the mean does neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sft.data.store import DocumentStore
from sft.data.tokenizer import check_vocabulary, new_token_ids
from sft.errors import PlanError
from sft.model.live import gathered
from sft.plan.job import Job

_ROWS_AT_ONCE = 8192
"""Rows summed in float64 at a time: a whole large embedding would take gigabytes."""

_SAMPLED = 4096
"""Rows of ordinary tokens that the rows of special tokens are compared with, at most."""

_NEAR = 0.05
"""Of the usual distance between two rows. The mean of _SAMPLED rows is within 0.012 of the true one."""

_TOKENS_AT_ONCE = 1 << 24
_NAMED = 8


def check_new_tokens(job: Job) -> None:
    """Refuse new tokens that would stay untrained.

    Raises:
        PlanError: Adapters under ZeRO-3.
    """
    model = job.recipe.model
    if model.new_tokens and model.lora is not None and _is_zero_3(job):
        # peft reads the rows by CUDA alone, and gives TRL's fused head a weight of its own making, which cannot be gathered.
        raise PlanError(
            "model.new_tokens with model.lora under ZeRO-3: peft cannot train single rows of a sharded embedding, and the new tokens "
            "would stay untrained. Set train.deepspeed=zero2, or train all weights: model.lora=null."
        )


def check_untrained(job: Job, tokenizer: Any, untrained: Sequence[int]) -> None:
    """Refuse rows that were never trained where they cannot be trained beside adapters.

    Raises:
        PlanError: The embedding is sharded, or in pipeline stages.
    """
    train = job.recipe.train
    is_split = max(train.tensor_parallel_size, train.pipeline_parallel_size) > 1
    if untrained and (_is_zero_3(job) or job.fsdp is not None or is_split):
        raise PlanError(
            f"model.lora: the embeddings of {named(tokenizer, untrained)}, which the data holds, were never trained, and beside adapters "
            "peft cannot train single rows of an embedding that is sharded or in pipeline stages. Train on DDP or with "
            "train.deepspeed=zero2, or all weights: model.lora=null."
        )


def _is_zero_3(job: Job) -> bool:
    return job.deepspeed is not None and job.deepspeed.stage == 3


def embed_new_tokens(model: Any, tokenizer: Any, new_tokens: Sequence[str], name: str) -> None:
    """Give the new tokens their rows: the mean of the rows that belong to other tokens, in input and output alike.

    The embedding is made larger where it has no spare rows for them, and config.vocab_size follows.

    Args:
        model: Just loaded; under ZeRO-3 sharded, and every rank takes part.
        tokenizer: From load_tokenizer, or of a run's final/.
        new_tokens: The recipe's.
        name: The model's, for messages.

    Raises:
        ModelError: The tokenizer has more tokens of its own than the embedding has rows.
    """
    rows = model.get_input_embeddings().num_embeddings
    check_vocabulary(tokenizer, new_tokens, rows, name)
    if not new_tokens:
        return
    new, known = new_token_ids(tokenizer, new_tokens), set(tokenizer.get_vocab().values())
    if max(known) >= rows:
        # mean_resizing would draw the rows from a distribution around the mean.
        model.resize_token_embeddings(max(known) + 1, mean_resizing=False)
    output = model.get_output_embeddings()
    parameters = [model.get_input_embeddings().weight, output.weight, getattr(output, "bias", None)]
    for parameter in {id(one): one for one in parameters if one is not None}.values():
        _start_as_mean(parameter, new, sorted(known - set(new)))


def _start_as_mean(parameter: Any, new: list[int], others: list[int]) -> None:
    with torch.no_grad(), gathered([parameter], changed_on=0):
        ids = torch.tensor(others, device=parameter.device)
        total = torch.zeros(parameter.shape[1:], dtype=torch.float64, device=parameter.device)
        for some in torch.split(ids, _ROWS_AT_ONCE):
            total += parameter[some].double().sum(0)
        parameter[new] = (total / len(others)).to(parameter.dtype)


def untrained_tokens(model: Any, tokenizer: Any, store: DocumentStore, new_tokens: Sequence[str]) -> list[int]:
    """Ids of the data's special tokens whose embedding rows were never trained, rising: adapters would leave them so.

    Such a row is what it was made as: nearly that of another special token, of a spare row, or the mean of all. New tokens are left out.

    Args:
        model: From load_model; where its weights are sharded, every rank takes part.
        tokenizer: From load_tokenizer.
        store: The prepared documents.
        new_tokens: The recipe's.
    """
    new, vocabulary = set(new_token_ids(tokenizer, new_tokens)), set(tokenizer.get_vocab().values())
    special = sorted(set(tokenizer.added_tokens_decoder) - new)
    ordinary = sorted(vocabulary - set(special) - new)
    suspects = _made_up(model.get_input_embeddings().weight, special, ordinary, vocabulary)
    found: set[int] = set()
    for start in range(0, len(store.tokens), _TOKENS_AT_ONCE) if suspects else ():
        tokens = store.tokens[start : start + _TOKENS_AT_ONCE]
        found |= set(tokens[np.isin(tokens, suspects)].tolist())
    return sorted(found)


def _made_up(weight: Any, special: list[int], ordinary: list[int], vocabulary: set[int]) -> list[int]:
    """The special tokens whose rows are nearly another special token's, a spare one, or the mean of the ordinary ones."""
    if weight.is_meta:  # on this rank
        return []
    with torch.no_grad(), gathered([weight]):
        rows = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        spare = [row for row in range(len(rows)) if row not in vocabulary][:1]
        sample = rows[ordinary[:: len(ordinary) // _SAMPLED + 1]].float()
        others = torch.cat([rows[special + spare].float(), sample.mean(0, keepdim=True)])
    if len(sample) < 2 or not special:
        return []
    usual = (sample - sample.roll(1, 0)).norm(dim=1).median()
    distances = torch.cdist(others[: len(special)], others)
    distances.fill_diagonal_(torch.inf)
    near = distances.min(1).values < _NEAR * usual
    return [token for token, is_near in zip(special, near.tolist(), strict=True) if is_near]


def named(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Tokens by name, for a message."""
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(tokens[:_NAMED]))]
    return ", ".join(names) + (f" and {len(tokens) - _NAMED} more" if tokens[_NAMED:] else "")
