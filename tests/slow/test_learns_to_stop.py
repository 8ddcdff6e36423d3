"""The model learns to stop: the model of the tiny recipe ends each answer by itself, as its saved generation config has it."""

import json

import pytest
import torch

from sft.hub.demo import make_demo
from tests.slow.engine_runs import EngineRuns

pytestmark = pytest.mark.slow


def test_the_tiny_recipe_answers_and_stops_on_every_prompt_that_was_not_trained(runs: EngineRuns) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = runs.tiny()
    tokenizer = AutoTokenizer.from_pretrained(run.final, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(run.final)
    rows = [
        json.loads(line) for line in (make_demo(run.output_dir).task.parent / "test.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 200
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        # Far more room than an answer takes; nothing but the model's own end token stops it.
        answers = model.generate(**batch, do_sample=False, max_new_tokens=100)[:, batch["input_ids"].shape[1] :]
    stops = model.generation_config.eos_token_id
    assert stops == [tokenizer.eos_token_id]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    ended = sum(tokenizer.eos_token_id in answer for answer in answers.tolist())
    assert ended == 200
    right = sum(
        tokenizer.decode(answer, skip_special_tokens=True) == row["answer"]
        for answer, row in zip(answers, rows, strict=True)
    )
    assert right >= 190
    held_out = [json.loads(line).get("held_out_loss") for line in run.metrics_file.read_text().splitlines()]
    assert held_out[-1] < 0.05
