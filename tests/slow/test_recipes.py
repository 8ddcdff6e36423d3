"""Every shipped recipe trains: a shrunken model of its architecture, a tokenizer with its special tokens, rows in its data's columns.

The recipe keeps its own keys but for where model and data are, the batch, the length, the steps and the engine's size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.recipe_models import local_recipe
from tests.slow.conftest import latest, losses, rows
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

RECIPES = {path.stem: path for path in sorted((REPOSITORY / "recipes").glob("*.yaml")) if path.stem != "tiny"}
CHOSEN = (
    "llama3_8b_qlora",
    "qwen3_8b_lora",
    "qwen3_30b_a3b_lora",
    "gemma3_1b",
    "mistral_7b",
    "smollm3_3b",
)
"""One of each architecture and method; Qwen2.5 is the demo's."""
SMALLER = [
    "data.max_length=256",
    "train.global_batch_size=4",
    "train.max_steps=10",
    "train.logging_steps=1",
    "train.precision=fp32",
    "train.warmup_ratio=null",
    "train.warmup_steps=1",
    "train.learning_rate=3e-3",
    "train.parallel=null",
]
SHARDED = {"qwen3_30b_a3b_lora": 2}
"""Recipes whose engine takes several ranks; one process is enough for the others."""


@pytest.mark.parametrize("name", rows(RECIPES, CHOSEN))
def test_a_recipe_trains_a_shrunken_model_of_its_architecture(name: str, tmp_path: Path, ranks: Ranks) -> None:
    recipe = local_recipe(RECIPES[name], tmp_path, rows=200)
    ranks.run(SHARDED.get(name, 1), ["sft.train", recipe, *SMALLER])
    run = latest(recipe)
    curve = losses(run)
    assert len(curve) == 10
    assert sum(curve[-3:]) / 3 < curve[0] - 0.1
    _check_stop(run)
    _check_ledger(run)
    assert (run.final / "adapter").is_dir() == ("lora" in yaml.safe_load(RECIPES[name].read_text())["model"])


def test_experts_are_balanced_unless_that_is_turned_off_and_final_does_not_return_their_routing(
    tmp_path: Path, ranks: Ranks
) -> None:
    recipe = local_recipe(RECIPES["qwen3_30b_a3b_lora"], tmp_path, rows=200)
    plain = ["train.deepspeed=null", "train.max_steps=2", "train.resume=never"]
    first = []
    for off in ("{router_aux_loss_coef: 0.0}", "{}"):
        ranks.run(1, ["sft.train", recipe, *SMALLER, *plain, f"train.trainer_args={off}"])
        run = latest(recipe)
        first.append(losses(run)[0])
        config = json.loads((run.final / "config.json").read_text())
        assert (config["output_router_logits"], config["router_aux_loss_coef"]) == (False, 0.001)
    # The coefficient, times 2 where two of four experts are chosen evenly, up to 4 where always the same.
    assert 0.002 <= first[1] - first[0] < 0.004


def _check_stop(run: Run) -> None:
    """The token that ends a turn stops generation and does not pad."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.final)
    settings = json.loads((run.final / "generation_config.json").read_text())
    # Then come the tokens that the base stopped at.
    assert settings["eos_token_id"][0] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    answered = [{"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "4"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False).rstrip().endswith(tokenizer.eos_token)


def _check_ledger(run: Run) -> None:
    """Every row is used, but for those that `epochs: 0.5` leaves out or the eval split has too: none is bad or too long."""
    total: dict[str, Any] = json.loads(run.ledger_file.read_text())["total"]
    rows, tokens = total["rows"], total["tokens"]
    assert rows["used"] + rows["held_out"] == rows["in"] - sum(rows["dropped"].values())
    assert set(rows["dropped"]) <= {"not_drawn", "held_out"}
    assert tokens["trained"] > 0
    assert tokens["truncated"] == 0
