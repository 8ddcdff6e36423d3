"""Law 9: what is on disk, loaded again by transformers alone, gives the logits of the model in memory.

Chosen are each way to hold the weights (whole, divided, in bf16 with fp32 copies) and adapters where they are divided; the rest is `extra`,
and tests/slow/test_canary.py compares what is saved on every engine, tensor by tensor.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import plain, rows, write_recipe
from tests.slow.ranks import Ranks
from tests.slow.train_and_probe import PROBE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = str(REPOSITORY / "tests" / "slow" / "train_and_probe.py")
CASES = {
    "one process": (1, [], "Qwen2ForCausalLM"),
    "bf16, one process": (1, ["train.precision=bf16"], "Qwen2ForCausalLM"),
    "bf16, ZeRO-2": (2, ["train.precision=bf16", "train.deepspeed=zero2"], "DeepSpeedEngine"),
    "DDP": (2, [], "DistributedDataParallel"),
    "ZeRO-2": (2, ["train.deepspeed=zero2"], "DeepSpeedEngine"),
    "ZeRO-3": (2, ["train.deepspeed=zero3"], "DeepSpeedEngine"),
    "LoRA, one process": (1, ["model.lora={}"], "PeftModelForCausalLM"),
    "LoRA, ZeRO-3": (2, ["model.lora={}", "train.deepspeed=zero3"], "DeepSpeedEngine"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("saved") / "saved.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "learning_rate": 2e-3, "max_steps": 6, "save_steps": 4, "logging_steps": 2},
    )


@pytest.mark.parametrize("case", rows(CASES, {"one process", "bf16, ZeRO-2", "DDP", "ZeRO-3", "LoRA, ZeRO-3"}))
def test_the_saved_model_gives_the_trained_models_logits(case: str, recipe: Path, ranks: Ranks) -> None:
    count, overrides, engine = CASES[case]
    ranks.run(count, [PROGRAM, recipe, *overrides, f"tracking.run_name={plain(case)}"])
    run = Run(recipe.parent / "outputs" / "saved" / plain(case))
    probe = torch.load(run.path / "probe.pt", weights_only=True)
    assert probe["engine"] == engine
    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    # The trainer computes in bf16 inside autocast, on weights of fp32; DeepSpeed on weights of bf16.
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "bf16, one process")
    with torch.no_grad(), autocast:
        torch.testing.assert_close(model(input_ids=PROBE).logits.float(), probe["logits"], atol=2e-4, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(run.record["base_model"]["path"]).eval()
    with torch.no_grad():
        assert (base(input_ids=PROBE).logits - probe["logits"]).abs().max() > 0.1, "nothing was trained"
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop in json.loads((run.final / "generation_config.json").read_text())["eos_token_id"]
    assert model.generation_config.pad_token_id != stop
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert {path.name for path in run.path.iterdir() if path.name.startswith(".")} == {".lock"}, (
        "something was left behind"
    )
