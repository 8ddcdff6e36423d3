"""Names and texts of somebody else's run lead nowhere, and neither a terminal nor a Markdown page obeys them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from sft.errors import ExportError, RunError
from sft.export.main import main
from sft.export.model_card import write_card
from sft.export.source import find_exported
from sft.files import write_json
from sft.hub.demo import Demo
from sft.run.directory import Run, find_run
from sft.terminal import show_message, visible_line
from tests.conftest import DEMO_RECIPE

HOSTILE = "rows\n\x1b[2J\u202egnp.sh\u2028\x9b"


@pytest.fixture
def run(tmp_path: Path, demo: Demo) -> Run:
    run = Run(tmp_path / "outputs" / "mine" / "first")
    shutil.copytree(demo.model, run.final)
    run.recipe_file.write_text(DEMO_RECIPE)
    write_json(run.plan_file, {"decisions": []})
    base = {"name_or_path": "builtin:demo", "revision": None, "path": str(demo.model)}
    write_json(run.path / "run.json", {"status": "finished", "recipe": "mine", "overrides": [], "base_model": base})
    return run


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", ".hidden", "a\nrm", "a\u202eb", 7])
def test_a_recipes_name_in_run_json_is_a_files_name(
    name: object, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run.update(recipe=name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=r"run\.json: recipe: .* cannot be the name of a recipe's file"):
        main([str(run.path), "--to", "merged"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("part", ["run", "recipe"])
def test_a_runs_folder_has_no_hidden_characters_in_its_name(part: str, run: Run) -> None:
    folder = run.path if part == "run" else run.path.parent
    moved = folder.rename(folder.with_name(f"a{HOSTILE.replace('/', '')}"))
    with pytest.raises(RunError, match=r"invisible characters in its name") as told:
        find_run(moved if part == "run" else moved / "first")
    assert visible_line(str(told.value)) == str(told.value)


def test_a_message_shows_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    show_message(f"{HOSTILE}: there is no such file")
    assert capsys.readouterr().err == "\nrows\n⟨U+001B⟩[2J⟨U+202E⟩gnp.sh⟨U+2028⟩⟨U+009B⟩: there is no such file\n"


def test_a_card_holds_its_own_headings_fences_and_links_alone(run: Run, demo: Demo, tmp_path: Path) -> None:
    injected = "\n```\n\n# Injected\n\n[link](https://bad)\n````\n<script>\u202e"
    recipe = yaml.safe_load(DEMO_RECIPE)
    recipe["eval"] = {"system_instruction": injected}
    recipe["model"]["name_or_path"] = f"mine{injected}".replace("/", "")
    run.recipe_file.write_text(yaml.safe_dump(recipe))
    base = {"name_or_path": "x", "revision": f"main`{injected}", "path": str(demo.model)}
    run.update(recipe="**a** [b](c) `d`", base_model=base, versions={f"torch{injected}": injected})
    comparison = {
        "metrics": [{"task": injected, "metric": injected}],
        "note": injected,
        "not_measured": {injected: "x"},
    }
    (run.path / "eval").mkdir()
    (run.path / "eval" / "comparison.json").write_text(json.dumps(comparison))
    write_card(find_exported(run, None), tmp_path, AutoTokenizer.from_pretrained(run.final), None)
    text = (tmp_path / "README.md").read_text().split("---\n", 2)[2]
    outside, fence = [], None
    for line in text.splitlines():
        opened = re.match(" {0,3}(`{3,})", line)
        if fence is None and opened:
            fence = opened[1]
        elif fence is not None and re.fullmatch(rf" {{0,3}}`{{{len(fence)},}} *", line):
            fence = None
        elif fence is None:
            outside.append(line)
    headings = [line for line in outside if line.startswith("#")]
    assert [line.lstrip("# ") for line in headings[1:]] == ["Use", "Training", "Data", "Evaluation", "Versions"]
    assert fence is None
    shown = re.sub(r"(?<!\\)`[^`]*`", "", "\n".join(outside))
    assert not re.search(r"(?<!\\)<script|(?<!\\)\]\(https://bad|\u202e|(?<![\\\w])\*\*a", shown)


def test_a_models_name_for_a_server_is_one_line(run: Run) -> None:
    with pytest.raises(ExportError, match=r"--name a⟨U\+000A⟩FROM /etc/passwd has invisible characters"):
        main([str(run.path), "--to", "ollama", "--name", "a\nFROM /etc/passwd"])
