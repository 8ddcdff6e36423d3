import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.plan.job import Job
from sft.recipe.schema import REPOSITORY, Recipe

SHARED = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with one of the real tokenizers and a config beside it, so that it passes for a model's."""

    def copy(name: str) -> Path:
        source = SHARED / ("models" if name == "stories260k_hf" else "tokenizers") / name
        if not source.is_dir():
            pytest.skip(f"real data is not at {source}")
        folder = tmp_path_factory.mktemp(name)
        for file in source.glob("*.json"):
            shutil.copyfile(file, folder / file.name)
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        return folder

    return copy


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Rows as a .jsonl file."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def recipe_of(make_recipe: Callable[..., Recipe], write_rows: Callable[..., Path]) -> Callable[..., Recipe]:
    """A recipe over rows given here."""

    def make(rows: list[object], *overrides: str) -> Recipe:
        return make_recipe(f"data.train={write_rows(*rows)}", *overrides)

    return make


@pytest.fixture
def trainer_of(tmp_path: Path) -> Callable[..., Any]:
    """The real trainer of a job on its prepared data, with the callbacks of the engine and those given here."""
    from sft.data.prepare import prepare
    from sft.data.store import DocumentStore, SequenceIndex
    from sft.data.tokenizer import load_tokenizer
    from sft.model.load import load_model
    from sft.run.directory import Run
    from sft.train.arguments import training_arguments
    from sft.train.batches import Sequences
    from sft.train.build import build_trainer, engine_callbacks

    def build(job: Job, *make_callbacks: Callable[[Any], Any], model: Any = None) -> Any:
        run, tokenizer = Run(tmp_path / "mine" / "first"), load_tokenizer(job.recipe)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        folder, recipe = prepare(job.recipe, job.model).folder, job.recipe
        store, index = DocumentStore.open(folder), SequenceIndex.load(folder / "train.npz")
        per_step = recipe.train.global_batch_size
        sequences = Sequences(store, index, per_step, tokenizer.pad_token_id, recipe.data.packing)
        arguments = training_arguments(job, run)
        trainer = build_trainer(job, arguments, model or load_model(job, tokenizer), tokenizer, sequences)
        for callback in (trainer.clock, *engine_callbacks(job), *(make(trainer) for make in make_callbacks)):
            trainer.add_callback(callback)
        return trainer

    return build
