import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eval.harness.base_cache import FOLDER, base_key, keep, model_identity, reuse
from eval.harness.prompting import Prompting
from eval.models.placement import Placement
from eval.models.target import Target
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings

Resolve = Callable[..., Settings]
ALONE = Placement(0)


@pytest.fixture
def base(tuned_model: Path, tmp_path: Path) -> Path:
    shutil.copytree(tuned_model, tmp_path / "base")
    return tmp_path / "base"


def prompting(settings: Settings, reference: Reference) -> Prompting:
    return Prompting(settings, reference.tokenizer)


def results(folder: Path, score: float = 0.5) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"score": score, "base_key": "key", "failed": {}}))
    (folder / "samples_arc.jsonl").write_text("{}\n" * 1000)
    return folder


def test_a_copy_of_a_model_is_the_same_model_and_any_changed_file_of_it_is_another(base: Path, tmp_path: Path) -> None:
    before = model_identity(Target("base", str(base)))
    shutil.copytree(base, tmp_path / "copy")
    assert model_identity(Target("base", str(tmp_path / "copy"))) == before
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))  # the same size
    assert model_identity(Target("base", str(base))) != before
    (base / "model.safetensors").write_bytes(weights)
    assert model_identity(Target("base", str(base))) == before
    (base / "modeling_mine.py").write_text("")
    assert model_identity(Target("base", str(base))) != before


def test_a_name_on_the_hub_is_known_by_its_commit_alone() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert model_identity(Target("base", "org/model", commit)) == f"org/model@{commit}"
    assert model_identity(Target("base", "org/model", "main")) is None
    assert model_identity(Target("base", "org/model")) is None


def test_what_moves_a_score_has_another_key(base: Path, settings: Resolve, reference: Reference) -> None:
    plain = settings("arc")
    target = Target("base", str(base))
    two = replace(ALONE, processes=2)
    half = replace(plain, dtype="bfloat16")
    keys = [
        base_key(target, prompting(plain, reference), ALONE),
        base_key(target, prompting(settings("arc", limit=3), reference), ALONE),
        base_key(target, prompting(replace(plain, loaded={"arc": {"documents_sha256": "0"}}), reference), ALONE),
        base_key(replace(target, new_tokens=("<new>",)), prompting(plain, reference), ALONE),
        base_key(target, prompting(half, reference), ALONE),
        base_key(target, prompting(half, reference), two),  # other documents share a batch
        base_key(target, prompting(plain, reference), ALONE, "NVIDIA H100 80GB HBM3"),
        base_key(target, prompting(plain, reference), ALONE, "NVIDIA H200"),
    ]
    assert len({*keys}) == len(keys)
    assert base_key(target, prompting(plain, reference), two) == keys[0]
    assert base_key(replace(target, label="other"), prompting(plain, reference), ALONE) == keys[0]


def test_a_folder_that_cannot_be_written_to_keeps_nothing_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where a folder should be")
    keep(tmp_path, "key", results(tmp_path / "first"))
    assert reuse(tmp_path / "run", "key", tmp_path) is None
