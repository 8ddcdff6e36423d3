"""What eval/run.py measures is what a hand-written `lm_eval run` measures under the same settings, number for number."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.files import write_json
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

DATA = REPOSITORY.parent / "shared" / "data"
STORIES = DATA / "models" / "stories260k_hf"
DOCUMENTS = 3  # an odd number: two processes have unequal shares
# Sentences are counted and words are found with files that nltk downloads; languages are guessed with a random start.
NOT_HERE = ("number_sentences", "capital_word_frequency", "language:", "english_")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
MEAN = {"aggregation": "mean", "higher_is_better": True}
IFEVAL = """
process_results: !function ifeval_utils.process_results
metric_list:
  - {metric: prompt_level_strict_acc, aggregation: mean, higher_is_better: true}
  - {metric: inst_level_strict_acc, aggregation: !function ifeval_utils.agg_inst_level_acc, higher_is_better: true}
  - {metric: prompt_level_loose_acc, aggregation: mean, higher_is_better: true}
  - {metric: inst_level_loose_acc, aggregation: !function ifeval_utils.agg_inst_level_acc, higher_is_better: true}
"""


def choices(name: str) -> dict[str, Any]:
    return {
        "dataset_kwargs": {"data_files": {"test": str(DATA / "eval" / name)}},
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}\nAnswer:",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
        "metadata": {"version": 1.0},
    }


def rows(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def local_tasks(folder: Path) -> dict[str, dict[str, Any]]:
    """ARC, GSM8K, IFEval and a task of BBH as lm_eval defines them, over local files."""
    evaluation = DATA / "eval"
    asked = [json.loads(line) for line in (evaluation / "ifeval_input_data.jsonl").read_text().splitlines()]
    asked = [row for row in asked if not any(word in name for name in row["instruction_id_list"] for word in NOT_HERE)]
    navigate = json.loads((evaluation / "bbh" / "navigate.json").read_text())["examples"]
    gsm8k = [json.loads(line) for line in (evaluation / "gsm8k_train.jsonl").read_text().splitlines()[:60]]
    return {
        "arc": choices("arc_challenge_200.jsonl"),
        "gsm8k_local": {
            "dataset_kwargs": {
                "data_files": {
                    "test": rows(folder / "gsm8k.jsonl", gsm8k[:20]),
                    "train": rows(folder / "gsm8k_examples.jsonl", gsm8k[20:]),
                }
            },
            "training_split": "train",
            "fewshot_split": "train",
            "num_fewshot": 2,  # drawn at random, for each document in turn
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["Question:", "</s>"], "do_sample": False, "max_gen_toks": 24},
            "filter_list": [
                {
                    "name": "strict-match",
                    "filter": [
                        {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                        {"function": "take_first"},
                    ],
                },
            ],
            "metric_list": [{"metric": "exact_match", **MEAN, "ignore_case": True}],
            "metadata": {"version": 3.0},
        },
        "ifeval_local": {
            "dataset_kwargs": {"data_files": {"test": rows(folder / "ifeval.jsonl", asked[:20])}},
            "output_type": "generate_until",
            "num_fewshot": 0,
            "doc_to_text": "prompt",
            "doc_to_target": 0,
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 40},
            "metadata": {"version": 4.0},
        },
        "bbh_navigate": {
            "dataset_kwargs": {"data_files": {"test": rows(folder / "navigate.jsonl", navigate[3:40])}},
            "output_type": "multiple_choice",
            "doc_to_text": "Q: {{input}}\nA:",
            "doc_to_target": "{{target}}",
            "doc_to_choice": ["Yes", "No"],
            "num_fewshot": 3,
            "fewshot_config": {"sampler": "first_n", "samples": navigate[:3]},
            "metric_list": [{"metric": "acc_norm", **MEAN}],
            "metadata": {"version": 1.0},
        },
    }


def write_tasks(folder: Path) -> list[Path]:
    """The files of the tasks."""
    folder.mkdir()
    tasks = local_tasks(folder)
    (folder / "ifeval_utils.py").write_text(
        "from lm_eval.tasks.ifeval.utils import agg_inst_level_acc, process_results\n"
    )
    for name, task in tasks.items():
        text = yaml.safe_dump({"task": name, "dataset_path": "json", "test_split": "test", **task})
        (folder / f"{name}.yaml").write_text(text + (IFEVAL if name == "ifeval_local" else ""))
    return [folder / f"{name}.yaml" for name in tasks]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose base has no chat template, and whose tuned model has other weights and one."""
    if not DATA.is_dir():
        pytest.skip("../shared, with models and data of others, is not here")
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("lm_eval")
    run = Run(folder / "outputs" / "stories" / "first")
    run.checkpoints.mkdir(parents=True)
    shutil.copytree(STORIES, run.final)
    weights, generator = load_file(STORIES / "model.safetensors"), torch.Generator().manual_seed(0)
    changed = {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    save_file(changed, run.final / "model.safetensors", metadata={"format": "pt"})
    (run.final / "chat_template.jinja").write_text(TEMPLATE)
    tasks = [str(path) for path in write_tasks(folder / "tasks")]
    recipe = {
        "model": {"name_or_path": str(STORIES)},
        "data": {"train": "-"},
        "train": {"global_batch_size": 8},
        "eval": {"tasks": tasks, "limit": DOCUMENTS, "dtype": "float32", "base_cache": False},
    }
    run.recipe_file.write_text(write_recipe(folder / "recipe.yaml", **recipe).read_text())
    base = {"name_or_path": str(STORIES), "revision": None, "path": str(STORIES)}
    write_json(run.path / "run.json", {"status": "finished", "overrides": [], "base_model": base})
    return run


def allowed(run: Run) -> list[str]:
    """What a command allows a run that it has not trained: the tasks' files, which lie elsewhere, and their code."""
    return [f"tasks={','.join(run.recipe().eval.tasks)}", "confirm_run_task_code=true"]


Scores = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def by_hand(run: Run, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Scores]:
    """Scores of `lm_eval run`; each command once."""
    tasks = run.recipe().eval.tasks
    measured: dict[tuple[str, ...], Scores] = {}

    def measure(model: Path, chat: bool, batch_size: int) -> Scores:
        arguments = f"pretrained={model},tokenizer={run.final},dtype=float32" + (",add_bos_token=False" if chat else "")
        words = ["--model", "hf", "--model_args", arguments, "--tasks", ",".join(tasks), "--device", "cpu"]
        words += ["--limit", str(DOCUMENTS), "--batch_size", str(batch_size), "--seed", "0"]
        words += ["--apply_chat_template"] if chat else []
        if tuple(words) not in measured:
            output = tmp_path_factory.mktemp("by_hand") / "results.json"
            ranks.run(1, ["lm_eval", "run", *words, "--output_path", output])
            (written,) = output.parent.glob("results_*.json")
            measured[tuple(words)] = scores(written)
        return measured[tuple(words)]

    return measure


def scores(results: Path) -> Scores:
    """Per task and metric, the standard errors among them; without lengths and names."""
    found = json.loads(results.read_text())["results"]
    return {task: {key: value for key, value in values.items() if "," in key} for task, values in found.items()}


@pytest.mark.parametrize(("number", "batch_size"), [pytest.param(1, 8, marks=pytest.mark.extra), (2, 1)])
def test_a_run_equals_lm_eval_by_hand(
    number: int, batch_size: int, run: Run, ranks: Ranks, by_hand: Callable[..., Scores]
) -> None:
    words = ["eval.run", run.path, *allowed(run), f"batch_size={batch_size}", f"processes={number}"]
    printed = ranks.run(1, words)["stdout"]
    assert "The base model has no chat template and was asked through the tuned model's" in printed
    (compared,) = run.path.glob("eval/**/comparison.json")
    for kind, model in (("base", STORIES), ("tuned", run.final)):
        measured = scores(compared.parent / kind / "results.json")
        assert len(measured) == 4
        assert measured == by_hand(model, True, batch_size)
    assert json.loads((compared.parent / "tuned" / "results.json").read_text())["placement"]["processes"] == number
    shutil.rmtree(run.path / "eval")


def test_a_base_that_is_asked_with_its_own_prompts_is_asked_plainly(
    run: Run, ranks: Ranks, by_hand: Callable[..., Scores]
) -> None:
    printed = ranks.run(1, ["eval.run", run.path, *allowed(run), "batch_size=8", "base_template=own"])["stdout"]
    assert "asked with the tasks' plain prompts" in printed
    (compared,) = run.path.glob("eval/**/comparison.json")
    assert scores(compared.parent / "base" / "results.json") == by_hand(STORIES, False, 8)
    assert scores(compared.parent / "tuned" / "results.json") == by_hand(run.final, True, 8)
    assert json.loads(compared.read_text())["prompting"]["base_template"] == "own"
    shutil.rmtree(run.path / "eval")
