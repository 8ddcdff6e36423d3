"""Configures adapters (LoRA): the layers that get one, and the embedding rows that train beside them."""

from __future__ import annotations

import re
from typing import Any

import torch

from sft.data.store import DocumentStore
from sft.errors import ModelError, did_you_mean
from sft.model.new_tokens import check_untrained, untrained_tokens
from sft.plan.job import Job
from sft.recipe.schema import Lora


def lora_config(lora: Lora, model: Any, rows: list[int]) -> Any:
    """peft's configuration of the recipe's adapters.

    Args:
        lora: The recipe's section.
        model: From load_model.
        rows: Ids of tokens whose rows in the embeddings are trained besides.

    Raises:
        ModelError: Rows of this model's embeddings cannot be trained so, or there are no layers of a name.
    """
    from peft import LoraConfig

    check_targets(lora, model)
    modules = lora.target_modules
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        trainable_token_indices=_trainable_rows(model, rows, modules) if rows else None,
        task_type="CAUSAL_LM",
    )


def untrained_rows(job: Job, model: Any, tokenizer: Any, store: DocumentStore) -> list[int]:
    """Tokens of the data that the base never trained, and that adapters alone would leave so: their rows must train beside them.

    Raises:
        PlanError: The embedding is sharded, and single rows of it cannot be trained.
    """
    lora = job.recipe.model.lora
    if lora is None or any(_is_targeted(name, lora.target_modules) for name in _embedding_names(model)):
        return []
    untrained = untrained_tokens(model, tokenizer, store, job.recipe.model.new_tokens)
    check_untrained(job, tokenizer, untrained)
    return untrained


def check_targets(lora: Lora, model: Any) -> None:
    """Refuse names of layers that the model does not have: peft trains the others, and says nothing.

    Args:
        lora: The recipe's section.
        model: Any of its class, whatever its weights.

    Raises:
        ModelError: One matches nothing.
    """
    targets = (lora.target_modules,) if isinstance(lora.target_modules, str) else lora.target_modules
    # A string is a pattern for full names; a list holds their last parts.
    names = [name for name, _ in model.named_modules()]
    whole = isinstance(lora.target_modules, str)
    unmatched = [one for one in targets if not any(_is_targeted(name, one if whole else (one,)) for name in names)]
    if not unmatched or lora.target_modules == "all-linear":
        return
    layers = {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"
    }
    raise ModelError(
        f"model.lora.target_modules: {', '.join(unmatched)} matches no layer of this model"
        f"{did_you_mean(unmatched[0], sorted(layers), '.')} Its linear layers: {', '.join(sorted(layers))}. Or set all-linear."
    )


def _is_targeted(name: str, target_modules: str | tuple[str, ...]) -> bool:
    """Whether peft gives a layer an adapter by its name; `all-linear` names no embedding."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


def _embedding_names(model: Any) -> list[str]:
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is one for one in both)]


def _trainable_rows(model: Any, rows: list[int], target_modules: str | tuple[str, ...]) -> dict[str, list[int]]:
    """The rows in peft's words: ids by the name of the embedding."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output.weight is embedding.weight
    config_says_tied = bool(model.config.to_dict().get("tie_word_embeddings", False))
    # peft follows the flag, not the weights, and leaves a bias out of its forward.
    if tied != config_says_tied or getattr(output, "bias", None) is not None:
        raise ModelError(
            "model.lora with embedding rows to train (model.new_tokens, or tokens that were never trained): the output embedding of this "
            "model has a bias, or is tied otherwise than its config.json says, which peft cannot train row by row. Train all weights: "
            "model.lora=null."
        )
    names = _embedding_names(model)
    targeted = [name for name in names if _is_targeted(name, target_modules)]
    if targeted:
        raise ModelError(
            f"model.lora.target_modules names {targeted[0]}, whose rows of new tokens are trained beside the adapters. "
            "Leave it out of target_modules."
        )
    return dict.fromkeys(names, rows)


def show_head(model: Any) -> None:
    """Let TRL read the output embedding as it reads a plain layer: peft's wrapper of a head whose rows are trained has no `bias`."""
    output = model.get_output_embeddings()
    if not hasattr(output, "bias"):
        output.bias = None
