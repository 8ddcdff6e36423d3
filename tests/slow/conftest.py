import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from _pytest.mark import ParameterSet
from safetensors.torch import load_file, save_file

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.ranks import Ranks

if TYPE_CHECKING:
    from tests.slow.engine_runs import EngineRuns

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
            check=False,
        )
        assert done.returncode == expect, done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command and return at once; whatever it has started ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(words: list[Any], **environment: str) -> "subprocess.Popen[str]":
        path = f"{BIN}:{environment.pop('PATH', os.environ['PATH'])}"
        settings = {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        started.append(
            subprocess.Popen(
                [str(word) for word in words],
                env=os.environ | settings | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        # torchrun waits for a rank that is stopped, and it starts each in a session of its own.
        with suppress(psutil.Error):
            for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                with suppress(psutil.Error):
                    one.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipes of a module share what is prepared."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def own_recipe(shared_folder: Path, request: pytest.FixtureRequest) -> Path:
    """A recipe of this test alone, beside those of the module's other tests; yet to be written."""
    return shared_folder / f"{plain(request.node.name)}.yaml"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts programs on real ranks, without their imports."""
    started = Ranks()
    yield started
    started.close()


@pytest.fixture(scope="session")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> "EngineRuns":
    """The runs of every engine, which all tests of all pytest workers share."""
    from tests.slow.engine_runs import EngineRuns

    base = tmp_path_factory.getbasetemp()
    return EngineRuns((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "engine-runs", ranks)


def rows(names: Iterable[str], chosen: Collection[str]) -> list[ParameterSet]:
    """Parameters by name, of which those that were not chosen to prove the law are `extra`."""
    names = list(names)
    assert set(chosen) <= set(names), set(chosen) - set(names)
    return [pytest.param(name, id=name, marks=() if name in chosen else pytest.mark.extra) for name in names]


def plain(name: str) -> str:
    """A row's name as a run's."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def until(holds: Callable[[], object], process: "subprocess.Popen[str] | None" = None, seconds: float = 300) -> None:
    """Wait for what a process does, and fail with what it has said where it ends before.

    Args:
        holds: What is waited for.
        process: Whose end makes waiting vain.
        seconds: Far more than it takes; a loaded machine is late.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        ended = process is not None and process.poll() is not None
        if process is not None and ended and not holds():
            raise AssertionError(f"it ended before the moment came: {process.communicate()}")
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.005)


def lines_of(run: Run) -> int:
    """How many steps a run has logged so far."""
    return len(run.metrics_file.read_text().splitlines()) if run.metrics_file.exists() else 0


def latest(recipe: Path) -> Run:
    """The newest run of a recipe that write_recipe has written."""
    return Run((recipe.parent / "outputs" / recipe.stem / "latest").resolve())


def losses(run: Run) -> list[float]:
    """The loss at every logged step."""
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


def decisions(run: Run) -> dict[str, Any]:
    """The plan's decisions by name."""
    return {row["name"]: row["value"] for row in json.loads(run.plan_file.read_text())["decisions"]}


def write_recipe(path: Path, **sections: dict[str, Any]) -> Path:
    """A recipe file: of the demo, without save verification and chat samples, but for what the test says."""
    sections = {
        "model": {"name_or_path": "builtin:demo"},
        "data": {"train": "builtin:demo", "max_length": 128},
    } | sections
    sections["train"] = {"save_canary": False} | sections.get("train", {})
    sections["eval"] = {"chat": False} | sections.get("eval", {})
    path.write_text(
        yaml.safe_dump({"schema_version": 1, "version": 1, "output_dir": str(path.parent / "outputs"), **sections})
    )
    return path


def untie(model: Path, folder: Path) -> Path:
    """A copy of a model with an output embedding of its own."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
