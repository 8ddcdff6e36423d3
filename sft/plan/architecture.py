"""What attention a model's architecture takes: read in its config.json and in transformers' own source, without importing either.

transformers has no torch-free answer to whether a model goes through its attention interface, has sinks or carries a
recurrent state; the text of `models/<type>/modeling_<type>.py` says so, and takes a millisecond to read.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sft.hub.model_facts import Architecture

_MASK_ONLY = re.compile(r"create_chunked_causal_mask|indexed_attention|compressed_attention|[Ii]ndexer\b")
_WINDOW = re.compile(r"sliding_window=(self|getattr|config)\b")
_RECURRENT = re.compile(r"\b(ssm_states?|conv_states?|recurrent_states?|linear_attention|rwkv)\b|_is_stateful = True")
_MASK_CALL = re.compile(r"create_(?:causal|sliding_window_causal)_mask\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_MASK_ARGUMENTS = re.compile(r"mask_kwargs\w* = \{[^}]*position_ids[^}]*\}")
_TENSOR_PLAN = re.compile(r"base_model_tp_plan = \{(.*?)\}", re.DOTALL)
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@cache
def _source(model_type: str, kind: str = "modeling") -> str | None:
    """The text of one of the model's files in the installed transformers; None where there is none."""
    package = find_spec("transformers")
    assert package is not None and package.submodule_search_locations
    models = Path(package.submodule_search_locations[0]) / "models"
    names = [model_type.replace("-", "_")]
    names.append(names[0].removesuffix("_text"))
    for name in names:
        file = models / name / f"{kind}_{name}.py"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _declared(source: str, flag: str) -> bool:
    """What the file's first class says, which is what its language models are made from; vision and audio come after it."""
    found = re.search(rf"\b{flag} = (True|False)", source)
    return found is not None and found[1] == "True"


def _tensor_plan(model_type: str) -> frozenset[str]:
    """The styles of the first plan in the configuration's file: the text model comes first."""
    found = _TENSOR_PLAN.search(_source(model_type, "configuration") or "")
    return frozenset(re.findall(r":\s*\"(\w+)\"", found[1])) if found else frozenset()


def _has_blind_mask(source: str) -> bool:
    shared = _MASK_ARGUMENTS.search(source) is not None
    return any("position_ids" not in call and not (shared and "**" in call) for call in _MASK_CALL.findall(source))


def read_architecture(config: dict[str, Any]) -> Architecture | None:
    """Find out how a model attends.

    Args:
        config: Its config.json, of the text model where it has several.

    Returns:
        None where transformers has no such model: its own code comes with it.
    """
    source = _source(str(config.get("model_type")))
    if source is None:
        return None
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    latent = config.get("v_head_dim")
    if latent is not None:
        head_dim = (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0) or head_dim
    return Architecture(
        has_interface=_declared(source, "_supports_attention_backend"),
        has_sdpa=_declared(source, "_supports_sdpa"),
        has_flash=_declared(source, "_supports_flash_attn"),
        sinks=bool(re.search(r"\bs_aux=", source)),
        # A config may switch it off.
        softcap=bool(re.search(r"\bsoftcap=self\.", source)) and config.get("attn_logit_softcapping", 1) is not None,
        mask_only=bool(_MASK_ONLY.search(source))
        or ("create_sliding_window_causal_mask" in source and not _WINDOW.search(source)),
        blind_mask=_has_blind_mask(source),
        recurrent=bool(_RECURRENT.search(source)),
        head_dim=head_dim,
        value_head_dim=latent,
        tensor_plan=_tensor_plan(str(config.get("model_type"))),
        dropout=max(float(config.get(name) or 0.0) for name in _DROPOUT),
    )
