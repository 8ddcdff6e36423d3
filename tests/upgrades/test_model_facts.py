"""Compares what no flag of transformers says of a model's attention with its source. sft/hub/model_facts.py lists such types."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sft.hub.model_facts import BLIND_MASKS, ENCODERS, LIGER_TYPES, MASKS_ALONE

_MASK_CALL = re.compile(r"create_(?:causal|sliding_window_causal)_mask\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_MASK_ARGUMENTS = re.compile(r"mask_kwargs\w* = \{[^}]*position_ids[^}]*\}")
_WINDOW = re.compile(r"sliding_window=(self|getattr|config)\b")


def sources() -> dict[str, str]:
    """The modeling file of each type that loads as a causal language model, less those that are refused."""
    package = find_spec("transformers")
    assert package is not None and package.submodule_search_locations
    models, found = Path(package.submodule_search_locations[0]) / "models", {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        name = kind.replace("-", "_")
        file = models / name / f"modeling_{name}.py"
        if file.is_file() and kind not in ENCODERS:
            found[kind] = file.read_text(encoding="utf-8")
    assert len(found) > 100
    return {
        kind: text for kind, text in found.items() if "is_encoder_decoder" not in text and "CrossAttention" not in text
    }


def has_blind_mask(source: str) -> bool:
    shared = _MASK_ARGUMENTS.search(source) is not None
    return any("position_ids" not in call and not (shared and "**" in call) for call in _MASK_CALL.findall(source))


def test_masks_without_position_ids_are_known() -> None:
    assert {kind for kind, source in sources().items() if has_blind_mask(source)} <= BLIND_MASKS
    assert all(has_blind_mask(source) for kind, source in sources().items() if kind in BLIND_MASKS)


def test_windows_that_the_attention_function_is_not_given_are_known() -> None:
    alone = {
        kind
        for kind, source in sources().items()
        if "create_sliding_window_causal_mask" in source and not _WINDOW.search(source)
    }
    assert alone <= MASKS_ALONE


@pytest.mark.parametrize(
    "flag", ["_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn", "_is_stateful"]
)
def test_classes_still_say_what_they_support(flag: str) -> None:
    from transformers import PreTrainedModel

    assert getattr(PreTrainedModel, flag) is False


FAILING = {"qwen3_5_moe", "qwen3_5_moe_text"}


def test_types_whose_layers_liger_replaces_are_known() -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    # A text model within a model of several parts is no entry of its own.
    loaded = {kind for kind in MODEL_TYPE_TO_APPLY_LIGER_FN if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert loaded | {"mllama_text_model"} == LIGER_TYPES | FAILING


@pytest.mark.parametrize("kind", sorted(FAILING))
def test_types_that_liger_knows_and_fails_on_still_fail(kind: str) -> None:
    import torch
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
    with pytest.raises(ImportError, match="LigerQwen3_5MoeCausalLMOutputWithPast"):
        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
