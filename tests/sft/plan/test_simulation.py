"""A simulated pass against the allocator's own events in a real one, and against arithmetic."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from sft import files
from sft.hub.model_facts import Architecture, ModelFacts
from sft.plan import simulation
from sft.plan.memory import simulated
from sft.plan.memory_estimate import Pass
from sft.plan.resolve import resolve_plan
from sft.plan.simulation import simulate
from sft.recipe.schema import Lora
from tests.sft.plan.machines import MakeRecipe, gpus

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
QWEN = Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=4)
PLAIN = Pass(
    tokens=256,
    dtype="float32",
    autocast=None,
    recompute_every=0,
    liger=False,
    eager=False,
    fp32_gradients=False,
    all_logits=False,
    tensor_parallel_size=1,
    lora=None,
    freeze=(),
)


def real_peak(config: Any, wanted: Pass) -> int:
    """Of the same pass on values, by the events of torch's CPU allocator."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="simulated", dtype=torch.float32).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if wanted.recompute_every:
        simulation._recompute(model, wanted.recompute_every, nullcontext())
    ids = torch.zeros(1, wanted.tokens, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as events:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        head = model.get_output_embeddings().weight
        loss = simulation._apply(simulation._Head, hidden[0].clone(), head, torch.float32, wanted.all_logits).sum()
        del hidden
        loss.backward()
    found = [event for event in events.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("wanted", [PLAIN, replace(PLAIN, recompute_every=1), replace(PLAIN, recompute_every=2)])
def test_a_simulated_pass_takes_what_the_allocator_gives_a_real_one(config: Any, wanted: Pass) -> None:
    found, real = simulate(config, wanted), real_peak(config, wanted)
    # On a CPU each layer that recomputes keeps the state of the random numbers.
    states = len(torch.get_rng_state()) * (4 // wanted.recompute_every if wanted.recompute_every else 0)
    assert found.peak == pytest.approx(real - states, rel=0.005)


def test_the_fewer_layers_recompute_the_more_is_kept() -> None:
    kept = [simulate(QWEN, replace(PLAIN, recompute_every=number)).kept for number in (1, 2, 0)]
    assert kept == sorted(set(kept))


def test_ligers_kernels_keep_less_and_half_precision_about_half() -> None:
    plain, liger = simulate(QWEN, PLAIN), simulate(QWEN, replace(PLAIN, liger=True))
    half = simulate(QWEN, replace(PLAIN, liger=True, dtype="bfloat16"))
    assert half.kept < liger.kept < plain.kept
    # All but the fp32 numbers of norms and attention.
    assert half.kept == pytest.approx(liger.kept / 2, rel=0.05)
    # Per layer and token: two norms' and attention's inputs, query twice, key, value, gate, up, their product.
    per_token = 2 * 64 + 64 + 64 + 2 * 32 + 2 * 160 + 160 + 2 * 64
    assert half.kept / (2 * 4 * 256) == pytest.approx(per_token, rel=0.1)


def test_adapters_count_what_peft_makes_and_frozen_layers_keep_less() -> None:
    adapted = simulate(QWEN, replace(PLAIN, lora=Lora(r=8)))
    widths = 64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 160)
    assert adapted.trained == 8 * 4 * widths
    assert adapted.peak < simulate(QWEN, PLAIN).peak
    frozen = simulate(QWEN, replace(PLAIN, freeze=(r"layers\.[0-2]\.", "embed")))
    assert frozen.trained < simulate(QWEN, PLAIN).trained
    assert frozen.kept < simulate(QWEN, PLAIN).kept / 2


def test_ranks_that_share_layers_divide_what_is_inside_and_not_what_goes_between() -> None:
    every = replace(PLAIN, recompute_every=1)
    assert simulate(QWEN, replace(every, tensor_parallel_size=2)).kept == simulate(QWEN, every).kept
    plain, two = simulate(LLAMA, PLAIN), simulate(LLAMA, replace(PLAIN, tensor_parallel_size=2))
    # Per layer and token: query, key, value, attention's output and a number for each head; gate, its activation, up, their product.
    inside = 4 * 64 + 4 + 4 * 160
    assert plain.kept - two.kept == inside / 2 * 4 * 4 * 256


def test_eager_attention_has_matrices_of_scores_and_smoothing_all_logits() -> None:
    plain = simulate(QWEN, PLAIN)
    assert simulate(QWEN, replace(PLAIN, eager=True)).kept - plain.kept > 4 * 4 * 256 * 256 * 4
    assert simulate(QWEN, replace(PLAIN, all_logits=True)).peak - plain.kept > 4 * 256 * 512 * 4


def test_autocast_keeps_fp32_between_layers_and_half_inside() -> None:
    kept = [simulate(QWEN, replace(PLAIN, **one)).kept for one in ({"dtype": "bfloat16"}, {"autocast": "bfloat16"}, {})]
    assert kept == sorted(set(kept))


def saved(config: Any, folder: Path) -> ModelFacts:
    config.save_pretrained(folder)
    return ModelFacts(str(folder), config=config.to_dict())


def test_a_result_is_kept_on_disk_until_what_it_follows_from_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    qwen, llama = saved(QWEN, tmp_path / "qwen"), saved(LLAMA, tmp_path / "llama")
    first = simulated(qwen, PLAIN)
    [file] = (tmp_path / "cache" / "sft" / "memory").glob("*.json")
    assert first == simulate(QWEN, PLAIN)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peak": 1}))
    monkeypatch.setattr(files, "_made", {})
    found = simulated(qwen, PLAIN)
    assert found is not None
    assert found.peak == 1
    assert simulated(qwen, replace(PLAIN, tokens=257)) != found
    assert simulated(llama, PLAIN) != found


def test_what_cannot_be_simulated_is_none_and_leaves_transformers_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = modeling_qwen2.apply_rotary_pos_emb
    simulate(QWEN, replace(PLAIN, liger=True))
    assert modeling_qwen2.apply_rotary_pos_emb is plain
    broken = Qwen2Config(**SIZES | {"num_attention_heads": 7}, num_key_value_heads=2)
    assert simulated(saved(broken, tmp_path / "broken"), PLAIN) is None
    assert simulate(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4), PLAIN).kept


def test_the_plan_simulates_the_attention_that_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_recipe: MakeRecipe
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"parameters": 10**6, "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512}
    known = Architecture(tensor_plan=frozenset({"colwise", "rowwise"}))
    model = replace(saved(QWEN, tmp_path / "qwen"), model_type="qwen2", architecture=known, **sizes)
    plain = replace(model, architecture=Architecture(has_interface=False, has_sdpa=False, has_flash=False))

    def activations(model: ModelFacts, *overrides: str) -> float:
        recipe = make_recipe("data.max_length=512", "train.micro_batch_size=1", *overrides)
        estimate = resolve_plan(recipe, gpus(), model).memory_estimate
        assert estimate is not None and estimate.simulated
        return estimate.gpu["activations"]

    eager = activations(plain)
    assert eager == activations(model, "model.attn_implementation=eager")
    assert eager > activations(model)
