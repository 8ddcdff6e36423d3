"""The commands in the README and the guides are ones that the command line and the recipe's schema accept."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft import cli
from sft.recipe.load import parse_recipe
from sft.recipe.schema import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
RECIPE_OF_A_USER = ("mine.yaml", "job.yaml")


def commands(text: str) -> Iterator[str]:
    """Every command in the bash blocks of a page, without its comment."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield shlex.join(words)


COMMANDS = sorted({command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))})
STARTS = [command for command in COMMANDS if "bash scripts/sft.sh" in command]


@pytest.mark.parametrize("command", STARTS)
def test_a_start_is_understood_and_its_overrides_are_keys_of_the_recipe(command: str) -> None:
    words = shlex.split(command)
    context = cli.train.make_context("train", words[words.index("scripts/sft.sh") + 1 :])
    recipe, overrides = cli.recipe_and_overrides(context.params["words"])
    shipped = REPOSITORY / recipe
    if shipped.is_file():
        parse_recipe(shipped.read_text(), overrides)


@pytest.mark.parametrize("command", [command for command in STARTS if "--plan" in command])
def test_a_plan_is_printed(
    command: str,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(recipe_file) if word in RECIPE_OF_A_USER else word for word in shlex.split(command)]
    for word in words[: words.index("bash")]:
        monkeypatch.setenv(*word.split("=", 1))
    cli.run(["train", *words[words.index("scripts/sft.sh") + 1 :], f"output_dir={tmp_path}"])
    assert "global_batch_size" in capsys.readouterr().out
