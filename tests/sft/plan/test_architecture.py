"""What is read in a model's source is what its class says, on the installed transformers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from sft.hub.model_facts import Architecture
from sft.plan.architecture import read_architecture

COMMON = [
    "qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4",
    "granite", "smollm3", "gpt_oss", "gpt_neox", "starcoder2",
]  # fmt: skip
RECURRENT = ["mamba", "mamba2", "qwen3_next", "lfm2", "jamba", "falcon_h1", "rwkv", "xlstm", "zamba2"]


def read(model_type: str, **config: Any) -> Architecture:
    found = read_architecture({"model_type": model_type} | config)
    assert found is not None
    return found


def disagreements(model_types: list[str]) -> list[str]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wrong = []
    for model_type in model_types:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        kind = getattr(transformers, name if isinstance(name, str) else name[0])
        found = read_architecture({"model_type": model_type})
        if found is None:  # its class lies in another model's file: it counts as code of its own
            continue
        declared = (kind._supports_attention_backend, kind._supports_sdpa, kind._supports_flash_attn)
        if (found.has_interface, found.has_sdpa, found.has_flash) != tuple(map(bool, declared)):
            wrong.append(f"{model_type}: read {found}, declared {declared}")
        if getattr(kind, "_is_stateful", False) and not found.recurrent:
            wrong.append(f"{model_type}: stateful")
    return wrong


def test_what_is_read_is_what_common_classes_declare() -> None:
    assert disagreements(COMMON) == []


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # a model of transformers' own
def test_what_is_read_is_what_every_class_declares() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert disagreements(list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)) == []


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "phi3", "smollm3", "olmo2"]
)
def test_an_ordinary_decoder_has_nothing_special(model_type: str) -> None:
    assert replace(read(model_type), tensor_plan=frozenset()) == Architecture()


@pytest.mark.parametrize("model_type", RECURRENT)
def test_layers_with_a_state_are_seen(model_type: str) -> None:
    assert read(model_type).recurrent


@pytest.mark.parametrize("model_type", ["llama4_text", "qwen2_moe", "doge", "deepseek_v32"])
def test_what_only_a_mask_says_is_seen(model_type: str) -> None:
    assert read(model_type).mask_only


def test_masks_that_do_not_follow_documents_are_seen() -> None:
    """tests/sft/train/test_isolation_probe.py measures that the first ones leak, and that gpt2 and gptj do not."""
    assert all(read(name).blind_mask for name in ("opt", "falcon", "bloom", "mpt", "biogpt", "xglm", "gpt_oss"))
    follow = (
        "gpt2",
        "gptj",
        "gpt_neo",
        "codegen",
        "stablelm",
        "gpt_neox",
        "gemma2",
        "qwen3_moe",
        "deepseek_v3",
        "mixtral",
    )
    assert not any(read(name).blind_mask for name in follow)


def test_sinks_and_softcapping_are_seen() -> None:
    assert read("gpt_oss").sinks
    assert not read("gpt_oss").softcap
    assert read("gemma2").softcap
    assert not read("gemma2", attn_logit_softcapping=None).softcap
    assert not read("gemma2").sinks


def test_old_architectures_do_not_take_another_function() -> None:
    assert [name for name in ("gptj", "bloom", "falcon", "mpt", "stablelm", "gpt2") if read(name).has_interface] == [
        "gpt2"
    ]


@pytest.mark.parametrize("model_type", ["no_such_type", "None", "../llama"])
def test_a_type_that_transformers_does_not_have_is_unknown(model_type: str) -> None:
    assert read_architecture({"model_type": model_type}) is None
    assert read_architecture({}) is None


@pytest.mark.parametrize(
    ("config", "width", "values"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, 16, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, 32, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, 16, None),
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, 192, 128),
        ({}, None, None),
    ],
)
def test_the_width_of_heads(config: dict[str, Any], width: int | None, values: int | None) -> None:
    found = read("llama", **config)
    assert (found.head_dim, found.value_head_dim) == (width, values)


@pytest.mark.parametrize("name", ["attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"])
def test_dropout_of_attention_has_several_names(name: str) -> None:
    assert read("llama", **{name: 0.1}).dropout == 0.1
    assert read("llama", **{name: None}).dropout == 0.0


@pytest.mark.parametrize(
    ("width", "values", "fits"),
    [
        *((width, None, True) for width in (None, 64, 72, 80, 128, 256)),
        *((width, None, False) for width in (20, 264, 300)),
        (128, 128, True),
        (192, 128, False),
    ],
)
def test_which_heads_flash_attention_computes(width: int | None, values: int | None, fits: bool) -> None:
    assert Architecture(head_dim=width, value_head_dim=values).one_kernel == fits


@pytest.mark.slow
def test_it_is_read_without_torch_or_transformers() -> None:
    program = "import sys; from sft.plan.architecture import read_architecture as r; r({'model_type': 'qwen2'}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)
