"""How a model is sampled and how long a conversation may be, as its folder says, in the words of those who serve it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import ExportError
from sft.export.source import Exported, read_config

_TRANSFORMERS_DEFAULTS: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
"""What `generate` samples with where generation_config.json says nothing; servers have other defaults."""


def sampling(folder: Path) -> dict[str, float]:
    """Temperature and the like, complete: temperature 0 is greedy, as `generate` is without `do_sample`.

    Args:
        folder: Of the model.
    """
    config = read_config(folder, "generation_config.json")
    penalty = {"repetition_penalty": config.get("repetition_penalty") or 1.0}
    if not config.get("do_sample"):
        return {"temperature": 0.0} | penalty
    values = {name: config.get(name) for name in (*_TRANSFORMERS_DEFAULTS, "min_p")}
    return _TRANSFORMERS_DEFAULTS | {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Context:
    """Tokens that a conversation may have."""

    length: int
    reason: str


def text_config(folder: Path) -> dict[str, Any]:
    """config.json, of a model with several parts that of the text."""
    config = read_config(folder, "config.json")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def resolve_context(source: Exported, asked: int | None) -> Context:
    """How long a conversation may be.

    Args:
        source: What is handed over.
        asked: --max-length.

    Raises:
        ExportError: More than the model can.
    """
    trained = source.recipe.data.max_length
    most = text_config(config_folder(source)).get("max_position_embeddings")
    if asked is not None:
        if asked < 1:
            raise ExportError(f"--max-length {asked}: it must be 1 or more; the model was trained with {trained}.")
        if isinstance(most, int) and asked > most:
            limit = f"the model's context is {most} tokens (max_position_embeddings)"
            raise ExportError(f"--max-length {asked}: {limit}, and it was trained with {trained}.")
        return Context(asked, f"--max-length; trained on at most {trained} tokens (data.max_length)")
    if isinstance(most, int):
        return Context(most, f"the model's own context; trained on at most {trained} tokens (data.max_length)")
    return Context(trained, "as trained (data.max_length): config.json states no context")


def config_folder(source: Exported) -> Path:
    """Where the model's config.json is: with a checkpoint of adapters, or in shares, that of the base or of final/.

    Raises:
        ExportError: It is nowhere on this machine.
    """
    for folder in (source.folder, source.run.final, Path(source.base_path)):
        if (folder / "config.json").is_file():
            return folder
    from sft.hub.names import model_path

    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model_path(source.recipe), "config.json", revision=source.base.revision)
    except ValueError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise ExportError(
        f"The config.json of {source.base.name_or_path} is not on this machine: download it (hf download), and export again."
    )


def stop_tokens(folder: Path, tokenizer: Any) -> list[str]:
    """What generation stops at, as text.

    Args:
        folder: Of the model.
        tokenizer: Its own.
    """
    ids = read_config(folder, "generation_config.json").get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    found = [tokenizer.eos_token_id, *(one for one in listed if isinstance(one, int))]
    tokens = [tokenizer.convert_ids_to_tokens(one) for one in dict.fromkeys(found) if one is not None]
    return [token for token in tokens if token]
