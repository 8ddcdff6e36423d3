"""Configures adapters (LoRA): the layers that get one, and the embedding rows that train beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings

import torch

from sft.data.store import DocumentStore
from sft.errors import ModelError, did_you_mean
from sft.model.new_tokens import check_untrained, untrained_tokens
from sft.plan.job import Job
from sft.recipe.schema import Lora, Model

_SEED = 0
"""Of adapters that start as a part of the base, found with random numbers: the same part is taken whenever they are loaded."""


def lora_config(lora: Lora, model: Any, rows: list[int]) -> Any:
    """peft's configuration of the recipe's adapters.

    Args:
        lora: The recipe's section.
        model: From load_model.
        rows: Ids of tokens whose rows in the embeddings are trained besides.

    Raises:
        ModelError: Rows of this model's embeddings cannot be trained so.
    """
    if rows and lora.takes_from_base:
        raise ModelError(
            f"model.lora.init_lora_weights={lora.init_lora_weights} with embedding rows to train (model.new_tokens, or tokens that were "
            "never trained): peft cannot make adapters of the original base out of both. Set model.lora.init_lora_weights=true."
        )
    rows = [] if _saves_embeddings(lora, model) else rows
    return _config(
        lora,
        model,
        lora.init_lora_weights,
        trainable_token_indices=_trainable_rows(model, rows, lora.target_modules) if rows else None,
    )


def _config(lora: Lora, model: Any, init: bool | str, **more: Any) -> Any:
    from peft import LoraConfig

    modules: Any = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    if lora.layers_to_transform and modules == "all-linear":  # peft takes numbers of layers beside names only
        head = model.get_output_embeddings()
        modules = sorted(
            {name.rpartition(".")[2] for name, one in model.named_modules() if _is_linear(one) and one is not head}
        )
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=modules,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        init_lora_weights=init,
        modules_to_save=list(lora.modules_to_save) or None,
        layers_to_transform=list(lora.layers_to_transform) or None,
        layers_pattern=lora.layers_pattern,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        task_type="CAUSAL_LM",
        **more,
    )


def add_adapters(job: Job, model: Any, config: Any) -> Any:
    """The model with new adapters, in fp32 where the engine keeps no copies; their start follows from the recipe's seed alone."""
    lora, zero = job.recipe.model.lora, job.deepspeed
    assert lora is not None
    # ZeRO-3 gathers parameters of one dtype together; quantized weights have another anyway.
    same_dtype = zero is not None and zero.stage == 3 and job.recipe.model.quantization is None
    adapted = start_adapters(lora, model, config, job.recipe.train.seed, autocast_adapter_dtype=not same_dtype)
    for parameter in adapted.parameters() if zero is None else ():
        if parameter.requires_grad:  # peft leaves modules_to_save and DoRA's lengths in the dtype of the base
            parameter.data = parameter.data.float()
    return adapted


def start_adapters(lora: Lora, model: Any, config: Any, seed: int = 0, **peft: Any) -> Any:
    """The model with new adapters; `peft` is what get_peft_model takes."""
    from peft import get_peft_model

    torch.manual_seed(_SEED if lora.takes_from_base else seed)
    return get_peft_model(model, config, **peft)


def load_adapters(base: Any, folder: Path) -> Any:
    """The base with the adapters that peft has saved. A base that adapters took a part of at the start loses the same part."""
    from peft import PeftModel

    torch.manual_seed(_SEED)
    return PeftModel.from_pretrained(base, folder)


def merge_adapters(lora: Lora, base: Any, folder: Path) -> Any:
    """The base with saved adapters merged. Where they took a part of the base at the start, `folder` then holds ones of the whole base."""
    if not lora.takes_from_base:
        return load_adapters(base, folder).merge_and_unload()
    from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict

    model = start_adapters(lora, base, PeftConfig.from_pretrained(folder))
    with TemporaryDirectory(dir=folder.parent) as start:
        model.save_pretrained(f"{start}/start")
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        with catch_warnings(action="ignore"):  # it loads the start beside what it became
            model.save_pretrained(folder, path_initial_model_for_weight_conversion=f"{start}/start")
    (folder / "README.md").unlink(missing_ok=True)
    return model.merge_and_unload()


def untrained_rows(job: Job, model: Any, tokenizer: Any, store: DocumentStore) -> list[int]:
    """Tokens of the data that the base never trained, and that adapters alone would leave so: their rows must train beside them.

    Raises:
        PlanError: The embedding is sharded, and single rows of it cannot be trained.
    """
    lora = job.recipe.model.lora
    if lora is None or any(_is_targeted(name, lora.target_modules) for name in _embedding_names(model)):
        return []
    if _saves_embeddings(lora, model):
        return []
    untrained = untrained_tokens(model, tokenizer, store, job.recipe.model.new_tokens)
    check_untrained(job, tokenizer, untrained)
    return untrained


def check_adapters(model: Model, empty: Any) -> None:
    """Refuse names, numbers and patterns of model.lora that match nothing, and layers that cannot be trained whole.

    Args:
        model: The recipe's section; with `lora`.
        empty: A model of the class, without values; it gets adapters.

    Raises:
        ModelError: All that is wrong.
    """
    from peft import get_peft_model
    from peft.utils.other import get_pattern_key

    lora = model.lora
    assert lora is not None
    problems = [*_cannot_target(lora, empty), *_cannot_save(model, empty)]
    count = getattr(empty.config.get_text_config(), "num_hidden_layers", None)
    if count is not None and max(lora.layers_to_transform, default=0) >= count:
        problems.append(f"model.lora.layers_to_transform: the model has {count} layers, numbered from 0.")
    if problems:
        raise ModelError("\n".join(problems))
    try:
        with catch_warnings(action="ignore"):  # peft's, of what is refused here
            adapted = get_peft_model(empty, _config(lora, empty, True), low_cpu_mem_usage=True)
    except ValueError as error:
        # A module that peft takes none of stands in its message over several lines.
        raise ModelError(f"model.lora: {' '.join(str(error).split()[:40])}") from None
    names = [name for name, layer in adapted.named_modules() if hasattr(layer, "lora_A") and len(layer.lora_A)]
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in sorted(patterns.keys() - {get_pattern_key(patterns, name) for name in names}):
            problems.append(
                f"model.lora.{key}: {pattern} matches no layer with an adapter, or one that a pattern before it matches."
            )
    if problems:
        raise ModelError("\n".join(problems))


def differing_adapters(model: Any, lora: Lora) -> Iterator[str]:
    """What is otherwise than in the recipe's section, of each live layer with an adapter: its rank, scale, dropout or kind."""
    from peft.utils.other import get_pattern_key

    for name, layer in model.named_modules():
        if not (hasattr(layer, "lora_A") and len(layer.lora_A)):
            continue
        rank = lora.rank_pattern.get(get_pattern_key(lora.rank_pattern, name), lora.r)
        alpha = lora.alpha_pattern.get(get_pattern_key(lora.alpha_pattern, name), lora.lora_alpha)
        dropout = getattr(layer.lora_dropout["default"], "p", 0.0)
        planned = (rank, alpha / (sqrt(rank) if lora.use_rslora else rank), lora.lora_dropout, lora.use_dora)
        running = (layer.r["default"], layer.scaling["default"], dropout, bool(len(layer.lora_magnitude_vector)))
        if planned != running:
            yield f"{name} has rank, scale, dropout and DoRA {running} instead of {planned}"
    saved = [
        name
        for name, layer in model.named_modules()
        if hasattr(layer, "original_module") and hasattr(layer, "modules_to_save")
    ]
    for wanted in lora.modules_to_save:
        if not any(name.endswith(f".{wanted}") for name in saved):
            yield f"{wanted} is not trained whole"


def _cannot_target(lora: Lora, empty: Any) -> Iterator[str]:
    key, names = "model.lora.target_modules", [name for name, _ in empty.named_modules()]
    # A string is a pattern for full names; a list holds their last parts.
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else [(one,) for one in lora.target_modules]
    linear = sorted({name.rpartition(".")[2] for name, layer in empty.named_modules() if _is_linear(layer)})
    for target in targets:
        # Where it is one of several, peft trains the others, and says nothing.
        if target != "all-linear" and not any(_is_targeted(name, target) for name in names):
            word = target if isinstance(target, str) else target[0]
            hint = did_you_mean(word, linear, ".")
            yield f"{key}: {word} matches no layer of this model{hint} Its linear layers: {', '.join(linear)}. Or set all-linear."
    embedding, head = empty.get_input_embeddings(), empty.get_output_embeddings()
    for name, layer in empty.named_modules():
        if layer is head and _is_targeted(name, lora.target_modules):
            yield f"{key}: {name} cannot have an adapter: the loss is computed from its weight alone. Leave it out."
        elif layer is embedding and embedding.weight is head.weight and _is_targeted(name, lora.target_modules):
            yield f"{key}: {name} shares its weight with the output embedding, which merging changes too. Leave it out."


def _cannot_save(model: Model, empty: Any) -> Iterator[str]:
    lora = model.lora
    assert lora is not None
    layers, key = dict(empty.named_modules()), "model.lora.modules_to_save"
    embedding, head = empty.get_input_embeddings(), empty.get_output_embeddings()
    for wanted in lora.modules_to_save:
        named = {name: layer for name, layer in layers.items() if _is_targeted(name, (wanted,))}
        parts = [part for layer in named.values() for part in layer.modules()]
        if not named:
            last = sorted({name.rpartition(".")[2] for name in layers if name})
            yield f"{key}: {wanted} is no layer of this model{did_you_mean(wanted, last, '.')}"
        elif embedding.weight is head.weight and any(layer in (embedding, head) for layer in named.values()):
            yield f"{key}: {wanted} shares its weight with the other embedding, and peft would train a copy. Leave it out."
        elif model.quantization and any(_is_linear(part) and part is not head for part in parts):
            yield f"{key}: {wanted} is quantized (model.quantization={model.quantization}), and cannot be trained whole. Leave it out."
        elif any(_is_targeted(name, lora.target_modules) for name in named):
            yield f"{key}: {wanted} is also in target_modules. Name it in one of them."


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"


def _saves_embeddings(lora: Lora, model: Any) -> bool:
    """Whether the embeddings, in which new tokens have rows, are trained whole (ModelError: one of them is)."""
    names = _embedding_names(model)
    saved = [name for name in names if _is_targeted(name, lora.modules_to_save)]
    return bool(saved) and len(saved) == len(names)


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
