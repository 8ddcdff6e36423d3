"""A preparation that ends early: nothing stale, nothing half-written and no process is left, and the next one is whole.

Chosen are each moment up to the first rows once for a kill, and of each signal one moment in the middle; the other moments are `extra`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft.hub.demo import make_demo
from tests.slow.conftest import until, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Started = subprocess.Popen[str]


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


Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    """A program of ours as the first of a process group of its own, all of which ends with the test."""
    processes: list[Started] = []

    def started(module: str, *words: str | Path) -> Started:
        command = [sys.executable, "-m", module, *map(str, words)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        for number in group(process):
            os.kill(number, signal.SIGKILL)
        process.communicate()


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


EXTRA = pytest.mark.extra
MOMENTS = [
    "the folder",
    "tokens.bin",
    "train.npz",
    pytest.param("prepared.json", marks=EXTRA),
    0.3,
    pytest.param(0.8, marks=EXTRA),
]
"""A file has its first bytes, or so many seconds have passed since there were tokens."""


def at(moment: str | float, out: Path, process: Started) -> None:
    if moment == "the folder":
        until(lambda: half_written(out), process)
    elif isinstance(moment, str):
        # The last ones are there for a moment only; then the entry is whole.
        until(lambda: has(out, moment) or list((out / ".prepared").glob("[0-9a-f]*")), process)
    else:
        until(lambda: has(out, "tokens.bin"), process)
        time.sleep(moment)


def check_goes_on(ranks: Ranks, recipe: Path, out: Path, undisturbed: dict[str, bytes]) -> None:
    ranks.run(1, ["sft.launch.prepare", recipe, f"output_dir={out}"])
    assert entry(out / ".prepared") == undisturbed


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_preparation_leaves_no_process_and_the_next_is_whole(
    moment: str | float, recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    process = start("sft.launch.prepare", recipe, f"output_dir={tmp_path}")
    at(moment, tmp_path, process)
    process.kill()
    until(lambda: not group(process))
    check_goes_on(ranks, recipe, tmp_path, undisturbed)


TERM, INT = (signal.SIGTERM, (-15, 143)), (signal.SIGINT, (130,))


@pytest.mark.parametrize(
    ("number", "status", "moment"),
    [
        (*TERM, "tokens.bin"),
        (*INT, "the folder"),
        (*INT, 0.4),
        *(pytest.param(*case, marks=EXTRA) for case in ((*TERM, "the folder"), (*TERM, 0.4), (*INT, "tokens.bin"))),
    ],
)
def test_a_stopped_preparation_ends_at_once_and_the_next_is_whole(
    number: signal.Signals,
    status: tuple[int, ...],
    moment: str | float,
    recipe: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    start: Start,
    ranks: Ranks,
) -> None:
    process = start("sft.launch.prepare", recipe, f"output_dir={tmp_path}")
    at(moment, tmp_path, process)
    # Ctrl-C goes to all processes of a terminal, kill to one.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode in status
    assert "Traceback" not in told
    until(lambda: not group(process))
    if number == signal.SIGINT:
        assert half_written(tmp_path) is None
    check_goes_on(ranks, recipe, tmp_path, undisturbed)


def test_one_that_waits_takes_over_from_one_that_is_killed(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start
) -> None:
    first = start("sft.launch.prepare", recipe, f"output_dir={tmp_path}")
    at("tokens.bin", tmp_path, first)
    second = start("sft.launch.prepare", recipe, f"output_dir={tmp_path}")
    time.sleep(0.8)
    first.kill()
    told = second.communicate(timeout=100)[1]
    assert second.returncode == 0, told
    assert entry(tmp_path / ".prepared") == undisturbed


def test_a_worker_that_the_system_kills_is_one_message(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    """As it does where memory runs out."""
    process = start("sft.launch.prepare", recipe, f"output_dir={tmp_path}")
    at("tokens.bin", tmp_path, process)
    worker = next(number for number, parent in group(process).items() if parent == process.pid)
    os.kill(worker, signal.SIGKILL)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "Traceback" not in told
    assert "memory" in told
    assert half_written(tmp_path) is None
    until(lambda: not group(process))
    check_goes_on(ranks, recipe, tmp_path, undisturbed)


def test_a_start_whose_preparation_the_system_kills_says_so(recipe: Path, tmp_path: Path, start: Start) -> None:
    launcher = start("sft.launch", recipe, f"output_dir={tmp_path}", "--prepare")
    at("tokens.bin", tmp_path, launcher)
    (preparing,) = [number for number, parent in group(launcher).items() if parent == launcher.pid]
    os.kill(preparing, signal.SIGKILL)
    told = launcher.communicate(timeout=60)[1]
    assert launcher.returncode in (2, 137)
    lines = [line for line in told.replace("\r", "\n").splitlines() if line and not line.startswith("Preparing ")]
    assert any("signal 9" in line or "memory" in line for line in lines), "it ended without a word"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_start_that_is_stopped_leaves_nothing_running(
    number: signal.Signals, recipe: Path, tmp_path: Path, start: Start
) -> None:
    """The same files twenty times are work for longer than the test waits."""
    many = json.dumps([{"path": str(recipe.parent / "data")}] * 20)
    launcher = start("sft.launch", recipe, f"output_dir={tmp_path}", f"data.train={many}", "--prepare")
    at("tokens.bin", tmp_path, launcher)
    launcher.send_signal(number)
    launcher.wait(timeout=60)
    until(lambda: not group(launcher))


def test_ctrl_c_at_a_start_ends_all_of_it(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, start: Start, ranks: Ranks
) -> None:
    launcher = start("sft.launch", recipe, f"output_dir={tmp_path}", "--prepare")
    at("tokens.bin", tmp_path, launcher)
    os.killpg(launcher.pid, signal.SIGINT)
    told = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 130
    assert "Traceback" not in told
    until(lambda: not group(launcher))
    assert half_written(tmp_path) is None
    check_goes_on(ranks, recipe, tmp_path, undisturbed)
