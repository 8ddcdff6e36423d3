"""What the check of a save calls a difference, and what it tells. On real engines: tests/slow/test_canary.py."""

import io
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.checkpoint.load_saved import differs, distance, own_tensors, serve
from sft.checkpoint.loader_process import environment
from sft.checkpoint.save_comparison import facts, message
from sft.checkpoint.save_verification import LENGTH, ROWS, check_room, coarser, sample_rows, untouched
from sft.errors import RunError
from sft.hub.demo import Demo
from sft.parallel.full_tensors import whole_tensors


def test_one_bit_is_a_difference() -> None:
    weights = torch.linspace(-1, 1, 1000)
    changed = weights.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(2.0))
    assert differs(weights, weights.clone(), 0.0) is None
    found = differs(weights, changed, 0.0)
    assert found is not None
    assert (found["elements"], found["of"]) == (1, 1000)
    assert 0 < found["largest"] < 1e-6


def test_another_format_is_none_where_it_holds_the_values() -> None:
    weights = torch.linspace(-1, 1, 1000)
    assert differs(weights.bfloat16(), weights.bfloat16().float(), 0.0) is None
    assert differs(weights, weights.bfloat16(), 0.0) is not None


def test_not_a_number_is_a_difference_to_a_number_only() -> None:
    broken = torch.tensor([1.0, math.nan])
    assert differs(broken, broken.clone(), 0.0) is None
    found = differs(torch.tensor([1.0, 2.0]), broken, 1e9)
    assert found is not None
    assert found["largest"] == math.inf


def test_an_adapter_that_was_not_merged_is_more_than_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, update = torch.randn(64, 64) * 0.02, torch.randn(64, 64) * 1e-5
    merged = (base.bfloat16().float() + update).bfloat16()
    allowed = 0.25 * float((merged.float() - base.bfloat16().float()).norm())
    # Added in another order: some elements are rounded the other way.
    again = (base.bfloat16().double() + update.double() * (1 + 1e-4)).bfloat16()
    assert differs(merged, again, allowed) is None
    assert differs(merged, base.bfloat16(), allowed) is not None


def test_logits_are_compared_without_what_all_tokens_have_in_common() -> None:
    logits = torch.randn(2, 5, 30)
    assert distance(logits, logits + 3.0) < 1e-6
    assert distance(logits, -logits) == pytest.approx(2.0)


def test_logits_that_are_no_numbers_in_memory_are_left_out() -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    assert distance(logits, logits) == distance(logits * float("nan"), logits) == 0.0
    assert distance(torch.ones(2, 2), logits) == float("inf")
    assert distance(logits, logits[:1]) == math.inf


def test_the_coarser_format_sets_the_limit() -> None:
    assert coarser(torch.bfloat16, torch.float32) == coarser(torch.float32, torch.bfloat16) == torch.bfloat16
    assert coarser(torch.float16, None) == torch.float16


class Index:
    """Two sequences of two documents."""

    def __len__(self) -> int:
        return 2

    def of(self, number: int) -> range:
        return range(2 * number, 2 * number + 2)


def sequences() -> Any:
    return SimpleNamespace(index=Index(), store=SimpleNamespace(document=lambda one: (np.arange(20) + 100 * one, None)))


def test_the_rows_are_of_the_data_and_one_holds_the_new_tokens() -> None:
    rows = sample_rows(sequences(), [901, 902, 903])
    assert [len(row) for row in rows] == [LENGTH] * (ROWS + 1)
    assert rows[0][:22] == [*range(20), 100, 101]
    assert set(rows[-1][1::2]) == {901, 902, 903}
    assert len(sample_rows(sequences(), [])) == ROWS


def test_random_numbers_go_on_as_if_nobody_had_drawn() -> None:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")))

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with untouched(trainer):
        assert draw() == expected
    assert draw() == expected


def test_a_disk_without_room_is_told_at_once(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(RunError, match=r"takes 1000000\.00 GB .* set output_dir to another disk"):
        check_room(tmp_path, 10**15)


def test_the_other_process_is_a_users() -> None:
    own = {"RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_FSDP": "true", "PATH": "/bin"}
    assert environment(own | {"CUDA_VISIBLE_DEVICES": "3"}) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def ask(*requests: tuple[dict[str, Any], torch.Tensor | None]) -> list[dict[str, Any]]:
    """What the program answers, without a process."""
    stream, answers = io.BytesIO(), io.BytesIO()
    for request, tensor in requests:
        raw = b"" if tensor is None else tensor.detach().contiguous().numpy().tobytes()
        stream.write(json.dumps(request | ({"bytes": len(raw)} if tensor is not None else {})).encode() + b"\n" + raw)
    stream.seek(0)
    serve(stream, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def tensor_requests(model: Any) -> list[tuple[dict[str, Any], torch.Tensor | None]]:
    return [
        ({"tensor": one.name, "shape": list(one.value.shape), "dtype": "float32", "allowed": 0.0}, one.value)
        for one in whole_tensors(model, None)
    ]


def test_a_model_is_itself_and_what_is_changed_or_left_out_is_named(demo: Demo) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.model)
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    rows = [[5, 6, 7, 8]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows)).logits
    load = {"load": str(demo.model), "ids": rows, "text": tokenizer.decode(rows[0]), "trust_remote_code": False}
    same = tensor_requests(model)
    assert {request["tensor"] for request, _ in same} == own_tensors(model).keys()
    loaded, near, end = ask((load, None), ({"logits": list(logits.shape)}, logits), *same, ({"end": True}, None))
    expected = facts(model, tokenizer, load["text"], None)
    assert {name: loaded[name] for name in expected} == expected
    assert near["distance"] < 1e-6
    assert end == {"wrong": [], "compared": len(same)}

    with torch.no_grad():
        model.model.norm.weight[0] += 1
    *_, end = ask((load, None), *tensor_requests(model)[1:], ({"end": True}, None))
    assert end["wrong"] == [
        {"name": "model.norm.weight", "largest": pytest.approx(1), "elements": 1, "of": 128},
        {"name": "model.embed_tokens.weight", "why": "is in the saved model only"},
    ]


def test_a_folder_that_cannot_be_loaded_is_an_answer_and_the_next_one_is_loaded(demo: Demo, tmp_path: Path) -> None:
    load = {"ids": [[5]], "text": "a", "trust_remote_code": False}
    weights = torch.zeros(2)
    bad, good = ask(
        (load | {"load": str(tmp_path)}, None),
        ({"tensor": "w", "shape": [2], "dtype": "float32", "allowed": 0.0}, weights),
        (load | {"load": str(demo.model)}, None),
    )
    assert "OSError" in bad["error"] or "ValueError" in bad["error"]
    assert good["missing"] == []


def test_the_message_says_what_where_and_that_the_recipe_is_right() -> None:
    told = message(["lm_head.weight: is not in the saved model"], Path("out/run/.canary"), 1, last=False)
    assert "after step 1" in told
    assert "out/run/.canary:\n  lm_head.weight: is not in the saved model\n" in told
    assert "report it" in told
