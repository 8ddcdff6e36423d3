"""No byte that a run leaves holds a token or a key, whatever the environment and the tools around it have."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.test_safe_path import plant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Command = Callable[..., subprocess.CompletedProcess[str]]

# Made of words, in the shapes that real ones have.
SECRETS = {
    "HF_TOKEN": "hf_PlantedPlantedPlantedPlantedPlanteA",
    "HUGGING_FACE_HUB_TOKEN": "hf_PlantedPlantedPlantedPlantedPlanteB",
    "WANDB_API_KEY": "planted0" * 5,
    "OPENAI_API_KEY": "sk-proj-Planted0planted1planted2planted3",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED0PLANTED1",
    "AWS_SECRET_ACCESS_KEY": "Planted/of/words/in/a/row/of/forty/letter",
    "AWS_SESSION_TOKEN": "planted-session-token-of-many-words",
    "GIT_PASSWORD": "planted-password-of-the-remote",
}


def files_with_secrets(folder: Path) -> list[tuple[str, str]]:
    found = []
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if path.is_symlink():
                continue
            content = path.read_bytes()
            found += [
                (str(path.relative_to(folder)), name) for name, secret in SECRETS.items() if secret.encode() in content
            ]
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("secrets") / "secret.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 2, "save_steps": 1, "logging_steps": 1},
        eval={"tasks": ["builtin:demo"], "limit": 4},
        tracking={"report_to": ["wandb", "tensorboard"], "run_name": "planted"},
    )


def test_what_the_environment_holds_is_nowhere_in_what_a_run_leaves(
    recipe: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on two ranks, checkpoints, wandb's offline files, prepared data, evaluation, report; no module beside the recipe runs."""
    ran = plant(recipe.parent)
    monkeypatch.chdir(recipe.parent)
    words = ["bash", REPOSITORY / "scripts" / "sft.sh", recipe.name]
    told = command(words, NPROC="2", WANDB_MODE="offline", **SECRETS)
    assert not ran.exists(), ran.read_text()
    run = Run(recipe.parent / "outputs" / "secret" / "planted")
    assert run.record["status"] == "finished"
    assert {path.name for path in run.checkpoints.iterdir()} == {"checkpoint-1", "checkpoint-2"}
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert list((run.path / "tensorboard").iterdir())
    assert (run.path / "eval" / "comparison.json").is_file()
    assert (run.path / "report.md").is_file()
    assert files_with_secrets(recipe.parent) == []
    assert not [name for name, secret in SECRETS.items() if secret in told.stdout + told.stderr]


@pytest.mark.parametrize(
    "launcher",
    [["python", "-m", "sft.train"], ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "sft.train"]],
)
def test_an_override_with_a_token_starts_nothing_and_is_not_repeated(
    launcher: list[str], recipe: Path, command: Command, tmp_path: Path
) -> None:
    words = [
        *launcher,
        recipe,
        f"output_dir={tmp_path / 'outputs'}",
        f"train.trainer_args.hub_token={SECRETS['HF_TOKEN']}",
    ]
    status = 2 if launcher[0] == "python" else 1
    told = command(words, expect=status, TMPDIR=str(tmp_path))
    ours = "".join(line for line in told.stderr.splitlines(keepends=True) if "elastic" not in line)
    assert "override train.trainer_args.hub_token" in ours
    assert files_with_secrets(tmp_path) == []
    assert not (tmp_path / "outputs").exists()
    assert SECRETS["HF_TOKEN"] not in told.stdout + told.stderr
