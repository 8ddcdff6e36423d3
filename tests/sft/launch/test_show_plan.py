"""`sft plan` through the real command: bars, JSON, and a model of which only config.json and tokenizer are here."""

import json
from pathlib import Path

import pytest

from sft import cli
from sft.errors import ModelError, PlanError
from sft.hub.demo import make_demo


def run(*words: object) -> None:
    cli.run(["plan", *map(str, words)])


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The demo's model without its weights."""
    folder = make_demo(tmp_path).model
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def test_a_model_without_weights_is_planned_with_bars_and_not_trained(
    recipe_file: Path, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [recipe_file, f"model.name_or_path={bare}", f"output_dir={tmp_path / 'out'}"]
    run(*words, "--on", "1x24GB")
    shown = capsys.readouterr().out
    assert "activations simulated" in shown
    lines = shown[shown.index("Memory of each GPU, in GiB:") :].splitlines()[1:]
    assert lines[0].split()[0] == "weights"
    assert any(line.split()[:1] == ["headroom"] for line in lines)
    with pytest.raises(ModelError, match="the folder holds no weights"):
        cli.run(["train", *map(str, words)])
    (bare / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="was cut off"):
        run(*words)


def test_the_json_is_the_plan_and_nothing_else(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [recipe_file, f"output_dir={tmp_path / 'out'}", "--json"]
    run(*words, "--on", "1xH100", "--price", "2")
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["simulated"]
    assert {"attention", "loss head"} <= set(found["memory"]["substitutes"])
    assert found["memory"]["peak"] < found["memory"]["available"]
    assert len(found["time"]["cost"]) == 2
    run(*words)  # on this machine
    assert "decisions" in json.loads(capsys.readouterr().out)


def test_a_refused_plan_shows_the_bars_of_what_was_tried_first(recipe_file: Path, tmp_path: Path) -> None:
    words = [recipe_file, f"output_dir={tmp_path / 'out'}", "train.parallel=auto", "data.pack_length=131072"]
    with pytest.raises(PlanError, match=r"(?s)does not fit.*--fit.*Memory of each GPU with one process.*too much"):
        run(*words, "train.gradient_checkpointing=false", "--on", "1x2GB")


def test_adapters_that_match_no_layer_are_refused_by_the_plan(recipe_file: Path, bare: Path, tmp_path: Path) -> None:
    words = [recipe_file, f"model.name_or_path={bare}", f"output_dir={tmp_path / 'out'}"]
    with pytest.raises(ModelError, match="nope matches no layer"):
        run(*words, "model.lora={target_modules: [nope]}")
