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


def lora_config(lora: Lora, model: Any, new: list[int]) -> Any:
    """peft's configuration of the recipe's adapters.

    Args:
        lora: The recipe's section.
        model: From load_model.
        new: Ids of tokens whose rows in the embeddings are trained besides.

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
        trainable_token_indices=trainable_rows(model, new, modules),
        task_type="CAUSAL_LM",
    )


def untrained_rows(job: Job, model: Any, tokenizer: Any, store: DocumentStore) -> list[int]:
    """Tokens of the data that the base never trained, and that adapters alone would leave so: their rows must train beside them.

    Raises:
        PlanError: The embedding is sharded, and single rows of it cannot be trained.
    """
    lora = job.recipe.model.lora
    if lora is None or trains_embedding(model, lora.target_modules):
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
    targets, names = lora.target_modules, [name for name, _ in model.named_modules()]
    if isinstance(targets, str):
        unmatched = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        unmatched = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if unmatched and targets != "all-linear":
        layers = {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"
        }
        raise ModelError(
            f"model.lora.target_modules: {', '.join(unmatched)} matches no layer of this model"
            f"{did_you_mean(unmatched[0], sorted(layers), '.')} Its linear layers: {', '.join(sorted(layers))}. Or set all-linear."
        )


def _embedding_names(model: Any) -> list[str]:
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is one for one in both)]


def _is_targeted(name: str, target_modules: str | tuple[str, ...]) -> bool:
    """Whether peft gives a layer an adapter by its name; `all-linear` names no embedding."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


def trains_embedding(model: Any, target_modules: str | tuple[str, ...]) -> bool:
    """Whether an embedding gets an adapter itself, and no row of it stays as it was."""
    return any(_is_targeted(name, target_modules) for name in _embedding_names(model))


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
            "model.lora with embedding rows to train (model.new_tokens, or tokens that were never trained): the output embedding of this "
            "model has a bias, or is tied otherwise than its config.json says, which peft cannot train row by row. Train all weights: "
            "model.lora=null."
        )
    names = _embedding_names(model)
    for name in names:
        if _is_targeted(name, target_modules):
            raise ModelError(
                f"model.lora.target_modules names {name}, whose rows of new tokens are trained beside the adapters. "
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
