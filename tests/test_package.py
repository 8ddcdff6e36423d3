"""What a wheel holds, compared with the tree; tests/slow/test_wheel.py installs one."""

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from sft import cli
from sft.recipe.schema import REPOSITORY
from sft.run.record import installed_versions

IN_WHEEL = {"recipes": "sft/shipped/recipes", "ds_configs": "sft/shipped/ds_configs"}
LIST_FILES = """
import json
import setuptools
from distutils.core import run_setup

package = run_setup("setup.py", stop_after="init")
package.parse_config_files()
command = package.get_command_obj("build_py")
command.ensure_finalized()
print(json.dumps([command.build_lib, command.get_outputs(include_bytecode=False)]))
"""


def test_a_wheel_has_every_file_of_the_packages_and_the_shipped_folders() -> None:
    words = [sys.executable, "-W", "ignore", "-c", LIST_FILES]
    printed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    built, files = json.loads(printed.splitlines()[-1])
    wanted = set()
    for folder in ("sft", "eval", *IN_WHEEL):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                wanted.add(str(Path(IN_WHEEL.get(folder, folder), file.relative_to(REPOSITORY / folder))))
    assert {str(Path(file).relative_to(built)) for file in files} == wanted
    assert {"sft/shipped/recipes/tiny.yaml", "sft/shipped/ds_configs/zero2.json"} <= wanted


def test_the_command_shows_the_version_that_runs_record() -> None:
    shown = CliRunner().invoke(cli.sft, ["--version"])
    assert shown.output.split()[-1] == installed_versions()["sft-recipes"]
