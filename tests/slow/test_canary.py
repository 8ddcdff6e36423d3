"""Saved equals trained: a save that loses something stops the run after its first step, on every engine, and a good one goes unnoticed.

Not `extra`: each fault, each engine with plain fp32 weights; bf16, adapters and new tokens once with full and once with sharded weights.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import losses, plain, rows, untie, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = str(REPOSITORY / "tests" / "slow" / "train_and_break.py")
LORA = "model.lora={r: 4, lora_dropout: 0.1}"
NEW = "model.new_tokens=[<|a|>, <|b|>, <|c|>, <|d|>, <|e|>]"  # more than the embedding has spare rows for
BF16 = "train.precision=bf16"
ZERO2, ZERO3, FSDP = "train.deepspeed=zero2", "train.deepspeed=zero3", "train.fsdp={}"
CASES = {
    "one process": (1, []),
    "DDP": (2, []),
    "ZeRO-2": (2, [ZERO2]),
    "ZeRO-3": (2, [ZERO3]),
    "FSDP2": (2, [FSDP]),
    "tensor parallel": (2, ["train.tensor_parallel_size=2"]),
    "sequence parallel": (2, ["train.sequence_parallel_size=2", "train.micro_batch_size=1", ZERO2]),
    "bf16": (1, [BF16]),
    "bf16, DDP": (2, [BF16]),
    "bf16, ZeRO-3": (2, [BF16, ZERO3]),
    "bf16, FSDP2": (2, [BF16, FSDP]),
    "LoRA, bf16": (1, [LORA, BF16]),
    "LoRA, ZeRO-3": (2, [LORA, ZERO3]),
    "LoRA, FSDP2": (2, [LORA, FSDP]),
    "LoRA, bf16, ZeRO-3": (2, [LORA, BF16, ZERO3]),
    "new tokens, ZeRO-3": (2, [NEW, ZERO3]),
    "new tokens, LoRA": (1, [NEW, LORA]),
    "new tokens, LoRA, untied": (1, [NEW, LORA, "untied"]),
    "untied": (1, ["untied"]),
}
UNDISTURBED = ("LoRA, bf16", "LoRA, ZeRO-3", "bf16, FSDP2", "DDP", "sequence parallel")
CHOSEN = {
    "one process", "DDP", "ZeRO-2", "ZeRO-3", "FSDP2", "tensor parallel", "sequence parallel", "bf16, FSDP2", "LoRA, bf16",
    "LoRA, ZeRO-3", "new tokens, ZeRO-3", "new tokens, LoRA, untied",
}  # fmt: skip
FAULTS = {
    "zero3_without_gather": (2, [ZERO3], "it holds no model.safetensors"),
    "zero3_empty_shards": (2, [ZERO3], "has shape [0], in memory ["),
    "fsdp_own_share": (2, [FSDP], "has shape [272, 128], in memory [544, 128]"),
    "head_dropped": (1, ["untied"], "lm_head.weight: is not in the saved model"),
    "tie_broken": (1, [], "config.json: tie_word_embeddings is False"),
    "adapter_not_saved": (2, [LORA, ZERO3], "q_proj.weight: "),
    "adapter_scale_zero": (1, [LORA, BF16, "train.warmup_steps=100"], "q_proj.weight: "),
    "embeddings_not_resized": (1, [NEW], "has shape [544, 128], in memory [546, 128]"),
    "norm_rounded": (1, [], "model.norm.weight: is torch.bfloat16, in memory torch.float32"),
    "stale": (1, [], "elements differ, by"),
    "other_theta": (1, [], "config.json: rope_parameters.rope_theta is 500.0"),
    "no_stop_token": (1, [], "generation_config.json: eos_token_id is 0"),
    "no_chat_template": (1, [], "the tokenizer: chat_template is None"),
}
AT_THE_END = {
    "no_stop_token": (1, "generation_config.json: eos_token_id is 0"),
    "other_rotation": (2, "logits differ by"),  # neither tensors nor settings show it
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("canary") / "canary.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={
            "global_batch_size": 4,
            "learning_rate": 2e-3,
            "max_steps": 3,
            "logging_steps": 1,
            "save_canary": True,
        },
    )


@pytest.fixture(scope="module")
def untied(recipe: Path) -> Path:
    """The demo's model with an output embedding of its own."""
    return untie(make_demo(recipe.parent / "outputs").model, recipe.parent / "untied")


def words(overrides: list[str], untied: Path, name: str) -> list[str]:
    named = [f"model.name_or_path={untied}" if word == "untied" else word for word in overrides]
    return [*named, f"tracking.run_name={plain(name)}"]


def run_of(recipe: Path, overrides: list[str]) -> Run:
    return Run(recipe.parent / "outputs" / "canary" / overrides[-1].split("=")[1])


@pytest.mark.parametrize("case", rows(CASES, CHOSEN))
def test_a_save_that_is_the_model_is_found_to_be_so(case: str, recipe: Path, untied: Path, ranks: Ranks) -> None:
    count, overrides = CASES[case]
    overrides = words(overrides, untied, case)
    told = ranks.run(count, [PROGRAM, recipe, *overrides])
    assert told["stdout"].count("Save verified in") == 2  # after the first step, and final/
    run = run_of(recipe, overrides)
    assert run.record["save_checked"]["tensors"] >= 38
    assert run.record["save_checked"]["logits_differ"] < 0.15
    assert run.final.is_dir()
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == [".lock"]


@pytest.mark.parametrize("case", rows(UNDISTURBED, {"LoRA, bf16", "DDP"}))
def test_a_run_that_is_checked_trains_as_one_that_is_not(case: str, recipe: Path, untied: Path, ranks: Ranks) -> None:
    count, overrides = CASES[case]
    run, unchecked = (run_of(recipe, words(overrides, untied, f"{case}-{how}")) for how in ("checked", "unchecked"))
    for each, canary in ((run, "true"), (unchecked, "false")):
        given = words(overrides, untied, each.path.name)
        ranks.run(count, [PROGRAM, recipe, *given, f"train.save_canary={canary}"])
    assert "save_checked" in run.record and "save_checked" not in unchecked.record
    assert losses(run) == losses(unchecked)
    one, other = (load_file(path.final / "model.safetensors") for path in (run, unchecked))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_is_not_the_model_stops_the_run(fault: str, recipe: Path, untied: Path, ranks: Ranks) -> None:
    count, overrides, said = FAULTS[fault]
    overrides = words(overrides, untied, fault)
    told = ranks.run(count, [PROGRAM, recipe, *overrides], expect=1, FAULT=fault)
    run = run_of(recipe, overrides)
    error = run.record["error"]
    step = 2 if "train.warmup_steps=100" in overrides else 1
    assert f"What was saved after step {step} is not the model in memory" in error
    assert said in error
    assert "Traceback" not in told["stderr"]
    if count == 1:
        assert error.removeprefix("WrongSave: ") in told["stderr"]
    assert str(run.path / ".canary") in error
    assert (run.path / ".canary").is_dir()
    assert not run.final.exists()
    assert run.record["status"] == "failed"


@pytest.mark.parametrize("fault", AT_THE_END)
def test_a_wrong_save_at_the_end_keeps_the_model_and_the_same_command_ends_the_run(
    fault: str, recipe: Path, untied: Path, ranks: Ranks
) -> None:
    processes, said = AT_THE_END[fault]
    overrides = words(["train.max_steps=1"], untied, f"at the end-{fault}")
    told = ranks.run(processes, [PROGRAM, recipe, *overrides], expect=1, FAULT=fault)
    run = run_of(recipe, overrides)
    assert said in run.record["error"]
    assert (run.record["status"], run.final.exists(), (run.path / ".final").exists()) == ("failed", False, False)
    assert str(run.unverified) in run.record["error"]
    assert "Traceback" not in told["stderr"]
    AutoModelForCausalLM.from_pretrained(run.unverified)
    ranks.run(processes, [PROGRAM, recipe, *overrides])
    assert (run.record["status"], run.final.is_dir(), run.unverified.exists()) == ("finished", True, False)
