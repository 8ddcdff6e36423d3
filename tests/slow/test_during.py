"""Evaluation during training: the same figures on any engine, and a training that does not know of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.demo import questions
from sft.run_directory import Run
from tests.slow.conftest import write_recipe, write_task
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LORA = ["model.lora={r: 4, lora_dropout: 0.1}"]
ENGINES: dict[str, tuple[int, list[str]]] = {
    "one process, adapters with dropout": (1, LORA),
    "DDP": (2, []),
    "ZeRO-2 in bf16": (2, ["train.deepspeed=zero2", "train.precision=bf16"]),
    "ZeRO-3": (2, ["train.deepspeed=zero3"]),
    "ZeRO-3, adapters with dropout": (2, ["train.deepspeed=zero3", *LORA]),
    "FSDP2": (2, ["train.fsdp={}"]),
    "FSDP2, adapters with dropout": (2, ["train.fsdp={}", *LORA]),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": one, "answer": f'{{"name":{n}'}) + "\n" for n, one in enumerate(questions(5)))
    )
    text = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    likely = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    limits = {"until": ["\n"], "max_gen_toks": 6}
    tasks = [
        write_task(tmp_path / "likely.yaml", rows, output_type="loglikelihood", metric_list=likely, **text),
        write_task(
            tmp_path / "said.yaml",
            rows,
            output_type="generate_until",
            metric_list=exact,
            generation_kwargs=limits,
            **text,
        ),
    ]
    return write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 4, "logging_steps": 1, "save_steps": 2},
        eval={"every_tasks": [str(task) for task in tasks], "every_steps": 2, "every_limit": 5},
    )


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "eval" / "during.jsonl").read_text().splitlines()]


def trained(run: Run) -> list[Any]:
    """What every step was."""
    steps = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["batch"]) for line in steps]


@pytest.mark.parametrize("engine", ENGINES)
def test_measuring_changes_nothing_that_is_trained(engine: str, recipe: Path, ranks: Ranks) -> None:
    count, overrides = ENGINES[engine]
    ranks.run(count, ["sft.train", recipe, *overrides, "tracking.run_name=measured"])
    never = ["eval.every_steps=null", "eval.every_tasks=[]"]
    ranks.run(count, ["sft.train", recipe, *overrides, *never, "tracking.run_name=not"])
    measured, not_measured = (Run(recipe.parent / "outputs" / "job" / name) for name in ("measured", "not"))
    assert trained(measured) == trained(not_measured)
    weights = [(run.final / "model.safetensors").read_bytes() for run in (measured, not_measured)]
    assert weights[0] == weights[1]
    found = lines(measured)
    assert [line["step"] for line in found] == [0, 2, 4]
    # The untrained demo, by plain transformers: the same on every engine.
    assert found[0]["results"]["likely"]["perplexity,none"] == pytest.approx(
        1, rel=1e-3 if "bf16" not in engine else 2e-2
    )
    assert found[2]["results"]["likely"]["perplexity,none"] < found[0]["results"]["likely"]["perplexity,none"]
    assert found[0]["results"]["said"].keys() == {"exact_match,none"}
