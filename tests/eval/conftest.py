import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.tasks.reference import Reference, load_reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import Task, TaskSelection
from sft.files import write_json
from sft.hub.demo import make_demo
from sft.recipe.schema import Evaluation
from sft.run.directory import Run

WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write a task over local rows; returns its file."""

    def write(name: str, rows: list[dict[str, Any]] | None = None, **keys: object) -> Path:
        data = tmp_path / "tasks" / f"{name}.jsonl"
        data.parent.mkdir(exist_ok=True)
        rows = [{"question": f"Number {n}?", "answer": str(n)} for n in range(4)] if rows is None else rows
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        } | keys
        path = data.with_suffix(".yaml")
        path.write_text(yaml.safe_dump({key: value for key, value in task.items() if value is not None}))
        return path

    return write


@pytest.fixture(scope="session")
def demo_outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="session")
def demo_model(demo_outputs: Path) -> Path:
    return make_demo(demo_outputs).model


@pytest.fixture(scope="session")
def tuned_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as training leaves it: other weights, the same tokenizer, a generation config."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("tuned") / "final"
    shutil.copytree(demo_model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 0}))
    return folder


@pytest.fixture(scope="session")
def reference(tuned_model: Path) -> Reference:
    return load_reference(str(tuned_model), None, False)


@pytest.fixture
def settings(reference: Reference) -> Callable[..., Settings]:
    """Settings for tasks that are not looked up."""

    def resolve(*names: str, **keys: object) -> Settings:
        evaluation = Evaluation.model_validate(keys)
        selection = TaskSelection(tuple(Task(name, name) for name in names), limit=evaluation.limit)
        return resolve_settings(evaluation, selection, reference, on_gpu=False)

    return resolve


@pytest.fixture
def run(tmp_path: Path, demo_outputs: Path, demo_model: Path, tuned_model: Path) -> Run:
    """A finished run of the demo."""
    outputs = tmp_path / "outputs"
    run = Run(outputs / "tiny" / "first")
    run.checkpoints.mkdir(parents=True)
    (outputs / ".builtin").symlink_to(demo_outputs / ".builtin")
    recipe = {
        "schema_version": 1,
        "version": 1,
        "model": {"name_or_path": "builtin:demo"},
        "data": {"train": "builtin:demo"},
        "train": {"global_batch_size": 8},
        "eval": {"tasks": ["builtin:demo"], "limit": 4},
        "output_dir": str(outputs),
    }
    run.recipe_file.write_text(yaml.safe_dump(recipe))
    base = {"name_or_path": "builtin:demo", "revision": None, "path": str(demo_model)}
    write_json(run.path / "run.json", {"status": "finished", "overrides": [], "base_model": base})
    shutil.copytree(tuned_model, run.final)
    return run
