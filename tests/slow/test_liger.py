"""Liger's layers compute what plain ones do: its Triton kernels on a CPU, in the interpreter, through our loading and the whole trainer.

The interpreter lacks what the kernels take from the GPU's libraries, so a copy of the installed package is edited here: tanh and rsqrt by
Triton's own operators, and no conversion of scalars that are Python numbers there.
"""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import latest, losses, write_recipe
from tests.slow.ranks import Ranks
from tests.slow.test_packed_equals_separate import SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None, reason="triton, which Liger's kernels are written in, is not installed"
    ),
]

EDITS = (
    (r"\b(eps|offset|gate_multiplier)\.to\(tl\.float32\)", r"\1"),
    (r"(?<![\w.])rsqrt\(", "tl.rsqrt("),
    (r"(?<![\w.])tanh\((\w+)\)", r"(2.0 * tl.sigmoid(2.0 * \1) - 1.0)"),
)
FAMILIES: dict[str, Any] = {
    "qwen3": Qwen3Config(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}
# Two in each layer and the last; Qwen3 has two more for queries and keys, and Gemma 3 besides those two after attention and MLP.
NORMS = {"qwen3": 9, "gemma3": 13}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process in which Liger runs without a GPU."""
    package = find_spec("liger_kernel")
    assert package is not None and package.submodule_search_locations
    folder = tmp_path_factory.mktemp("liger")
    copy = shutil.copytree(package.submodule_search_locations[0], folder / "liger_kernel")
    for name in ("rms_norm", "swiglu", "geglu"):
        file = copy / "ops" / f"{name}.py"
        text = file.read_text()
        for pattern, replacement in EDITS:
            text = re.sub(pattern, replacement, text)
        file.write_text(text)
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{folder}:{REPOSITORY}"}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe for a tiny model of each family."""
    folder, found = tmp_path_factory.mktemp("families"), {}
    made = make_demo(folder / "outputs").model
    turns = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n % 7}"}] for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in turns))
    for name, config in FAMILIES.items():
        model = folder / f"{name}-model"
        shutil.copytree(
            made, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        found[name] = write_recipe(
            folder / f"{name}.yaml",
            model={"name_or_path": str(model)},
            data={"train": str(folder / "rows.jsonl"), "max_length": 32},
            train={
                "global_batch_size": 1,
                "max_steps": 3,
                "logging_steps": 1,
                "learning_rate": 3e-3,
                "warmup_steps": 2,
            },
        )
    return found


@pytest.mark.extra  # a training has the same losses with them; and one more family
def test_loss_and_gradients_are_those_of_plain_layers(
    recipes: dict[str, Path], environment: dict[str, str], command: Any
) -> None:
    done = command(["python", "-m", "tests.slow.liger_on_cpu", "compare", *recipes.values()], **environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == FAMILIES.keys()
    for name, one in found.items():
        plain, fused = one["loss"]
        assert fused == pytest.approx(plain, abs=1e-6), name
        assert one["apart"] < 1e-6, (name, one)
        assert max(one["probe"]) < 1e-5, (name, one)
        assert sum(one["layers"].values()) == NORMS[name] + 2, (name, one)


def test_a_training_with_liger_is_the_training_without(
    recipes: dict[str, Path], environment: dict[str, str], command: Any, ranks: Ranks
) -> None:
    recipe = recipes["qwen3"]
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=plain"])
    plain = latest(recipe)
    command(["python", "-m", "tests.slow.liger_on_cpu", "train", recipe, "tracking.run_name=liger"], **environment)
    fused = latest(recipe)
    assert plain.path != fused.path
    assert plain.record["running"]["kernels"] == "none"
    assert fused.record["running"]["kernels"] == "liger: 9 Qwen3RMSNorm, 2 Qwen3MLP"
    assert len(losses(fused)) == 3
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-6)
    assert losses(fused)[-1] < losses(fused)[0]
