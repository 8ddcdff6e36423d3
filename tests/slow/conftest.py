import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.run_directory import Run
from tests.slow.ranks import Ranks

BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command as a user would, and fail with its output where it fails."""

    def run(words: list[str | Path], expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{BIN}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(word) for word in words],
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == expect, done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts programs on real ranks, without their imports."""
    started = Ranks()
    yield started
    started.close()


def losses(run: Run) -> list[float]:
    """The loss at every logged step."""
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


def decisions(run: Run) -> dict[str, Any]:
    """The plan's decisions by name."""
    return {row["name"]: row["value"] for row in json.loads(run.plan_file.read_text())["decisions"]}


def write_recipe(path: Path, **sections: dict[str, Any]) -> Path:
    """A recipe file; without the check of the save and answers to prompts, but where the test asks for them."""
    sections["train"] = {"save_canary": False} | sections.get("train", {})
    sections["eval"] = {"chat": False} | sections.get("eval", {})
    path.write_text(
        yaml.safe_dump({"schema_version": 1, "version": 1, "output_dir": str(path.parent / "outputs"), **sections})
    )
    return path


def write_task(path: Path, data: Path, **keys: object) -> Path:
    """A task file of lm_eval over local rows."""
    task = {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    path.write_text(yaml.safe_dump(task | keys))
    return path
