"""Saved equals trained: what is in final/ is the model in memory, and a save that loses something stops the run after its first step."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.checkpoint.load_again import Load
from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import losses, plain, rows, untie, write_recipe
from tests.slow.engine_runs import ENGINES, LORA, NEW, VERIFIED, EngineRuns, assert_same_weights, weights
from tests.slow.observe import PROMPTS
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
SAVE_FAULTS = REPOSITORY / "tests" / "slow" / "save_faults.py"

SAVED = [
    *((name, "packed") for name in (*VERIFIED, "2 DDP", "2 ZeRO-2", "2 ZeRO-2, sequence parallel")),
    ("1", "packed, bf16"),
    ("2 ZeRO-2", "packed, bf16"),
    ("2 FSDP2", "packed, bf16"),
    ("2 ZeRO-3", "padded, adapters"),
    ("2 FSDP2", "padded, adapters"),
    ("2 pipeline parallel", "padded, adapters"),
    ("2 ZeRO-3", "packed, new tokens"),
    ("2 DDP", "padded, adapters, new tokens"),
    ("1", "packed, nf4 and adapters"),
    pytest.param("2 ZeRO-3", "packed, nf4 and adapters", marks=pytest.mark.extra),
    ("2 FSDP2", "packed, nf4 and adapters"),
    ("2 DDP", "packed, DoRA"),
    ("1", "packed, pissa"),
    ("2 ZeRO-3", "packed, partly frozen"),
]


@pytest.mark.parametrize(("name", "kind"), SAVED)
def test_the_saved_model_gives_the_trained_models_logits(name: str, kind: str, runs: EngineRuns) -> None:
    """Loaded by transformers alone. The run's own verification has said the same."""
    run = runs(name, kind)
    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    live = run.path / "observed" / "logits.pt"
    if live.exists():  # ranks that share sequences make no logits of their own
        # The trainer computes in bf16 inside autocast on weights of fp32; DeepSpeed on weights of bf16.
        exact = "bf16" not in kind
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not exact and name != "2 ZeRO-2"):
            found, expected = model(input_ids=PROMPTS).logits.float(), torch.load(live)
        torch.testing.assert_close(found, expected, atol=2e-4 if exact else 0.1, rtol=0)
        base = AutoModelForCausalLM.from_pretrained(run.record["base_model"]["path"]).eval()
        with torch.no_grad():
            assert (base(input_ids=PROMPTS).logits[:, :-1] - expected[..., :544][:, :-1]).abs().max() > 0.3, (
                "not trained"
            )
    if EngineRuns.verified(name, kind):
        Load(run).check()  # as the evaluation does
        # After the first step, and final/; pissa's adapters are made others when they are merged.
        assert runs.printed(run).count("Save verified in") == (1 if "pissa" in kind else 2)
        assert run.record["save_checked"]["tensors"] >= 38
        assert run.record["save_checked"]["logits_differ"] < 0.15
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop in json.loads((run.final / "generation_config.json").read_text())["eos_token_id"]
    assert model.generation_config.pad_token_id != stop
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == [".lock"], (
        "something was left behind"
    )


def test_a_verified_run_trains_as_one_that_is_not_verified(runs: EngineRuns) -> None:
    for checked in ("true", "false"):
        runs.train("2 DDP", "packed, adapters with dropout", f"verified-{checked}", f"train.save_canary={checked}")
    run, other = (runs.named("packed", f"verified-{checked}") for checked in ("true", "false"))
    assert "save_checked" in run.record and "save_checked" not in other.record
    assert losses(run) == losses(other)
    assert_same_weights(run, other, 0)


@pytest.mark.parametrize(
    ("name", "kind"), [("2 ZeRO-3", "packed, new tokens"), ("2 DDP", "padded, adapters, new tokens")]
)
def test_new_tokens_are_trained_and_saved_from_the_mean_of_the_others(name: str, kind: str, runs: EngineRuns) -> None:
    run = runs(name, kind)
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    own = 541  # the demo's tokens, in an embedding of 544 rows
    assert tokenizer("<|a|><|e|>", add_special_tokens=False)["input_ids"] == [own, own + 4]
    assert "<|a|>" in tokenizer.all_special_tokens
    model = AutoModelForCausalLM.from_pretrained(run.final)
    base = AutoModelForCausalLM.from_pretrained(run.record["base_model"]["path"])
    assert model.config.vocab_size == model.model.embed_tokens.weight.shape[0] == own + 5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    now, before = (one.model.embed_tokens.weight.detach() for one in (model, base))
    moved = (now[own] - before[:own].double().mean(0).float()).abs()
    # Twelve steps of Adam: more would mean that it started elsewhere.
    assert 1e-4 < moved.max() < 12 * 5e-3
    if "adapters" in kind:
        assert torch.equal(now[:own], before[:own])


def test_tokens_that_the_base_never_trained_are_trained_beside_adapters(runs: EngineRuns, tmp_path: Path) -> None:
    """Special tokens that the tokenizer has, and whose rows are what they were made as."""
    demo = make_demo(tmp_path / "outputs").model
    ids = AutoTokenizer.from_pretrained(demo).convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tensors = load_file(demo / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    rows[ids] = rows[:541].mean(0)
    save_file(tensors, demo / "model.safetensors", {"format": "pt"})
    runs.train("2 DDP", "padded, adapters", "untrained-rows", f"model.name_or_path={demo}", "train.max_steps=2")
    trained = weights(runs.named("padded, adapters", "untrained-rows"))["model.embed_tokens.weight"]
    changed = (trained - rows).abs().amax(1).gt(1e-4).nonzero().flatten().tolist()
    assert changed == sorted(ids)


UNTIED = "untied"
FAULTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "zero3_without_gather": ("2 ZeRO-3", (), "it holds no model.safetensors"),
    "zero3_empty_shards": ("2 ZeRO-3", (), "has shape [0], in memory ["),
    "fsdp_own_shard": ("2 FSDP2", (), "has shape [272, 128], in memory [544, 128]"),
    "head_dropped": ("1", (UNTIED,), "lm_head.weight: is not in the saved model"),
    # With fewer elements ZeRO-3 would not shard them.
    "zero3_empty_shards, adapters": ("2 ZeRO-3", ("model.lora={r: 64}",), "has shape [0], in memory ["),
    # At a learning rate of 0 an adapter stays zero: the second step is the first that trains.
    "adapter_renamed": ("2 FSDP2", (*LORA, "train.warmup_steps=100"), "lora_B.weight: is not in the saved model"),
    "adapter_bit": ("2 DDP", LORA, "1 of 512 elements differ, by"),
    "adapter_bit, stages": ("2 pipeline parallel", LORA, "elements differ, by 4.66e-10 at most\nTraining stops"),
    "embeddings_not_resized": ("1", (NEW,), "has shape [544, 128], in memory [546, 128]"),
    "stale": ("1", (), "elements differ, by"),
    "no_stop_token": ("1", (), "generation_config.json: eos_token_id is 0"),
    "no_chat_template": ("1", (), "the tokenizer: chat_template is None"),
}
REPEATED = {"zero3_empty_shards", "embeddings_not_resized", "no_chat_template"}
"""Of a kind that another one has too: a tensor of another shape, a setting."""
AT_THE_END: dict[str, tuple[str, tuple[str, ...], str]] = {
    "no_stop_token": ("1", (), "generation_config.json: eos_token_id is 0"),
    "other_rotation": ("2 DDP", (), "logits differ by"),  # neither tensors nor settings show it
    "adapter_scale_zero": ("1", LORA, "logits differ by"),
    "adapter_not_saved": ("2 ZeRO-3", LORA, "logits differ by"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("saves") / "job.yaml",
        train={"global_batch_size": 4, "learning_rate": 2e-3, "max_steps": 3, "logging_steps": 1, "save_canary": True},
    )


@pytest.fixture(scope="module")
def untied(recipe: Path) -> Path:
    """The demo's model with an output embedding of its own."""
    return untie(make_demo(recipe.parent / "outputs").model, recipe.parent / "untied")


@pytest.mark.parametrize("fault", rows(FAULTS, FAULTS.keys() - REPEATED))
def test_a_save_that_is_not_the_model_stops_the_run(fault: str, recipe: Path, untied: Path, ranks: Ranks) -> None:
    engine, overrides, said = FAULTS[fault]
    overrides = tuple(f"model.name_or_path={untied}" if word == UNTIED else word for word in overrides)
    words = [SAVE_FAULTS, recipe, *ENGINES[engine].overrides, *overrides, f"tracking.run_name={plain(fault)}"]
    printed = ranks.run(ENGINES[engine].ranks, words, expect=1, WRONG=fault.partition(",")[0])
    run = Run(recipe.parent / "outputs" / "job" / plain(fault))
    error = run.record["error"]
    step = 2 if "train.warmup_steps=100" in overrides else 1
    assert f"What was saved after step {step} is not the model in memory" in error
    assert said in error
    assert "Traceback" not in printed["stderr"]
    assert run.record["status"] == "failed"
    assert not run.final.exists()
    assert [path for path in run.path.iterdir() if path.is_dir() and str(path) in error], "the wrong save is gone"


@pytest.mark.parametrize("fault", rows(AT_THE_END, AT_THE_END.keys() - {"no_stop_token", "adapter_not_saved"}))
def test_a_wrong_save_at_the_end_keeps_the_model_and_the_same_command_ends_the_run(
    fault: str, recipe: Path, ranks: Ranks
) -> None:
    engine, overrides, said = AT_THE_END[fault]
    overrides = (*ENGINES[engine].overrides, *overrides)
    words = [SAVE_FAULTS, recipe, *overrides, "train.max_steps=1", f"tracking.run_name=end-{plain(fault)}"]
    printed = ranks.run(ENGINES[engine].ranks, words, expect=1, finish=True, WRONG=fault)
    run = Run(recipe.parent / "outputs" / "job" / f"end-{plain(fault)}")
    assert said in run.record["error"]
    assert (run.record["status"], run.final.exists(), (run.path / ".final").exists()) == ("failed", False, False)
    assert str(run.unverified) in run.record["error"]
    assert "Traceback" not in printed["stderr"]
    AutoModelForCausalLM.from_pretrained(run.unverified)
    ranks.run(ENGINES[engine].ranks, words, finish=True)
    assert (run.record["status"], run.final.is_dir(), run.unverified.exists()) == ("finished", True, False)
