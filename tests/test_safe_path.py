"""Python files in the working directory do not run: somebody else's recipe may lie there beside a yaml.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import BIN, rows, write_recipe

PLANTED = (
    "accelerate datasets deepspeed eval evaluate json lm_eval ninja numpy peft pydantic pip psutil rich runpy safetensors setuptools sft "
    "socket tokenizers torch transformers trl typing venv yaml"
).split()
PYTHON = [sys.executable, "-m"]
COMMANDS = {
    "sft.sh": ["bash", "scripts/sft.sh", "missing.yaml", "--plan"],
    "eval.sh": ["bash", "scripts/eval.sh", "limit=1"],
    "chat.sh": ["bash", "scripts/chat.sh", "missing", "--temperature", "-1"],
    "export.sh": ["bash", "scripts/export.sh", "missing", "--to", "merged"],
    "sft.train by hand": [*PYTHON, "sft.train", "missing.yaml"],
    "eval.run by hand": [*PYTHON, "eval.run", "limit=1"],
}


def plant(folder: Path, names: list[str] = PLANTED) -> Path:
    """Modules that leave a line in a file when they run; returns the file."""
    ran = folder / "ran"
    for name in names:
        code = f"import os, sys\nos.write(os.open({str(ran)!r}, 0o2101), (__name__ + ' ' + ' '.join(sys.orig_argv)).encode())\n"
        (folder / f"{name}.py").write_text(code + "raise SystemExit(99)\n")
    return ran


def start(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(REPOSITORY / word) if word.startswith("scripts/") else word for word in words]
    settings = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    return subprocess.run(
        words, cwd=folder, env=inherited | settings, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_modules_beside_a_recipe_do_not_run(name: str, tmp_path: Path) -> None:
    by_script = name.endswith(".sh")
    # By hand `python -m` itself looks for runpy, and for our packages, in the working directory first: docs/security.md.
    ran = plant(tmp_path, PLANTED if by_script else [one for one in PLANTED if one not in ("runpy", "eval", "sft")])
    done = start(COMMANDS[name], tmp_path, **({"PYTHONPATH": ":/nowhere::"} if by_script else {}))
    assert (done.returncode, ran.exists()) == (2, False), done.stdout + done.stderr


LAUNCHERS = {
    "sft.sh": ["bash", "scripts/sft.sh"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "sft.train"],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m", "sft.train"],
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--module", "sft.train"],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", rows(LAUNCHERS, []))
def test_nor_in_ranks_workers_builds_checks_and_the_evaluation(name: str, tmp_path: Path) -> None:
    more, evaluation = {}, {"chat": False}
    if name == "sft.sh":
        more = {"save_canary": True, "trainer_args": {"dataloader_num_workers": 1}}
        evaluation = {"tasks": ["builtin:demo"], "limit": 4, "chat": {"max_new_tokens": 4}}
    recipe = write_recipe(
        tmp_path / "mine.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 2, "deepspeed": "zero2", **more},
        eval=evaluation,
    )
    ran = plant(tmp_path)
    # Without it the launchers themselves import what lies in the working directory.
    environment = {"NPROC": "2"} if name == "sft.sh" else {"PYTHONSAFEPATH": "1", "ACCELERATE_USE_CPU": "true"}
    done = start([*LAUNCHERS[name], str(recipe)], tmp_path, **environment)
    assert (done.returncode, ran.exists()) == (0, False), done.stdout[-3000:] + done.stderr[-3000:]
