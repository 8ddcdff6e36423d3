"""The command line: what it understands, its help, and what it does without arguments."""

import os
import subprocess
import sys

import pytest

from sft import cli
from sft.errors import RecipeError

COMMANDS = ("init", "train", "plan", "show", "prepare", "eval", "chat", "export", "diff")


def sft(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sft.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        (["a.yaml", "x=1", "y=2"], "a.yaml", ["x=1", "y=2"]),
        (["x=1", "a.yaml"], "a.yaml", ["x=1"]),
    ],
)
def test_the_recipe_and_its_overrides_come_in_any_order(words: list[str], recipe: str, overrides: list[str]) -> None:
    assert cli.recipe_and_overrides(words) == (recipe, overrides)


@pytest.mark.parametrize(("words", "named"), [(["a.yaml", "b.yaml"], "'b.yaml'"), (["x=1"], "Name a recipe")])
def test_one_recipe_is_named(words: list[str], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        cli.recipe_and_overrides(words)


def test_options_stand_anywhere() -> None:
    given = cli.train.make_context("train", ["--show", "3", "a.yaml", "--max-restarts=2", "x=1"]).params
    assert (given["words"], given["rows"], given["max_restarts"], given["plans"]) == (("a.yaml", "x=1"), 3, 2, False)


@pytest.mark.parametrize("words", [["train", "a.yaml", "--pln"], ["diff", "a"], ["trian"]])
def test_a_wrong_command_line_is_one_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err or words[0] == "diff"


BECOME = ("chat", "export")
"""Commands that become another program."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command in BECOME:
        shown = sft(command, "--help").stdout
    else:
        cli.run([command, "--help"])
        shown = capsys.readouterr().out
    assert any(f"sft {command} {data}" in shown for data in ("outputs/", "recipes/", "reviews.csv"))


def test_the_shell_completes_commands_and_recipe_keys() -> None:
    completed = sft(_SFT_COMPLETE="bash_complete", COMP_WORDS="sft tr", COMP_CWORD="1")
    assert completed.stdout.split() == ["plain,train"]
    completed = sft(_SFT_COMPLETE="bash_complete", COMP_WORDS="sft train a.yaml train.learn", COMP_CWORD="3")
    assert "train.learning_rate=" in completed.stdout
