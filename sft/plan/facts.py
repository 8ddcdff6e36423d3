"""Inspects a model without its weights: its configuration, and an empty model of its class on torch's meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft.errors import ModelError
from sft.hub.model_facts import Architecture, ModelFacts
from sft.hub.names import hub_answers, is_commit, model_path
from sft.hub.remote_code import check_remote_code
from sft.hub.weights import check_weight_files
from sft.recipe.schema import Recipe

ENCODERS = frozenset(
    "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer "
    "xlm-roberta xlm-roberta-xl xmod".split()
)
"""Types that transformers loads as causal language models too, and whose tokens see those behind them unless is_decoder is set."""

ENCODER_DECODERS = frozenset(["t5", "mt5", "umt5", "bart", "mbart", "pegasus"])

# What no flag of transformers says; tests/upgrades compares these with its source. The isolation probe measures the live model.
BLIND_MASKS = frozenset("afmoe biogpt bloom falcon gpt_oss granitemoehybrid mpt opt xglm".split())
"""Types whose masks are made without position ids."""

MASKS_ALONE = frozenset("blt doge phimoe qwen2_moe".split())
"""Types whose attention function is not given the window that their mask has."""

_ATTENTION_LAYERS = frozenset(f"{kind}_attention" for kind in ("full", "sliding", "chunked", "indexed")) | {"attention"}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def inspect_model(recipe: Recipe, download: bool = True) -> ModelFacts:
    """Find out what the plan needs of the recipe's model.

    Args:
        recipe: Names the model.
        download: Fetch config.json where the model is on the hub and not cached.

    Raises:
        ModelError: The model does not exist, is no decoder, its config.json is none, its files are not whole, or it has code that may
            not be run.
    """
    path, model = model_path(recipe), recipe.model
    local = Path(path).is_dir()
    file = Path(path) / "config.json" if local else _hub_file(path, model.revision, "config.json") if download else None
    if file is None:
        check_remote_code(model, path, None, {}, {})  # for what the recipe alone shows
        return ModelFacts(path)
    settings = _read_config(file)
    commit = file.parent.name if file.parent.parent.name == "snapshots" else None
    revision = commit or model.revision
    check_remote_code(model, path, commit, settings, _tokenizer_config(path, revision, download))
    check_decoder(settings, model.name_or_path)
    if local:
        check_weight_files(Path(path), settings)
    config = load_config(path, revision, model.trust_remote_code)
    empty = None
    try:
        empty = empty_model(config, model.trust_remote_code)
    except ModelError:
        if not model.trust_remote_code:  # its own code may need more than the meta device
            raise
    return _facts(path, config.get_text_config(), empty, commit)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        settings: Any = json.loads(file.read_text(encoding="utf-8"))
        has_type = settings.get("model_type") or settings.get("text_config", {}).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}.") from None
    if not has_type:
        raise ModelError(
            f"{file} has no model_type, which says what kind of model it is. Copy the model's own config.json."
        )
    return dict(settings)


def check_decoder(settings: dict[str, Any], name: str) -> None:
    """Refuse a model that does not write from left to right, or of which only the decoder would load.

    Raises:
        ModelError: It is an encoder, or has one.
    """
    text = settings.get("text_config") or settings
    kind = text.get("model_type")
    pair = text.get("is_encoder_decoder") or kind in ENCODER_DECODERS
    if pair or (kind in ENCODERS and not text.get("is_decoder")):
        raise ModelError(
            f"model.name_or_path={name} is an encoder{'-decoder' if pair else ''} ({kind}), and only decoders (causal language models) can "
            "be trained here. Name one such as Qwen, Llama or Gemma."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' remarks about a configuration to itself: the training that loads the weights makes them again."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def load_config(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The model's configuration as transformers reads it.

    Raises:
        ModelError: transformers does not know such a model, or refuses one of its values.
    """
    from transformers import AutoConfig

    try:
        with _quiet():
            return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a value of the wrong type fails in many ways
        raise ModelError(
            f"model.name_or_path={path}: transformers cannot read its config.json: {' '.join(str(error).split()[:40])} Correct it, "
            "or copy it again."
        ) from None


def empty_model(config: Any, trust_remote_code: bool) -> Any:
    """A model without values, of the class that loads with such a configuration.

    Raises:
        ModelError: None can be built.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with _quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a class makes of numbers that do not fit
        text = config.get_text_config()
        reason = f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
        if (getattr(text, "pad_token_id", None) or 0) >= (getattr(text, "vocab_size", None) or 2**62):
            reason = f"pad_token_id={text.pad_token_id} is not below vocab_size={text.vocab_size}; null is allowed"
        raise ModelError(
            f"model.name_or_path={config.name_or_path}: no model can be built from its config.json: {reason}. Correct it, or copy it again."
        ) from None


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs from layer to layer
        return None


def _facts(path: str, config: Any, model: Any, commit: str | None) -> ModelFacts:
    heads, layer_types = _value(config, "num_attention_heads"), _value(config, "layer_types")
    has_window = _value(config, "use_sliding_window") is not False and "sliding_attention" in (
        layer_types or ["sliding_attention"]
    )
    return ModelFacts(
        path=path,
        model_type=config.model_type,
        dtype=str(_value(config, "dtype")).removeprefix("torch.") if _value(config, "dtype") else None,
        max_position_embeddings=_value(config, "max_position_embeddings"),
        parameters=model.num_parameters() if model else None,
        vocab_size=_value(config, "vocab_size"),
        hidden_size=_value(config, "hidden_size"),
        num_hidden_layers=_value(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_value(config, "num_key_value_heads") or heads,
        intermediate_size=_value(config, "intermediate_size"),
        sliding_window=_value(config, "sliding_window") if has_window else None,
        architecture=read_architecture(model, config) if model else None,
        commit=commit,
    )


def read_architecture(model: Any, config: Any) -> Architecture | None:
    """Find out how a model attends, from its class's flags, its configuration and its layers.

    Args:
        model: Empty.
        config: The text model's.

    Returns:
        None for code of its own, which may do anything.
    """
    if not type(model).__module__.startswith("transformers."):
        return None
    heads, hidden = _value(config, "num_attention_heads"), _value(config, "hidden_size")
    head_dim = _value(config, "head_dim") or (hidden // heads if heads and hidden else None)
    latent = _value(config, "v_head_dim")
    if latent is not None:
        keys = (_value(config, "qk_nope_head_dim") or 0) + (_value(config, "qk_rope_head_dim") or 0)
        head_dim = keys or head_dim
    layers = set(_value(config, "layer_types") or [])
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return Architecture(
        has_interface=model._supports_attention_backend,
        has_sdpa=model._supports_sdpa,
        has_flash=model._supports_flash_attn,
        sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        softcap=_value(config, "attn_logit_softcapping") is not None,
        mask_only=config.model_type in MASKS_ALONE or "indexer" in modules or "chunked_attention" in layers,
        blind_mask=config.model_type in BLIND_MASKS,
        recurrent=model._is_stateful or bool(layers - _ATTENTION_LAYERS),
        head_dim=head_dim,
        value_head_dim=latent,
        dropout=max(float(_value(config, name) or 0.0) for name in _DROPOUT),
        tensor_plan=frozenset((config.base_model_tp_plan or {}).values()),
    )


def _hub_file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a hub repository; of a branch or tag the newest where the hub answers: the cache may hold an older commit."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
        known = Path(cached) if isinstance(cached, str) else None
        if known and is_commit(revision):
            return known
        if not hub_answers():
            # What loads from here on takes the cache at once: upstream's own calls retry for a minute.
            constants.HF_HUB_OFFLINE = True
            return known
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except (HfHubHTTPError, OSError):
            if known is None:
                raise
            return known
    except HFValidationError:
        raise ModelError(
            f"model.name_or_path={name}: there is no such folder, and it is no hub id (owner/name)."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model.name_or_path={name}: the hub has no such model, or it needs a login (hf auth login)."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"model.revision={revision}: the hub's {name} has no such revision.") from None
    except (HfHubHTTPError, OSError, ValueError):
        return None


def _tokenizer_config(path: str, revision: str | None, download: bool) -> dict[str, Any]:
    """The model's tokenizer_config.json; empty where there is none to be read: loading the tokenizer says why."""
    name, local = "tokenizer_config.json", Path(path).is_dir()
    file = Path(path) / name if local else _hub_file(path, revision, name) if download else None
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
