"""A preparation that ends early: nothing stale, nothing half-written and no process is left, and the next one is complete."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sft.hub.demo import make_demo
from tests.slow.conftest import Start, rows, until, write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
Started = subprocess.Popen[str]
PREPARE, LAUNCH = ([sys.executable, "-m", module] for module in ("sft.launch.prepare", "sft.launch"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files that take some seconds."""
    folder = tmp_path_factory.mktemp("killed")
    demo = make_demo(folder)
    (folder / "data").mkdir()
    for name in "ab":
        with (folder / "data" / f"{name}.jsonl").open("w") as file:
            for number in range(5000):
                turns = [f"{name} {number} " + "question " * (number % 30), f"answer {number} " * (number % 20 + 1)]
                file.write(json.dumps({"prompt": turns[0], "completion": turns[1]}) + "\n")
    data = {"train": str(folder / "data"), "max_length": 256, "held_out": 0.1}
    return write_recipe(
        folder / "job.yaml", model={"name_or_path": str(demo.model)}, data=data, train={"global_batch_size": 8}
    )


def entry(place: Path) -> dict[str, bytes]:
    """Every file of the only entry in a place; of prepared.json all but the time it took."""
    (folder,) = [path for path in place.iterdir() if not path.name.endswith(".lock")]
    assert not folder.name.startswith("."), "a temporary folder is left"
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    summary = json.loads(found["prepared.json"])
    del summary["seconds"]
    return found | {"prepared.json": json.dumps(summary).encode()}


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, ranks: Ranks) -> dict[str, bytes]:
    out = recipe.parent / "undisturbed"
    ranks.run(1, ["sft.launch.prepare", recipe, f"output_dir={out}"])
    return entry(out / ".prepared")


def group(process: Started) -> dict[int, int]:
    """The living processes of a group, each with its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, parent, leader = words[0], int(words[1]), int(words[2])
        if leader == process.pid and state != "Z":
            found[int(stat.parent.name)] = parent
    return found


def half_written(out: Path) -> Path | None:
    return next((path for path in (out / ".prepared").glob(".*.*") if path.is_dir()), None)


def has(out: Path, file: str) -> bool:
    work = half_written(out)
    return work is not None and (work / file).exists() and (work / file).stat().st_size > 0


def at(moment: str, out: Path, process: Started) -> None:
    """Wait until a file of what is being prepared has its first bytes; `the folder`: until there is one."""
    if moment == "the folder":
        until(lambda: half_written(out), process)
    else:
        # The last ones exist for a moment only; then the entry is complete.
        until(lambda: has(out, moment) or list((out / ".prepared").glob("[0-9a-f]*")), process)


def check_goes_on(ranks: Ranks, recipe: Path, out: Path, undisturbed: dict[str, bytes]) -> None:
    ranks.run(1, ["sft.launch.prepare", recipe, f"output_dir={out}"])
    assert entry(out / ".prepared") == undisturbed


@pytest.mark.parametrize("moment", rows(["the folder", "tokens.bin", "train.npz"], ["tokens.bin"]))
def test_a_killed_preparation_leaves_no_process_and_the_next_is_complete(
    moment: str, recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    process = start([*PREPARE, recipe, f"output_dir={tmp_path}"])
    at(moment, tmp_path, process)
    process.kill()
    until(lambda: not group(process))
    check_goes_on(ranks, recipe, tmp_path, undisturbed)


def test_a_stopped_preparation_ends_at_once_and_the_next_is_complete(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    process = start([*PREPARE, recipe, f"output_dir={tmp_path}"])
    at("tokens.bin", tmp_path, process)
    process.terminate()
    printed = process.communicate()[0]
    assert process.returncode in (-15, 143)
    assert "Traceback" not in printed
    until(lambda: not group(process))
    check_goes_on(ranks, recipe, tmp_path, undisturbed)


def test_one_that_waits_takes_over_from_one_that_is_killed(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start
) -> None:
    first = start([*PREPARE, recipe, f"output_dir={tmp_path}"])
    at("the folder", tmp_path, first)
    first.send_signal(signal.SIGSTOP)
    second = start([*PREPARE, recipe, f"output_dir={tmp_path}"])
    (lock,) = (tmp_path / ".prepared").glob("*.lock")
    until(lambda: str(lock) in {file.path for one in family(second) for file in one.open_files()}, second)
    first.kill()
    printed = second.communicate()[0]
    assert second.returncode == 0, printed
    assert entry(tmp_path / ".prepared") == undisturbed


def family(process: Started) -> list[psutil.Process]:
    """A process and its children."""
    one = psutil.Process(process.pid)
    return [one, *one.children(recursive=True)]


def test_a_worker_that_the_system_kills_is_one_message(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    """As it does where memory runs out."""
    process = start([*PREPARE, recipe, f"output_dir={tmp_path}"])
    at("tokens.bin", tmp_path, process)
    worker = next(number for number, parent in group(process).items() if parent == process.pid)
    os.kill(worker, signal.SIGKILL)
    printed = process.communicate()[0]
    assert process.returncode == 2
    assert "Traceback" not in printed
    assert "memory" in printed
    assert half_written(tmp_path) is None
    until(lambda: not group(process))
    check_goes_on(ranks, recipe, tmp_path, undisturbed)


def test_a_start_whose_preparation_the_system_kills_says_so(recipe: Path, tmp_path: Path, start: Start) -> None:
    launcher = start([*LAUNCH, recipe, f"output_dir={tmp_path}", "--prepare"])
    at("tokens.bin", tmp_path, launcher)
    (preparing,) = [number for number, parent in group(launcher).items() if parent == launcher.pid]
    os.kill(preparing, signal.SIGKILL)
    printed = launcher.communicate()[0]
    assert launcher.returncode in (2, 137)
    assert "signal 9" in printed or "memory" in printed, "it ended without a word"


def test_a_killed_start_leaves_nothing_running(recipe: Path, tmp_path: Path, start: Start) -> None:
    """The same files twenty times are work for longer than the test waits."""
    many = json.dumps([{"path": str(recipe.parent / "data")}] * 20)
    launcher = start([*LAUNCH, recipe, f"output_dir={tmp_path}", f"data.train={many}", "--prepare"])
    at("tokens.bin", tmp_path, launcher)
    launcher.kill()
    until(lambda: not group(launcher))


def test_ctrl_c_at_a_start_ends_all_of_it(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    """Ctrl-C goes to all processes of a terminal."""
    launcher = start([*LAUNCH, recipe, f"output_dir={tmp_path}", "--prepare"])
    at("tokens.bin", tmp_path, launcher)
    os.killpg(launcher.pid, signal.SIGINT)
    printed = launcher.communicate()[0]
    assert launcher.returncode == 130
    assert "Traceback" not in printed
    until(lambda: not group(launcher))
    assert half_written(tmp_path) is None
    check_goes_on(ranks, recipe, tmp_path, undisturbed)
