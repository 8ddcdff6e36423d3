"""What the preflight catches, with launchers and ranks as a user starts them; each ends with one message and status 2."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from sft.parallel.process_group import free_port
from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import BIN, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Command = Callable[..., subprocess.CompletedProcess[str]]
LAUNCH = [sys.executable, "-m", "sft.launch"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("preflight") / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 4, "save_steps": 2},
    )


def launchers(recipe: Path, *second: str, before: tuple[str, ...] = (), **environment: str) -> list[str]:
    """What two launchers say that were started as on two machines; the second one's overrides, wrapper and environment differ."""
    port, started = str(free_port()), []
    path = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    job = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NPROC": "1"}
    for rank in (0, 1):
        words = [*(before if rank else ()), *LAUNCH, str(recipe), *(second if rank else ()), "--preflight"]
        variables = os.environ | path | job | {"NODE_RANK": str(rank)} | (environment if rank else {})
        started.append(
            subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = []
    for process in started:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 2, output
        assert "Traceback" not in output, output
        said.append(output)
    return said


def test_a_missing_machine_is_told_within_the_time_it_is_waited_for(recipe: Path, command: Command) -> None:
    job = {
        "NNODES": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "START_TIMEOUT": "2",
    }
    started = time.monotonic()
    done = command([*LAUNCH, recipe], expect=2, PYTHONPATH=str(REPOSITORY), **job)
    assert "2 machines of this job did not meet within START_TIMEOUT=2 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1", "did not meet within START_TIMEOUT=1 s"), ("no-such-host.invalid", "no address is known")],
)
def test_a_wrong_address_is_told_with_what_is_wrong_about_it(
    address: str, words: str, recipe: Path, command: Command
) -> None:
    job = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "START_TIMEOUT": "1",
    }
    done = command([*LAUNCH, recipe], expect=2, PYTHONPATH=str(REPOSITORY), **job)
    assert words in done.stderr
    assert f"MASTER_ADDR={address}" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_version_on_one_machine_is_told_on_both(recipe: Path, tmp_path: Path) -> None:
    shim = tmp_path / "trl-1.99.0.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.99.0\n")
    for said in launchers(recipe, PYTHONPATH=f"{tmp_path}:{REPOSITORY}"):
        assert said.count("of this job differ") == 1
        assert f"packages: trl is {version('trl')}" in said
        assert "1.99.0 on" in said


def test_another_recipe_on_one_machine_is_told_on_both(recipe: Path) -> None:
    for said in launchers(recipe, "train.seed=7"):
        assert said.count("of this job differ") == 1
        assert "recipe: train.seed is 0 on" in said
        assert "and 7 on" in said


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """A disk of its own at a folder; skips the test where mounting is not allowed."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_folder_that_is_not_shared_is_told_on_both(recipe: Path, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk that only one process sees needs root")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    recipe_here = tmp_path / "job.yaml"
    recipe_here.write_text(recipe.read_text().replace(str(recipe.parent / "outputs"), str(outputs)))
    own_disk = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {outputs}; exec "$@"', "sh")
    for said in launchers(recipe_here, before=own_disk):
        assert said.count("of this job differ") == 1
        assert "(rank 1) does not see what" in said
        assert f"writes into {outputs}" in said


@pytest.mark.parametrize("processes", ["2", pytest.param("1", marks=pytest.mark.extra)])
def test_a_full_disk_is_told_before_anything_is_started(
    processes: str, recipe: Path, tmp_path: Path, command: Command
) -> None:
    with small_disk(tmp_path, 12):
        words = [*LAUNCH, recipe, f"output_dir={tmp_path}"]
        done = command(words, expect=2, NPROC=processes, PYTHONPATH=str(REPOSITORY))
    assert "disk: 2 checkpoints of 6.8 MB and final/ of 2.3 MB need 15.8 MB" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert "torchrun" not in done.stdout


def test_ranks_that_fit_together_are_shown_as_a_table(recipe: Path, command: Command) -> None:
    done = command([*LAUNCH, recipe, "--preflight"], NPROC="2", PYTHONPATH=str(REPOSITORY))
    rows = {words[0]: words[1:] for line in done.stdout.splitlines() if len(words := line.split()) > 2}
    for name in ("packages", "code", "recipe", "plan", "GPUs", "variables", "dataset", "output_dir", "disk"):
        assert rows[name][0] == "ok", name
    assert "GB/s" in rows["all-reduce"]
    assert not list((recipe.parent / "outputs").glob(".preflight-*"))
    assert not list((recipe.parent / "outputs").glob("job/*")), "a preflight makes no run"


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
DIFFERENT = """
import os, sys
from sft.program import run_main
from sft.launch.rank import main
sys.argv.append("train.seed=" + os.environ["RANK"])
run_main(main)
"""


def test_ranks_that_were_started_by_hand_with_other_recipes_say_so(
    recipe: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "program.py").write_text(DIFFERENT)
    done = command([*TORCHRUN, tmp_path / "program.py", recipe], expect=1, PYTHONPATH=str(REPOSITORY))
    assert done.stderr.count("recipe: train.seed is 0 on") == 1
    assert "and 1 on" in done.stderr
    assert "(rank 1)" in done.stderr


PATIENCE = """
import os, signal, subprocess, sys, time
from datetime import timedelta
from sft.parallel import process_group as distributed
from sft.errors import DataError
from sft.errors import is_lost
distributed.join_group(False, False, 2)
assert distributed.group_timeouts() == {2}
started = time.monotonic()
assert distributed.from_rank_0(lambda: time.sleep(5) or 7) == 7
assert time.monotonic() - started >= 5, "longer than the timeout, and nobody is lost"
try:
    distributed.from_rank_0(lambda: (_ for _ in ()).throw(DataError("no rows")))
    raise AssertionError("the first rank's mistake is everybody's")
except DataError as error:
    assert str(error) == "no rows"
if os.environ["RANK"] == "0":
    subprocess.Popen(["sh", "-c", f"sleep 14; kill -9 {os.getpid()}"])
started = time.monotonic()
try:
    with distributed.barrier_at_end():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
except RuntimeError as error:
    assert is_lost(error), error
    assert time.monotonic() - started < 13
    print("TOLD", flush=True)
    time.sleep(20)
"""


def test_a_rank_may_work_longer_than_the_timeout_and_one_that_hangs_is_noticed(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "program.py").write_text(PATIENCE)
    done = command([*TORCHRUN, tmp_path / "program.py"], expect=1, PYTHONPATH=str(REPOSITORY))
    assert "TOLD" in done.stdout
    assert "AssertionError" not in done.stderr
