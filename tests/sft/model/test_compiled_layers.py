import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sft.errors import ModelError, PlanError
from sft.launch.job import open_job
from sft.model.compiled_layers import are_compiled, check_compiler, compile_layers, decoder_layers
from sft.plan.hardware import Gpu, Hardware
from sft.recipe.schema import Recipe

CPU = Hardware(None, 1, 1, 2, 16.0)
GPU = Hardware(Gpu("GPU", 80.0, 9.0), 1, 1, 16, 128.0)
MakeRecipe = Callable[..., Recipe]


def small_model() -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_hidden_layers=3, **sizes))


def test_the_decoder_layers_are_compiled_and_no_weight_changes_its_name() -> None:
    model = small_model()
    names = list(model.state_dict())
    assert len(decoder_layers(model)) == 3
    assert not are_compiled(model)
    compile_layers(model, "sdpa", backend="eager")
    assert are_compiled(model)
    assert list(model.state_dict()) == names
    assert model._compiled_call_impl is None
    decoder_layers(model)[1]._compiled_call_impl = None
    assert not are_compiled(model)


def test_a_model_without_repeated_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear marks no layers that repeat"):
        compile_layers(torch.nn.Linear(2, 2), "sdpa")


def test_a_machine_without_a_compiler_is_told_before_the_weights_load(
    recipe_file: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = open_job(recipe_file, [f"output_dir={outputs}"], CPU)
    compiled = open_job(recipe_file, [f"output_dir={outputs}", "model.compile=true"], CPU)
    liger = open_job(recipe_file, [f"output_dir={outputs}", "model.kernels=liger"], GPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CC", sys.executable)
    check_compiler(plain)
    with pytest.raises(PlanError, match=r"model.compile: .*there is no no-such-compiler on PATH\."):
        check_compiler(compiled)
    # On a GPU Triton compiles Liger's kernels too, with a header of Python's.
    check_compiler(liger)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(outputs))
    with pytest.raises(PlanError, match=r"model.kernels=liger: .*there is no \S+Python\.h\..*model\.kernels=none"):
        check_compiler(liger)
