import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
