"""Packed equals separate: one step on packed documents is one step on each document alone, on real engines.

The same 40 documents are one batch of packs, and one batch of rows that hold a document each, one row at a time.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config

from sft.hub.demo import make_demo
from tests.slow.conftest import decisions, latest, write_recipe
from tests.slow.engine_runs import ENGINES, lines, weights
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

DOCUMENTS, PACKS = 40, 20
SMALL = {
    "vocab_size": 544,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, WINDOW),
    "gemma3": (Gemma3TextConfig, WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": (Phi3Config, WINDOW),
}
CASES = [
    ("qwen3", "varlen", "2 DDP", "true"),
    ("llama", "sdpa", "2 ZeRO-2", "false"),
    ("mistral", "varlen", "2 ZeRO-3", "false"),
    ("mistral", "eager", "1", "true"),
    pytest.param("gemma3", "varlen", "2 ZeRO-2", "true", marks=pytest.mark.extra),
    ("gemma3", "sdpa", "2 FSDP2", "false"),
    ("phi3", "varlen", "2 FSDP2", "true"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.mark.parametrize(("family", "attention", "engine", "checkpointing"), CASES)
def test_a_step_on_packs_is_a_step_on_each_document_alone(
    family: str, attention: str, engine: str, checkpointing: str, demo: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """The loss, the norm of the gradients, and every weight after the step."""
    made = make_demo(demo)
    configuration, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = tmp_path / "model"
    shutil.copytree(made.model, model, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copyfile(made.model / "tokenizer_config.json", model / "tokenizer_config.json")
    AutoModelForCausalLM.from_config(configuration(**SMALL | extra)).save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text("\n".join(made.train.read_text().splitlines()[:DOCUMENTS]))
    recipe = write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": str(model), "attn_implementation": attention},
        data={"train": str(tmp_path / "rows.jsonl"), "max_length": 128},
        train={
            "global_batch_size": DOCUMENTS,
            "micro_batch_size": 1,
            "max_steps": 1,
            "logging_steps": 1,
            "learning_rate": 0.05,
            "adam_epsilon": 1e-2,  # above the gradients: the step grows with the gradient
            "max_grad_norm": 1000,
            "gradient_checkpointing": checkpointing == "true",
            "remainder": "fill",
        },
    )
    row, found = ENGINES[engine], []
    ranks.run(
        1, ["sft.train", recipe, "data.packing=false", "model.attn_implementation=eager", "tracking.run_name=separate"]
    )
    found.append(latest(recipe))
    ranks.run(
        row.ranks, ["sft.train", recipe, *row.overrides, f"train.global_batch_size={PACKS}", "tracking.run_name=packed"]
    )
    found.append(latest(recipe))
    separate, packed = found
    assert [decisions(run)["steps_per_epoch"] for run in found] == [1, 1]
    assert json.loads(packed.ledger_file.read_text())["packing"]["packs"] == PACKS
    (one,), (other,) = lines(separate), lines(packed)
    assert other["batch"] == one["batch"]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    before = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    expected, trained = weights(separate), weights(packed)
    moved = {name: trained[name] - before[name].detach() for name in trained if name in before}
    assert len(moved) >= 15
    for name, step in moved.items():
        wanted = expected[name] - before[name].detach()
        assert float((step - wanted).norm()) <= 2e-3 * float(wanted.norm()), name
