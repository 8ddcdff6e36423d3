"""What counts as a difference between a saved model and the live one. On real engines: tests/slow/test_saved_model.py."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.checkpoint.live_tensors import live_tensors
from sft.checkpoint.load_again import Load, exchange_of, main, request_load
from sft.checkpoint.save_verification import (
    LENGTH,
    ROWS,
    as_in_files,
    compare_settings,
    compare_tensors,
    difference,
    sample_rows,
)
from sft.errors import RunError
from sft.hub.demo import Demo
from sft.model.live import logits_distance
from sft.run.directory import Run


def test_one_bit_and_another_dtype_are_differences_and_equal_nans_are_not() -> None:
    weights = torch.linspace(-1, 1, 1000)
    changed = weights.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(2.0))
    assert difference(weights, weights.clone()) is None
    assert "1 of 1000 elements differ" in str(difference(weights, changed))
    assert "bfloat16" in str(difference(weights, weights.bfloat16()))
    broken = torch.tensor([1.0, math.nan])
    assert difference(broken, broken.clone()) is None
    assert difference(torch.tensor([1.0, 2.0]), broken) is not None


def test_logits_are_compared_where_they_are_finite_and_without_what_all_tokens_have_in_common() -> None:
    logits = torch.randn(2, 5, 30)
    assert logits_distance(logits, logits + 3.0) < 1e-6
    assert logits_distance(logits, -logits) == pytest.approx(2.0)
    assert logits_distance(logits, logits[:1]) == math.inf
    diverged = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    assert logits_distance(diverged, diverged) == logits_distance(diverged * float("nan"), diverged) == 0.0
    assert logits_distance(torch.ones(2, 2), diverged) == math.inf


def test_the_rows_hold_the_new_tokens() -> None:
    rows = sample_rows(100, [901, 902, 903])
    assert np.shape(rows) == (ROWS, LENGTH) and rows[0][:3] == [901, 902, 903]
    assert max(rows[0][3:] + rows[1]) < 100


def test_a_model_is_itself_and_what_is_changed_or_left_out_is_named(demo: Demo, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo.model), AutoTokenizer.from_pretrained(demo.model)
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path)
    live = list(live_tensors(model.state_dict(keep_vars=True), None))
    assert {name for one in live for name in one.names} == model.state_dict().keys()
    assert compare_tensors(iter(live), tmp_path) == ([], len(live))
    assert compare_settings(tmp_path, model, tokenizer, False) == []
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    problems, _ = compare_tensors(list(live_tensors(model.state_dict(keep_vars=True), None))[1:], tmp_path)
    assert problems == [
        "model.norm.weight: 1 of 128 elements differ, by 1 at most",
        "model.embed_tokens.weight: is in the saved model only",
    ]
    model.generation_config.eos_token_id, tokenizer.chat_template = 3, None
    lines = compare_settings(tmp_path, model, tokenizer, False)
    assert [line.partition(" is ")[0] for line in lines] == [
        "generation_config.json: eos_token_id",
        "the tokenizer: chat_template",
    ]


def test_models_that_are_saved_under_other_names_than_they_have_in_memory_are_themselves(tmp_path: Path) -> None:
    """transformers joins the experts of a layer when it loads them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **heads, num_experts_per_tok=2)).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "saved")
    problems, count = compare_tensors(
        as_in_files(live_tensors(model.state_dict(keep_vars=True), None), model), tmp_path / "saved"
    )
    assert problems == []
    assert count > len(model.state_dict())


def test_a_final_that_is_another_model_is_found_when_it_is_loaded(demo: Demo, tmp_path: Path) -> None:
    rows = [[5, 6, 7, 8]]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(demo.model)(input_ids=torch.tensor(rows)).logits

    def load(folder: Path, *of_request: Any) -> tuple[str, float]:
        torch.save((rows, *of_request, False), tmp_path / "request.pt")
        main(folder, tmp_path)
        result = json.loads((tmp_path / "result.json").read_text())
        return " ".join(result["problems"]), result["distance"]

    problems, distance = load(demo.model, logits, None, 1e-3)
    assert (problems, distance < 1e-3) == ("", True)
    assert "logits differ by" in load(demo.model, -logits, None, 1e-3)[0]
    trained = logits + 0.1 * torch.randn_like(logits)
    assert load(demo.model, trained, trained + 0.1 * torch.randn_like(logits), 0.15)[0] == ""
    assert "the adapters are not merged" in load(demo.model, trained, logits, 0.15)[0]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert "it cannot be loaded: OSError" in load(tmp_path, logits, None, 1e-3)[0]


def test_a_process_that_is_killed_leaves_the_request_for_the_next_start(demo: Demo, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.update(status="running")
    run.final.symlink_to(demo.model)
    request_load(run, ())
    killed = Load(run)
    killed.process.kill()
    with pytest.raises(RunError, match=r"was killed, as Linux does where memory runs out.*save_canary=false"):
        killed.check()
    assert (exchange_of(run) / "request.pt").is_file()
