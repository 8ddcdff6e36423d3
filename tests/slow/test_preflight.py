"""What the preflight catches, with launchers and ranks as a user starts them; each ends with one message and status 2."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import Start, write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
LAUNCH = [sys.executable, "-m", "sft.launch"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("preflight") / "job.yaml",
        train={"global_batch_size": 8, "max_steps": 4, "save_steps": 2},
    )


def two_nodes(node_rank: int, **environment: str) -> dict[str, str]:
    """The environment of a launcher on one of two machines, which is this one."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC": "1"}
    return {"NNODES": "2", "NODE_RANK": str(node_rank), "PYTHONPATH": str(REPOSITORY), **where, **environment}


@pytest.mark.parametrize(
    ("node_rank", "words"),
    [
        (0, "2 machines of this job did not meet within START_TIMEOUT=2 s"),
        (1, "did not meet within START_TIMEOUT=2 s"),
    ],
)
def test_a_machine_that_is_not_reached_is_reported_within_start_timeout(
    node_rank: int, words: str, recipe: Path, ranks: Ranks
) -> None:
    job = two_nodes(node_rank, START_TIMEOUT="2")
    printed = ranks.run(1, ["sft.launch", recipe], expect=2, **job)["stderr"]
    assert words in printed
    assert node_rank == 0 or "MASTER_ADDR=127.0.0.1" in printed
    assert "Traceback" not in printed


def test_two_machines_that_differ_are_both_told_how(recipe: Path, tmp_path: Path, start: Start) -> None:
    """In a package, in the recipe, and in what they see at output_dir."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk that only one process sees needs root")
    shim, outputs = tmp_path / "trl-1.99.0.dist-info", tmp_path / "outputs"
    for folder in (shim, outputs):
        folder.mkdir()
    (shim / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.99.0\n")
    own_disk = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {outputs}; exec "$@"', "sh")
    words, both = [*LAUNCH, recipe, f"output_dir={outputs}", "--preflight"], two_nodes(0)
    second = both | {"NODE_RANK": "1", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    jobs = [start(words, **both), start([*own_disk, *words, "train.seed=7"], **second)]
    for job in jobs:
        printed = job.communicate()[0]
        assert job.returncode == 2, printed
        assert "Traceback" not in printed, printed
        assert printed.count("of this job differ") == 1
        assert f"packages: trl is {version('trl')}" in printed and "1.99.0 on" in printed
        assert "recipe: train.seed is 0 on" in printed and "and 7 on" in printed
        assert "(rank 1) does not see what" in printed and f"writes into {outputs}" in printed


def test_a_full_disk_is_reported_before_anything_is_started(
    recipe: Path, small_disk: Callable[[int], Path], ranks: Ranks
) -> None:
    disk = small_disk(12 * 1024)
    printed = ranks.run(1, ["sft.launch", recipe, f"output_dir={disk}"], expect=2, NPROC="2")
    assert re.search(r"disk: needed are 2 checkpoints of 6.8 MB.* MB free", printed["stderr"])
    assert str(disk) in printed["stderr"]
    assert "Traceback" not in printed["stderr"]
    assert "torchrun" not in printed["stdout"]


def test_ranks_that_fit_together_are_shown_as_a_table(recipe: Path, ranks: Ranks) -> None:
    printed = ranks.run(2, ["sft.train", recipe, "--preflight"])["stdout"]
    rows = {words[0]: words[1:] for line in printed.splitlines() if len(words := line.split()) > 2}
    for name in ("packages", "code", "recipe", "plan", "GPUs", "variables", "dataset", "output_dir", "disk"):
        assert rows[name][0] == "ok", name
    assert "GB/s" in rows["all-reduce"]
    assert not list((recipe.parent / "outputs").glob(".preflight-*"))
    assert not list((recipe.parent / "outputs").glob("job/*")), "a preflight makes no run"


def test_ranks_that_were_started_by_hand_with_other_recipes_say_so(recipe: Path, tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "program.py").write_text(DIFFERENT)
    printed = ranks.run(2, [tmp_path / "program.py", recipe], expect=2)["stderr"]
    assert printed.count("recipe: train.seed is 0 on") == 1
    assert "and 1 on" in printed and "(rank 1)" in printed


DIFFERENT = """
import os, sys
from sft.program import run_main
from sft.launch.rank import main
sys.argv.append("train.seed=" + os.environ["RANK"])
run_main(main)
"""

BARRIERS = """
import os, signal, sys, time
from pathlib import Path
from sft.parallel import process_group as group
from sft.errors import DataError, is_lost
group.join_group(False, False, 2)
assert group.group_timeouts() == {2}
started = time.monotonic()
assert group.from_rank_0(lambda: time.sleep(5) or 7) == 7
assert time.monotonic() - started >= 5, "longer than the timeout, and nobody is lost"
try:
    group.from_rank_0(lambda: (_ for _ in ()).throw(DataError("no rows")))
    raise AssertionError("rank 0's mistake is everybody's")
except DataError as error:
    assert str(error) == "no rows"
file = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    file.write_text(str(os.getpid()))
try:
    with group.barrier_at_end():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
except RuntimeError as error:
    assert is_lost(error), error
    print("LOST", flush=True)
    os.kill(int(file.read_text()), signal.SIGKILL)
"""


def test_a_rank_may_work_longer_than_the_timeout_and_one_that_hangs_is_noticed(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "program.py").write_text(BARRIERS)
    printed = ranks.run(2, [tmp_path / "program.py", tmp_path / "rank-0"], expect=None)
    assert "LOST" in printed["stdout"], printed
    assert "AssertionError" not in printed["stderr"]
