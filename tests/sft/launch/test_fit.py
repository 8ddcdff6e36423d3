"""`sft plan RECIPE --fit` through the real command."""

from pathlib import Path

import pytest

from sft import cli
from sft.errors import UserError
from sft.recipe.load import load_recipe

LARGE = ["data.pack_length=262144", "train.gradient_checkpointing=false"]


def run(*words: object) -> None:
    cli.run(["plan", *map(str, words)])


def test_the_changes_are_listed_planned_and_written(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [recipe_file, *LARGE, f"output_dir={tmp_path / 'out'}", "--on", "1x4GB"]
    run(*command, "--fit")
    shown = capsys.readouterr().out
    assert "does not fit on 1 x GPU (4 GiB)" in shown
    assert "  1. train.gradient_checkpointing=" in shown
    assert shown.index("result: none but rounding") < shown.index("data.pack_length=")
    run(*command, "--fit", "1")
    assert "gradient_checkpointing" in capsys.readouterr().out
    file = tmp_path / "smaller.yaml"
    run("--fit", *command, "--write", file)
    written = load_recipe(file)
    assert written.train.gradient_checkpointing not in (False, "auto")
    assert written.data.pack_length == 262144
    run(file, "--on", "1x4GB", "--fit")
    assert "fits on 1 x GPU (4 GiB)" in capsys.readouterr().out
    assert not (tmp_path / "out" / "mine").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fit"], "there is none here. Name some: --on 8x80GB"),
        (["--fit", "--on", "8xH9000"], "--on 8xH9000: .* H100"),
        (["--fit", "99", "--on", "1x4GB", *LARGE], "--fit 99: there are \\d+ changes"),
        (["--fit", "--on", "8x80GB", "model.name_or_path=a/b"], "--fit .*hf download a/b config.json"),
        (["--write", "new.yaml"], "--write writes a recipe with a change that --fit finds"),
        (["--json", "--fit", "--on", "1x4GB"], "--fit lists changes; --json and --price"),
        (["--fit", "--on", "8x80GB", "--write", "new.yaml"], "--write .*new.yaml: .* fits .* nothing to change"),
        (
            ["--fit", "--on", "1x4GB", *LARGE, "--write", "nowhere/new.yaml"],
            "nowhere/new.yaml: it cannot be written: No such",
        ),
        (["--fit", "--price", "2", "--on", "1xH100"], "--fit lists changes; --json and --price"),
        (["--price", "-1"], "--price -1: .* such as 2.5"),
    ],
)
def test_a_mistake_is_one_message(
    words: list[str], message: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        run(recipe_file, f"output_dir={tmp_path / 'out'}", *words)
    assert not (tmp_path / "new.yaml").exists()


def test_a_recipe_that_is_there_is_never_overwritten(recipe_file: Path) -> None:
    before = recipe_file.read_bytes()
    with pytest.raises(UserError, match="cannot be written: File exists"):
        run(recipe_file, *LARGE, "--on", "1x4GB", "--fit", "--write", recipe_file)
    assert recipe_file.read_bytes() == before
