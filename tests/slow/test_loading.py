"""Loading a sharded model: how much memory of the machine each rank takes, and that the ranks train the same."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
LOADING = REPOSITORY / "tests" / "slow" / "loading.py"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a random model of 41 million parameters in bf16, which trains in fp32: 157 MiB."""
    folder = tmp_path_factory.mktemp("loading")
    demo = make_demo(folder / "outputs").model
    config = AutoConfig.from_pretrained(demo)
    config.hidden_size, config.intermediate_size, config.head_dim = 1024, 3200, 1024 // config.num_attention_heads
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder / "model")
    return write_recipe(
        folder / "job.yaml",
        model={"name_or_path": str(folder / "model")},
        data={"train": [{"path": "builtin:demo", "rows": 40}], "max_length": 128},
        train={"global_batch_size": 2, "max_steps": 1},
    )


def test_no_rank_but_the_first_holds_more_than_its_shard(recipe: Path, ranks: Ranks) -> None:
    printed = ranks.run(2, [LOADING, recipe, "train.fsdp={}", "tracking.run_name=run"])["stdout"]
    printed += (recipe.parent / "outputs" / "job" / "run" / "logs" / "rank-1.log").read_text()
    grown = {(rank, when): int(size) for rank, when, size in re.findall(r"rank (\d) (\w+) (-?\d+) MiB", printed)}
    size = next((recipe.parent / "model").glob("*.safetensors")).stat().st_size * 2 / 2**20
    assert grown["0", "loaded"] > 0.9 * size, grown
    assert grown["1", "loaded"] < 0.1 * size, grown
    assert all(grown[rank, "sharded"] < 0.9 * size for rank in "01"), grown
