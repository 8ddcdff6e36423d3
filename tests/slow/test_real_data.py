"""Real data, tokenizers and weights, through the same entry as the demo, evaluated on real tasks."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.run.directory import Run
from tests.slow.conftest import latest, losses, write_recipe, write_task
from tests.slow.ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extra,
]  # test_init.py trains on real rows, test_parity_with_trl.py reads them

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
GSM8K = {
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer.split('#### ')[-1]}}",
    "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 16},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def tasks(folder: Path, shared: Path) -> list[str]:
    """ARC, HellaSwag and GSM8K as local tasks."""
    data = shared / "eval"
    return [
        str(write_task(folder / "arc.yaml", data / "arc_challenge_200.jsonl", **CHOICE)),
        str(write_task(folder / "hellaswag.yaml", data / "hellaswag_200.jsonl", **CHOICE)),
        str(write_task(folder / "gsm8k_local.yaml", data / "gsm8k_train.jsonl", **GSM8K)),
    ]


def check_run(run: Run) -> dict[str, Any]:
    """What holds for every finished run; returns its ledger's total."""
    curve = losses(run)
    assert sum(curve[-3:]) / 3 < curve[0] - 0.2
    ledger: dict[str, Any] = json.loads(run.ledger_file.read_text())["total"]
    tokens = ledger["tokens"]
    assert tokens["in"] == tokens["trained"] + tokens["masked"] + tokens["truncated"] + tokens["dropped"]
    comparison = json.loads(run.comparison_file.read_text())
    assert comparison["complete"]
    assert "gsm8k_local" in {row["task"] for row in comparison["metrics"]}
    assert run.record["status"] == "finished"
    return ledger


def test_a_pretrained_model_without_template_or_padding_learns_alpaca(
    tmp_path: Path, shared: Path, ranks: Ranks
) -> None:
    recipe = write_recipe(
        tmp_path / "stories.yaml",
        model={
            "name_or_path": str(shared / "models" / "stories260k_hf"),
            "chat_template": "plain",
            "pad_token": "<unk>",
        },
        data={
            "train": str(shared / "sft" / "llamafactory" / "alpaca_en_demo.json"),
            "max_length": 256,
            "max_overlong_fraction": 0.7,
        },
        train={"global_batch_size": 8, "learning_rate": 2e-3, "max_steps": 30, "logging_steps": 5, "warmup_steps": 5},
        eval={"tasks": tasks(tmp_path, shared), "limit": 8, "batch_size": 8},
    )
    ranks.run(1, ["sft.train", recipe], finish=True)
    run = latest(recipe)
    ledger = check_run(run)
    assert ledger["rows"]["in"] == 999
    config = json.loads((run.final / "generation_config.json").read_text())
    assert config["eos_token_id"] in (2, [2])
    assert config["pad_token_id"] == 0


def test_a_qwen3_with_its_real_tokenizer_learns_tool_calls(tmp_path: Path, shared: Path, ranks: Ranks) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    config = Qwen3Config(
        vocab_size=151680,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=151643,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = write_recipe(
        tmp_path / "qwen.yaml",
        model={"name_or_path": str(tmp_path / "model")},
        data={
            "train": [{"path": str(shared / "sft" / "sgd_messages_tools_600.jsonl"), "split": "train[:150]"}],
            "max_length": 1024,
            "overlong": "truncate",
            "max_overlong_fraction": 0.2,  # some rows' tools fill the whole of it
        },
        train={"global_batch_size": 1, "learning_rate": 1e-2, "max_steps": 5, "logging_steps": 1},
        eval={"tasks": tasks(tmp_path, shared)[2:], "limit": 2, "batch_size": 2},
    )
    ranks.run(1, ["sft.train", recipe], finish=True)
    run = latest(recipe)
    check_run(run)
    # The base stopped at <|endoftext|>; the tuned model stops at the end of its turn as well.
    stops = json.loads((run.final / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.convert_tokens_to_ids("<|im_end|>"), 151643]
