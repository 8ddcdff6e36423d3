"""The rows of model.new_tokens in the model's embeddings: they start as the mean of the other tokens' rows, and train.

A random row would differ between ranks and starts, and could outweigh every token in the output; the mean does neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sft.errors import ModelError, PlanError
from sft.job import Job
from sft.tokenizer import check_vocabulary, new_token_ids

_ROWS_AT_ONCE = 8192
"""Rows summed in float64 at a time: a whole large embedding would take gigabytes."""


def check_new_tokens(job: Job) -> None:
    """Refuse new tokens that would stay untrained.

    Raises:
        PlanError: Adapters under ZeRO-3.
    """
    model, sharded = job.recipe.model, job.deepspeed is not None and job.deepspeed.stage == 3
    if model.new_tokens and model.lora is not None and sharded:
        # peft reads the rows by CUDA alone, and gives TRL's fused head a weight of its own making, which cannot be gathered.
        raise PlanError(
            "model.new_tokens with model.lora under ZeRO-3: peft cannot train single rows of a sharded embedding, and the new tokens "
            "would stay untrained. Set train.deepspeed=zero2, or train all weights: model.lora=null."
        )


def _gathered(parameter: Any) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return context


def _start_as_mean(parameter: Any, new: list[int], others: list[int]) -> None:
    with torch.no_grad(), _gathered(parameter):
        ids = torch.tensor(others, device=parameter.device)
        total = torch.zeros(parameter.shape[1:], dtype=torch.float64, device=parameter.device)
        for some in torch.split(ids, _ROWS_AT_ONCE):
            total += parameter[some].double().sum(0)
        parameter[new] = (total / len(others)).to(parameter.dtype)


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
    for parameter in {id(parameter): parameter for parameter in parameters if parameter is not None}.values():
        _start_as_mean(parameter, new, sorted(known - set(new)))


def trainable_rows(model: Any, new: list[int], target_modules: str | tuple[str, ...]) -> dict[str, list[int]] | None:
    """The rows that are trained beside adapters, in peft's words: ids by the name of the embedding.

    Args:
        model: From load_model.
        new: Ids of the new tokens.
        target_modules: The recipe's: names of layers that get an adapter, or a pattern.

    Returns:
        None where there are no new tokens.

    Raises:
        ModelError: The model's embeddings are of a kind that peft would train wrongly, or get an adapter already.
    """
    if not new:
        return None
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output.weight is embedding.weight
    # peft follows the flag, not the weights, and leaves a bias out of its forward.
    if (
        tied != bool(model.config.to_dict().get("tie_word_embeddings", False))
        or getattr(output, "bias", None) is not None
    ):
        raise ModelError(
            "model.new_tokens with model.lora: the output embedding of this model has a bias, or is tied otherwise than its "
            "config.json says, which peft cannot train row by row. Train all weights: model.lora=null."
        )
    names = [name for name, module in model.named_modules() if module is embedding or module is output]
    for name in names:
        if isinstance(target_modules, str):
            targeted = re.fullmatch(target_modules, name) is not None
        else:
            targeted = any(name == target or name.endswith(f".{target}") for target in target_modules)
        if targeted:
            raise ModelError(
                f"model.lora.target_modules names {name}, whose rows of model.new_tokens are trained beside the adapters. "
                "Leave it out of target_modules."
            )
    return dict.fromkeys(names, new)


def show_head(model: Any) -> None:
    """Let TRL read the output embedding as it reads a plain layer.

    Args:
        model: With adapters. peft's wrapper of a head whose rows are trained has its weight, and no `bias`.
    """
    output = model.get_output_embeddings()
    if not hasattr(output, "bias"):
        output.bias = None
