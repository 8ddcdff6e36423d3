"""Evaluation during training: the same figures on any engine, and a training that does not know of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.hub.demo import make_demo, questions
from sft.run.directory import Run
from tests.slow.conftest import rows, write_recipe, write_task
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

FAULTS = Path(__file__).with_name("faults.py")
LORA = ["model.lora={r: 4, lora_dropout: 0.1}"]
# An engine with full weights, and the two that shard them; adapters with dropout draw random numbers.
CASES: dict[str, list[str]] = {
    "DDP, adapters with dropout": LORA,
    "ZeRO-3": ["train.deepspeed=zero3"],
    "FSDP2, adapters with dropout": ["train.fsdp={}", *LORA],
}
PERPLEXITY = 8462234411045980.0
"""Of the rows below under the untrained demo, on one process."""


def said_by_the_untrained(outputs: Path) -> list[str]:
    """Its first words to each question, by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_demo(outputs).model
    tokenizer, model = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    answers = []
    for question in questions(5):
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        new = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True).split("\n")[0])
    return answers


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    said = said_by_the_untrained(tmp_path / "outputs")
    documents = [{"question": one, "answer": f'{{"name":{n}', "said": said[n]} for n, one in enumerate(questions(5))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents))
    likely = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    generation = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6}}
    question = {"doc_to_text": "{{question}}"}
    tasks = [
        write_task(tmp_path / "said.yaml", data, metric_list=exact, doc_to_target="{{said}}", **generation, **question),
        write_task(
            tmp_path / "likely.yaml",
            data,
            metric_list=likely,
            doc_to_target="{{answer}}",
            output_type="loglikelihood",
            **question,
        ),
    ]
    return write_recipe(
        tmp_path / "job.yaml",
        train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 4, "logging_steps": 1, "save_steps": 2},
        eval={"every_tasks": [str(task) for task in tasks], "every_steps": 2, "every_limit": 5},
    )


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "eval" / "during.jsonl").read_text().splitlines()]


def trained(run: Run) -> list[Any]:
    """What every step was."""
    steps = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["batch"]) for line in steps]


@pytest.mark.parametrize("case", rows(CASES, ["ZeRO-3", "FSDP2, adapters with dropout"]))
def test_measuring_changes_nothing_that_is_trained(case: str, recipe: Path, ranks: Ranks) -> None:
    overrides = CASES[case]
    ranks.run(2, ["sft.train", recipe, *overrides, "tracking.run_name=measured"])
    never = ["eval.every_steps=null", "eval.every_tasks=[]"]
    ranks.run(2, ["sft.train", recipe, *overrides, *never, "tracking.run_name=not"])
    measured, not_measured = (Run(recipe.parent / "outputs" / "job" / name) for name in ("measured", "not"))
    assert trained(measured) == trained(not_measured)
    weights = [(run.final / "model.safetensors").read_bytes() for run in (measured, not_measured)]
    assert weights[0] == weights[1]
    found = lines(measured)
    assert [line["step"] for line in found] == [0, 2, 4]
    before, after = (found[place]["results"]["likely"]["perplexity,none"] for place in (0, 2))
    assert before == pytest.approx(PERPLEXITY, rel=1e-4)
    assert after < before
    assert found[0]["results"]["said"] == {"exact_match,none": 1.0}
    logged = [json.loads(line) for line in measured.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in logged if "eval" in line] == [2, 4]
    assert logged[-1]["eval"]["likely/perplexity"] == after


def test_a_measurement_that_was_left_off_is_made_when_the_run_goes_on(recipe: Path, ranks: Ranks) -> None:
    zero3 = "train.deepspeed=zero3"
    fault = {"AT": "evaluation at step 2", "ON": "1", "DO": "SIGTERM"}
    ranks.run(2, [FAULTS, recipe, zero3, "tracking.run_name=stopped"], expect=143, **fault)
    run = Run(recipe.parent / "outputs" / "job" / "stopped")
    assert [line["step"] for line in lines(run)] == [0]
    ranks.run(2, ["sft.train", recipe, zero3, "tracking.run_name=stopped"])
    ranks.run(2, ["sft.train", recipe, zero3, "tracking.run_name=undisturbed"])
    undisturbed = Run(recipe.parent / "outputs" / "job" / "undisturbed")
    assert [line | {"seconds": 0} for line in lines(run)] == [line | {"seconds": 0} for line in lines(undisturbed)]
    assert trained(run) == trained(undisturbed)
    steps = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in steps if "eval" in line] == [2, 4]


@pytest.mark.parametrize("calls", [5, 3], ids=["on the way", "before the first step"])
def test_a_task_that_fails_costs_its_own_figures_alone_once_training_has_begun(
    calls: int, recipe: Path, ranks: Ranks
) -> None:
    """Its code fails after so many documents, of which each measurement has five."""
    code = (
        f"left = iter(range({calls}))\n\ndef score(doc, results):\n    next(left)\n    return {{'exact_match': 1.0}}\n"
    )
    recipe.with_name("scores.py").write_text(code)
    broken = recipe.with_name("broken.yaml")
    text = recipe.with_name("said.yaml").read_text().replace("task: said", "task: broken")
    broken.write_text(text + "process_results: !function scores.score\n")
    tasks = [f"eval.every_tasks={json.dumps([str(broken), str(recipe.with_name('likely.yaml'))])}"]
    words = ["sft.train", recipe, *tasks, "eval.confirm_run_task_code=true", "tracking.run_name=fails"]
    printed = ranks.run(2, words, expect=0 if calls == 5 else 2)
    if calls == 3:
        said = printed["stdout"] + printed["stderr"]
        assert said.count("eval.every_steps: these cannot be measured; nothing is trained yet.\n  broken: ") == 1
        assert "Traceback" not in said
        return
    assert "step 2: broken was not measured (StopIteration). The training continues" in printed["stdout"]
    run = Run(recipe.parent / "outputs" / "job" / "fails")
    found = lines(run)
    assert [sorted(line["results"]) for line in found] == [["broken", "likely"], ["likely"], ["likely"]]
    assert [list(line.get("failed", {})) for line in found] == [[], ["broken"], ["broken"]]
    assert "next(left)" in (run.path / "eval" / "during.log").read_text()
    assert [step for step, *_ in trained(run)] == [1, 2, 3, 4]
    assert run.record["status"] == "finished"
