"""A quantized base: what is loaded, that it trains and evaluates as one model, and what it is dequantized to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from sft.hub.demo import Demo
from sft.hub.flops import matmul_weights
from sft.launch.job import open_job
from sft.model import quantization
from sft.model.load import load_base, load_dequantized
from sft.model.quantization import describe_running, numels, quantized_layers
from sft.plan.hardware import Hardware
from sft.recipe.schema import Lora, Model
from tests.conftest import DEMO_RECIPE

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),
]
CPU = Hardware(None, 1, 1, 2, 16.0)
KINDS = {"nf4": 0.2, "fp4": 0.25, "int8": 0.02}
"""The largest part of a weight's norm that rounding may take."""


def quantized(demo: Demo, kind: str, **changes: Any) -> Any:
    model = Model(name_or_path=str(demo.model), quantization=kind, lora={}, **changes)
    return load_base(model, str(demo.model), torch.float32, AutoTokenizer.from_pretrained(demo.model))


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_are_quantized_and_count_as_many_weights_as_before(kind: str, demo: Demo) -> None:
    plain, model = AutoModelForCausalLM.from_pretrained(demo.model), quantized(demo, kind)
    assert len(quantized_layers(model)) == 21
    assert describe_running(model).startswith(kind)
    assert numels(model) == {name: parameter.numel() for name, parameter in plain.named_parameters()}
    weights, expected = matmul_weights(model), matmul_weights(plain)
    assert weights is not None and expected is not None
    assert weights.frozen == expected.trained  # of a base all of whose linear layers are frozen
    model = quantization.dequantize(model, torch.float32)
    for name, layer in plain.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            rounded = model.get_submodule(name).weight
            assert 0 < (rounded - layer.weight).norm() / layer.weight.norm() < KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_dequantized_model_has_the_logits_of_the_quantized_one(kind: str, demo: Demo) -> None:
    model = Model(name_or_path=str(demo.model), quantization=kind, lora={})
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    plain = load_dequantized(model, str(demo.model), torch.float32, tokenizer)
    assert not quantized_layers(plain) and not hasattr(plain.config, "quantization_config")
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, quantized(demo, kind).eval()(ids).logits, atol=1e-4, rtol=0)


def test_layers_that_store_their_weights_transposed_are_dequantized_as_they_were(tmp_path: Path) -> None:
    """GPT-2's."""
    config = CONFIG_MAPPING["gpt2"](vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=quantization.quantization_config(
            Model(name_or_path="x", quantization="int8", lora=Lora()), torch.float32, torch.uint8
        ),
    )
    ids = torch.arange(3, 23)[None]
    quantization.keep_training_arithmetic(before)
    with torch.no_grad():
        expected = before.eval()(ids).logits
        after = quantization.dequantize(before, torch.float32)
        torch.testing.assert_close(after(ids).logits, expected, atol=1e-4, rtol=0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {name: one.shape for name, one in after.state_dict().items()} == {
        name: one.shape for name, one in plain.state_dict().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_in_evaluation_changes_neither_the_weights_nor_the_gradients(kind: str, demo: Demo) -> None:
    """On some CPUs bitsandbytes repacks 4-bit weights there, and computes without gradients from then on."""
    model, ids = quantized(demo, kind), torch.arange(3, 43)[None]
    inputs = model.get_input_embeddings().weight

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        return inputs.grad.clone()

    before = gradient()
    with torch.no_grad():
        logits = model.eval()(ids).logits
    torch.testing.assert_close(gradient(), before, atol=0, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model.train()(ids).logits, logits, atol=1e-5, rtol=0)
    assert before.abs().sum() > 0


@pytest.mark.parametrize("kind", [*KINDS, "null"])
def test_adapters_are_fp32_and_start_from_the_recipes_seed(
    kind: str, tmp_path: Path, outputs: Path, trainer_of: Callable[..., Any]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(DEMO_RECIPE)
    job = open_job(file, [f"output_dir={outputs}", "model.lora={r: 4}", f"model.quantization={kind}"], CPU)
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # whatever was drawn before
        named = trainer_of(job).model.named_parameters()
        starts.append({name: one for name, one in named if one.requires_grad})
    assert {one.dtype for one in starts[0].values()} == {torch.float32}
    assert len(starts[0]) == 42
    for name, one in starts[0].items():
        assert torch.equal(one, starts[1][name])
        # Rounded to bf16 and back, the last 16 bits are zero.
        assert "lora_A" not in name or (one.detach().view(torch.int32) & 0xFFFF).any()
