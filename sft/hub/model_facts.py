"""Inspects a model without its weights: its configuration, and an empty model of its class on torch's meta device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sft.errors import ModelError
from sft.files import cached
from sft.hub.flops import ModelFlops, model_flops
from sft.hub.names import model_file, model_path
from sft.hub.remote_code import check_remote_code
from sft.hub.weights import check_weight_files, has_weights
from sft.recipe.schema import Lora, Recipe

ENCODERS = frozenset(
    "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer "
    "xlm-roberta xlm-roberta-xl xmod".split()
)
"""Types that transformers loads as causal language models too, and whose tokens see those behind them unless is_decoder is set."""

# What no flag of transformers says; tests/upgrades compares these with its source. The isolation probe measures the live model.
BLIND_MASKS = frozenset("afmoe biogpt bloom falcon gpt_oss granitemoehybrid mpt opt xglm".split())
"""Types whose masks are made without position ids."""

MASKS_ALONE = frozenset("blt doge phimoe qwen2_moe".split())
"""Types whose attention function is not given the window that their mask has."""

LIGER_TYPES = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 gpt_oss granite "
    "hunyuan_v1_dense hunyuan_v1_moe llama llama4 llama4_text ministral mistral mixtral mllama mllama_text_model nemotron olmo2 olmo3 "
    "phi3 qwen2 qwen3 qwen3_5 qwen3_5_text qwen3_moe qwen3_next smollm3".split()
)
"""Types whose layers Liger replaces. Importing Liger to find out would take three seconds. Not qwen3_5_moe: 0.8.5 knows and fails on it."""

OVERFLOWS_FP16 = frozenset("gemma3 gemma3_text gemma3n gemma3n_text".split())
"""Types whose activations are known to exceed 65,504, the largest number of fp16."""

_ATTENTION_LAYERS = frozenset(f"{kind}_attention" for kind in ("full", "sliding", "chunked", "indexed")) | {"attention"}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class Architecture:
    """How a model attends. The defaults are those of an ordinary decoder."""

    has_interface: bool = True
    """Goes through transformers' attention interface, so that a registered function is what runs."""

    has_sdpa: bool = True
    has_flash: bool = True
    sinks: bool = False
    """Learned scores that attend to nothing (gpt-oss)."""

    softcap: bool = False
    """Scores are squashed by tanh (Gemma 2)."""

    mask_only: bool = False
    """Only a mask says what a token sees (chunks, chosen tokens, windows that the attention function is not given): functions that take
    no mask would compute something else."""

    blind_mask: bool = False
    """Its masks are made without position ids, so that no mask keeps packed documents apart (OPT, Falcon, gpt-oss)."""

    recurrent: bool = False
    """Some layers carry a state from token to token (Mamba, linear attention, short convolutions)."""

    head_dim: int | None = None
    value_head_dim: int | None = None
    """Where values are narrower than keys (multi-head latent attention)."""

    dropout: float = 0.0
    """Of attention weights while training."""

    tensor_plan: frozenset[str] = frozenset()
    """In which ways transformers' tensor parallel plan divides its layers; empty where it has none."""

    @property
    def one_kernel(self) -> bool:
        """Whether FlashAttention computes it: equal heads of a multiple of 8, at most 256."""
        width = self.head_dim
        same = self.value_head_dim in (None, width)
        return same and (width is None or (width % 8 == 0 and width <= 256))


PER_LAYER = "one for each kind of layer"


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs of a model; None where config.json could not be read before a download."""

    path: str
    """Local folder or hub id, `builtin:` names resolved."""

    model_type: str | None = None
    dtype: str | None = None
    """What the weights are stored in, which is what the model was trained in: bfloat16, float16, float32."""

    max_position_embeddings: int | None = None
    parameters: int | None = None
    vocab_size: int | None = None
    """Rows of the embedding."""

    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    """Width of the feed-forward layers."""

    sliding_window: int | None = None
    """Tokens that a query sees in layers with a window, where the model has such."""

    architecture: Architecture | None = None
    """None where the model's own code computes it."""

    linear_parameters: int | None = None
    """Weights of the linear layers but the output head: what bitsandbytes quantizes. Fused experts are none."""

    rope_type: str | None = None
    """How its rotary positions are scaled: `default` (not at all), `yarn`, ...; PER_LAYER; None where it has none."""

    linear_widths: int | None = None
    """Inputs and outputs of the linear layers, together: what adapters of rank 1 on each hold."""

    flops: ModelFlops | None = None
    """What training all weights costs; None where it is not known."""

    frozen_parameters: int = 0
    """Weights that model.freeze names."""

    quantization: str | None = None
    """The method by which the stored weights are quantized, as config.json names it: bitsandbytes, fp8, mxfp4."""

    has_liger: bool | None = None
    """Whether Liger replaces layers of the class that loads."""

    config: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """config.json, from which an empty model can be built; None for a model that brings its own code."""

    commit: str | None = None
    """Of a hub model, what its revision stood for when it was looked up: all that is loaded of it is of this commit."""

    def adapter_parameters(self, lora: Lora | None) -> int | None:
        """Parameters of adapters, at most: as if each linear layer had one, and what is trained whole were an embedding; 0 without any."""
        if lora is None or self.linear_widths is None:
            return None if lora else 0
        whole = len(lora.modules_to_save) * (self.vocab_size or 0) * (self.hidden_size or 0)
        return max([lora.r, *lora.rank_pattern.values()]) * self.linear_widths + whole

    @property
    def body_parameters(self) -> int:
        """Weights without the input embedding; 0 where they are not known."""
        return max((self.parameters or 0) - (self.vocab_size or 0) * (self.hidden_size or 0), 0)

    @property
    def layer_size(self) -> int:
        """Weights of one layer: the model's without its embedding, shared evenly; 0 where its shape is not known."""
        if not (self.parameters and self.hidden_size and self.num_hidden_layers):
            return 0
        return self.body_parameters // self.num_hidden_layers or self.parameters


def inspect_model(recipe: Recipe, to_run: bool = True, for_data: bool = False) -> ModelFacts:
    """Find out what the plan needs of the recipe's model, from its configuration and an empty model on torch's meta device.

    config.json of a hub model is fetched where it can be. What follows from it is kept in the user's cache, so that torch and transformers
    are imported once for each. With `to_run`, a folder must hold weights; `for_data` is only what preparing the data needs. Raises
    ModelError where the model does not exist, is no decoder, its config.json is none, its files are not whole, or it has code that may not
    be run.
    """
    path, model = model_path(recipe), recipe.model
    file = model_file(path, model.revision, "config.json")
    if file is None:
        check_remote_code(model, path, None, {}, {})  # for what the recipe alone shows
        return ModelFacts(path)
    settings = _read_config(file)
    commit = file.parent.name if file.parent.parent.name == "snapshots" else None
    tokenizer_settings = _read_json(model_file(path, commit or model.revision, "tokenizer_config.json"))
    check_remote_code(model, path, commit, settings, tokenizer_settings)
    if Path(path).is_dir() and (to_run or has_weights(Path(path))):
        check_weight_files(Path(path), settings)
    text = settings.get("text_config") or settings
    if for_data and isinstance(text.get("vocab_size"), int):
        return ModelFacts(
            path, text.get("model_type", settings.get("model_type")), vocab_size=text["vocab_size"], commit=commit
        )
    if model.trust_remote_code:  # code of its own may change
        return _inspected(recipe, path, commit, settings)
    code = [Path(__file__), Path(__file__).with_name("flops.py")]
    facts = TypeAdapter(ModelFacts)

    def inspect() -> Any:
        return facts.dump_python(_inspected(recipe, path, commit, settings), mode="json")

    found = facts.validate_python(cached("models", [settings, model.freeze], code, inspect))
    return replace(found, path=path, commit=commit)


def _inspected(recipe: Recipe, path: str, commit: str | None, settings: dict[str, Any]) -> ModelFacts:
    model = recipe.model
    config = load_config(path, commit or model.revision, model.trust_remote_code)
    check_decoder(config, model.name_or_path)
    empty = None
    try:
        empty = empty_model(config, model.trust_remote_code)
    except ModelError:
        if not model.trust_remote_code:  # its own code may need more than the meta device
            raise
    return replace(
        _facts(path, config.get_text_config(), empty, commit),
        config=settings if _is_of_transformers(empty) else None,
        frozen_parameters=_frozen(empty, model.freeze),
        quantization=_quantization(config),
    )


def _read_json(file: Path | None) -> dict[str, Any]:
    """A JSON object; empty where it cannot be read: whoever loads the file says why."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_config(file: Path) -> dict[str, Any]:
    settings = _read_json(file)
    if not (settings.get("model_type") or (settings.get("text_config") or {}).get("model_type")):
        raise ModelError(f"{file} is no JSON object with a model_type. Copy the model's own config.json.")
    return settings


def check_decoder(config: Any, name: str) -> None:
    """Raise ModelError for an encoder, and for a model of which only the decoder would load."""
    text = config.get_text_config()
    is_pair = config.is_encoder_decoder or text.is_encoder_decoder
    if is_pair or (text.model_type in ENCODERS and not text.is_decoder):
        kind = f"encoder{'-decoder' if is_pair else ''} ({text.model_type})"
        raise ModelError(
            f"model.name_or_path={name} is an {kind}, and only decoders (causal language models) can be trained here. Name one such as "
            "Qwen, Llama or Gemma."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers about a configuration: the training that loads the weights says the same again."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split()[:40])


def load_config(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The model's configuration as transformers reads it. Raises ModelError where it does not know or refuses it."""
    from transformers import AutoConfig

    try:
        with _quiet():
            return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a value of the wrong type fails in many ways
        raise ModelError(
            f"model.name_or_path={path}: transformers cannot read its config.json: {_first_words(error)} Correct it, or copy it again."
        ) from None


def empty_model(config: Any, trust_remote_code: bool) -> Any:
    """A model without values, of the class that loads with such a configuration. Raises ModelError where none can be built."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with _quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a class makes of numbers that do not fit
        raise ModelError(
            f"model.name_or_path={config.name_or_path}: no model can be built from its config.json: {type(error).__name__}: "
            f"{_first_words(error)}. Correct it, or copy it again."
        ) from None


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs from layer to layer
        return None


def _number(config: Any, name: str) -> int | None:
    found = _value(config, name)  # of some models a list, with one for each layer
    return found if isinstance(found, int) else None


def _linear_layers(model: Any) -> list[Any]:
    """But the output head."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [one for one in model.modules() if isinstance(one, Linear | Conv1D) and one is not head]


def _frozen(empty: Any, patterns: Sequence[str]) -> int:
    named = empty.named_parameters() if empty is not None and patterns else ()
    return sum(one.numel() for name, one in named if any(re.search(pattern, name) for pattern in patterns))


def _quantization(config: Any) -> str | None:
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    return str(settings.get("quant_method") or "bitsandbytes")  # which older files of bitsandbytes do not name


def _rope_type(config: Any) -> str | None:
    rope = _value(config, "rope_parameters")
    return str(rope.get("rope_type", PER_LAYER)) if rope else None


def _facts(path: str, config: Any, model: Any, commit: str | None) -> ModelFacts:
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings".split()
    )
    sizes: dict[str, Any] = {name: _number(config, name) for name in same}
    layer_types = _value(config, "layer_types") or ["sliding_attention"]
    has_window = _value(config, "use_sliding_window") is not False and "sliding_attention" in layer_types
    dtype = _value(config, "dtype")
    linear = _linear_layers(model) if model else []
    return ModelFacts(
        path=path,
        model_type=config.model_type,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        parameters=model.num_parameters() if model else None,
        num_key_value_heads=_number(config, "num_key_value_heads") or _number(config, "num_attention_heads"),
        sliding_window=_number(config, "sliding_window") if has_window else None,
        architecture=read_architecture(model, config) if model else None,
        linear_parameters=sum(one.weight.numel() for one in linear) if model else None,
        linear_widths=sum(sum(one.weight.shape) for one in linear) if model else None,
        flops=model_flops(model) if model else None,
        commit=commit,
        rope_type=_rope_type(config),
        has_liger=_is_of_transformers(model) and model.config.model_type in LIGER_TYPES,
        **sizes,
    )


def _is_of_transformers(model: Any) -> bool:
    return type(model).__module__.startswith("transformers.")


def read_architecture(model: Any, config: Any) -> Architecture | None:
    """How an empty model attends, from its class's flags, its text configuration and its layers; None for code of its own."""
    if not _is_of_transformers(model):
        return None
    heads, hidden, latent = (_value(config, name) for name in ("num_attention_heads", "hidden_size", "v_head_dim"))
    head_dim = _value(config, "head_dim") or (hidden // heads if heads and hidden else None)
    if latent is not None:
        keys = (_value(config, "qk_nope_head_dim") or 0) + (_value(config, "qk_rope_head_dim") or 0)
        head_dim = keys or head_dim
    layers = set(_value(config, "layer_types") or [])
    has_indexer = any(name.endswith(".indexer") for name, _ in model.named_modules())
    return Architecture(
        has_interface=model._supports_attention_backend,
        has_sdpa=model._supports_sdpa,
        has_flash=model._supports_flash_attn,
        sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        softcap=_value(config, "attn_logit_softcapping") is not None,
        mask_only=config.model_type in MASKS_ALONE or has_indexer or "chunked_attention" in layers,
        blind_mask=config.model_type in BLIND_MASKS,
        recurrent=model._is_stateful or bool(layers - _ATTENTION_LAYERS),
        head_dim=head_dim,
        value_head_dim=latent,
        dropout=max(float(_value(config, name) or 0.0) for name in _DROPOUT),
        tensor_plan=frozenset((config.base_model_tp_plan or {}).values()),
    )
