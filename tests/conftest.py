import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft.hub.demo import Demo, make_demo
from sft.recipe.load import parse_recipe
from sft.recipe.schema import REPOSITORY, Recipe

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # A shell starts what it puts in the background so, and the programs that tests start would not hear of Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = REPOSITORY.parent / "shared" / "data"

DEMO_RECIPE = """\
schema_version: 1
version: 1
model: {name_or_path: "builtin:demo"}
data: {train: "builtin:demo", max_length: 128}
train: {global_batch_size: 8}
"""


@pytest.fixture(autouse=True)
def _a_plain_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, nothing that a launcher or a cluster has set, and no GPU but for the tests that need one."""
    launched = ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    for name in [
        *launched,
        "LOCAL_WORLD_SIZE",
        *(name for name in os.environ if name.startswith(("SLURM_", "PET_", "SKYPILOT_"))),
    ]:
        monkeypatch.delenv(name, raising=False)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # transformers prints a line about it when it is imported.
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output_dir that all tests of the session share, so that the demo is made once."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="session")
def demo(outputs: Path) -> Demo:
    return make_demo(outputs)


@pytest.fixture(scope="session")
def make_recipe(outputs: Path) -> Callable[..., Recipe]:
    """The demo's recipe with overrides."""

    def make(*overrides: str) -> Recipe:
        return parse_recipe(DEMO_RECIPE, [f"output_dir={outputs}", *overrides])

    return make


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """The demo's recipe as a file of the user's."""
    path = tmp_path / "mine.yaml"
    path.write_text(DEMO_RECIPE)
    return path


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"real data is not at {SHARED}")
    return SHARED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many KiB; skips the test where only root may."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        place = tmp_path / f"disk-{size}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("only root may mount a small file system")
        mounted.append(place)
        return place

    yield mount
    gc.collect()  # reports files that nobody closed
    for place in mounted:
        subprocess.run(["umount", "--lazy", "--recursive", str(place)], check=True)
