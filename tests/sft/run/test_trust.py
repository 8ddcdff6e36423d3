"""final/ is compared with what the training wrote, and the base with what it read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.errors import RunError
from sft.files import write_json
from sft.hub.demo import Demo
from sft.run.directory import Run
from sft.run.trust import ACCEPT, base_changes, base_checksums, check_final, final_checksums


@pytest.fixture
def run(tmp_path: Path, demo: Demo) -> Run:
    """A run with adapters beside its final/, its base and their checksums."""
    run = Run(tmp_path / "outputs" / "mine" / "first")
    shutil.copytree(demo.model, run.final)
    (run.final / "generation_config.json").write_text("{}")
    (run.final / "adapter").mkdir()
    (run.final / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    (run.final / "adapter" / "README.md").write_text("card")
    base = shutil.copytree(demo.model, tmp_path / "base")
    files = base_checksums(base)
    write_json(
        run.path / "run.json",
        {"final_files": final_checksums(run.final), "base_model": {"path": str(base), "files": files}},
    )
    return run


def _append(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b" ")


EDITS: dict[str, Callable[[Path], object]] = {
    "model.safetensors has changed": _append("model.safetensors"),
    "tokenizer.json is missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "model-00001-of-00002.safetensors was added": lambda folder: (
        folder / "model-00001-of-00002.safetensors"
    ).write_bytes(b""),
}


@pytest.mark.parametrize("told", EDITS)
def test_an_edit_of_final_is_refused_until_it_is_accepted_once(told: str, run: Run) -> None:
    check_final(run, accept=False)
    EDITS[told](run.final)
    with pytest.raises(RunError, match=f"{told}.*{ACCEPT}"):
        check_final(run, accept=False)
    check_final(run, accept=True)
    check_final(run, accept=False)
    (warning,) = run.record["warnings"]["final"]
    assert told in warning
    _append("chat_template.jinja")(run.final)
    with pytest.raises(RunError, match="chat_template"):
        check_final(run, accept=False)


def test_what_no_library_loads_may_be_edited(run: Run) -> None:
    (run.final / "adapter" / "README.md").unlink()
    (run.final / "README.md").write_text("mine")
    (run.final / "LICENSE").write_text("MIT")
    (run.final / "tokenizer.json").touch()
    check_final(run, accept=False)


def test_a_run_of_an_older_version_is_not_refused(run: Run) -> None:
    record = json.loads((run.path / "run.json").read_text())
    write_json(run.path / "run.json", {"base_model": {"path": record["base_model"]["path"]}})
    _append("model.safetensors")(run.final)
    check_final(run, accept=False)
    assert base_changes(run) is None


def test_a_base_that_was_changed_in_place_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "base" / "tokenizer.json").unlink()  # the run has its own
    (tmp_path / "base" / "README.md").write_text("mine")
    assert base_changes(run) is None
    _append("model.safetensors")(tmp_path / "base")
    assert "model.safetensors has changed" in (base_changes(run) or "")
    shutil.rmtree(tmp_path / "base")  # which loading it tells of
    assert base_changes(run) is None
    assert base_checksums(Path("org/model")) is None
