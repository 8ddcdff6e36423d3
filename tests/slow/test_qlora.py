"""QLoRA learns: the model of the tiny recipe, kept in 4 bits, learns to answer with other field names."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.hub.demo import make_demo
from sft.run.directory import Run
from tests.slow.conftest import latest, losses, write_recipe
from tests.slow.engine_runs import OBSERVE, EngineRuns, assert_same_weights
from tests.slow.observe import PROMPTS
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FIELDS = {"name": "passenger", "to": "city", "day": "when", "by": "vehicle", "count": "seats"}
STEPS = 120


def renamed(answer: str) -> str:
    return json.dumps({FIELDS[key]: value for key, value in json.loads(answer).items()}, separators=(",", ":"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, runs: EngineRuns) -> Path:
    """Of QLoRA on the tiny recipe's final/, and its rows."""
    folder, tiny = tmp_path_factory.mktemp("qlora"), runs.tiny()
    with (folder / "rows.jsonl").open("w") as file:
        for line in make_demo(tiny.output_dir).train.read_text().splitlines():
            question, answer = json.loads(line)["messages"]
            file.write(json.dumps({"messages": [question, answer | {"content": renamed(answer["content"])}]}) + "\n")
    return write_recipe(
        folder / "qlora.yaml",
        model={"name_or_path": str(tiny.final), "lora": {}, "quantization": "nf4"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 128},
        train={
            "global_batch_size": 8,
            "learning_rate": 8e-3,
            "adam_beta2": 0.99,
            "warmup_steps": 6,
            "max_steps": STEPS,
            "save_steps": STEPS // 2,
            "logging_steps": 1,
        },
    )


def right(run: Run, rows: list[dict[str, str]]) -> float:
    """The fraction of questions, about pairs that were not trained, that final/ answers exactly."""
    tokenizer = AutoTokenizer.from_pretrained(run.final, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(run.final)
    turns = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=60)[:, batch["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(answer == renamed(row["answer"]) for answer, row in zip(answers, rows, strict=True)) / len(rows)


def test_a_quantized_base_learns_and_is_saved_and_resumed_as_it_was_trained(
    recipe: Path, runs: EngineRuns, ranks: Ranks
) -> None:
    task = make_demo(runs.tiny().output_dir).task.parent
    rows = [json.loads(line) for line in (task / "test.jsonl").read_text().splitlines()]
    ranks.run(2, [OBSERVE, recipe])
    run = latest(recipe)
    assert run.record["running"]["quantization"].startswith("nf4, double quantization")
    assert right(run, rows) >= 0.95
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(run.final)(input_ids=PROMPTS).logits
    torch.testing.assert_close(found, torch.load(run.path / "observed" / "logits.pt"), atol=1e-3, rtol=0)
    killed = EngineRuns.killed_after_step(STEPS // 2, run, "killed")
    printed = ranks.run(2, ["sft.train", recipe, f"tracking.run_name={killed.path.name}"])
    assert f"it resumes from checkpoint-{STEPS // 2}" in printed["stdout"]
    assert losses(killed) == losses(run)
    assert_same_weights(killed, run, 0)
