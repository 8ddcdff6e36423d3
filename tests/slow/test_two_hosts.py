"""Two hosts train one job, lose the link between them, and resume.

They are network namespaces of this machine, with addresses of their own and a cable between them that can be pulled. Needs root and
iproute2 (`apt-get install iproute2`).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sft.parallel.deepspeed import FOLDER, own_folder
from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import BIN, lines_of, losses, plain, until, write_recipe
from tests.slow.engine_runs import assert_same_weights
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
TIMEOUT = 10
"""train.ddp_timeout of every job here, in seconds."""

STEPS = 60
PARAMETERS = 563_200
BYTES = 20
"""Of a parameter in a checkpoint of ZeRO-2, in fp32."""


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=20)


@dataclass
class Host:
    """One namespace."""

    name: str
    address: str
    interface: str
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, words: Sequence[str | Path], **environment: str) -> "Running":
        """Start a command as a user of this host would."""
        log = self.folder / f"{self.name}-{len(self.started)}.log"
        # It has a name of its own, too: gloo would ask for the address that it stands for.
        named = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.name, "unshare", "--uts", *named]
        settings = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *map(str, words)],
                env=os.environ | settings | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )
        self.started.append(process)
        return Running(process, log)

    def pull_cable(self) -> None:
        ip("-n", self.name, "link", "set", self.interface, "down")

    def plug_cable(self) -> None:
        ip("-n", self.name, "link", "set", self.interface, "up")

    def processes(self) -> list[int]:
        """What still runs on this host."""
        return [int(word) for word in ip("netns", "pids", self.name).stdout.split()]


@dataclass(frozen=True)
class Running:
    """A command on a host."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def reason_not_here() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if shutil.which("ip") is None:
        return "needs the command ip: apt-get install iproute2"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"sft-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are not allowed here: {error}"
    return None


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; skips the test where there can be none."""
    reason = reason_not_here()
    if reason is not None:
        pytest.skip(reason)
    number = os.getpid() % 100000
    hosts = [
        Host(f"sft{number}{letter}", f"10.77.{number % 250}.{last}", f"v{number}{letter}", folder)
        for letter, last in (("a", 1), ("b", 2))
    ]
    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ip("link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        for host in hosts:
            ip("link", "set", host.interface, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.name, "link", "set", "lo", "up")
            host.plug_cable()
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            for process in host.started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.SubprocessError):
                for pid in host.processes():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                ip("netns", "del", host.name)
            for process in host.started:
                process.wait(timeout=20)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


@pytest.fixture(scope="module")
def recipe(hosts: tuple[Host, Host]) -> Path:
    return write_recipe(
        hosts[0].folder / "job.yaml",
        train={
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "save_steps": 5,
            "logging_steps": 1,
            "ddp_timeout": TIMEOUT,
        },
    )


def finished(started: list[Running], expect: int = 0) -> list[str]:
    """What each has printed, once all have ended."""
    statuses = [running.process.wait() for running in started]
    assert statuses == [expect] * len(started), "\n".join(running.output()[-3000:] for running in started)
    return [running.output() for running in started]


Pair = tuple[Host, Host]
ON_HOST = """
import ctypes, os, signal, socket, sys
from sft.launch import rank
from sft.program import end_with_parent, run_main
launcher = os.getpid()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
end_with_parent(launcher, signal.SIGKILL)
name = os.environ["HOSTS"].split()[int(os.environ["RANK"])]
kernel = ctypes.CDLL(None)
assert kernel.setns(os.open(f"/run/netns/{name}", os.O_RDONLY), 0x40000000) == 0
assert kernel.unshare(0x04000000) == 0
socket.sethostname(name)
run_main(rank.main)
"""
"""A launcher whose only rank moves to its host, of its own network and name, before it trains."""


BUILDS = {FOLDER: str(own_folder())}
"""Both hosts are this machine: DeepSpeed's operations are not built for each name."""


@dataclass(frozen=True)
class Job:
    """A training on both hosts."""

    ended: Callable[[], bool]
    """Whether any of it has ended."""

    wait: Callable[[], tuple[set[int], str]]
    """Wait for all of it: exit statuses, and what was printed on both."""


def as_torchrun_does(hosts: Pair, ranks: Ranks, *program: str | Path) -> Job:
    """With the variables that torchrun sets. Nothing is set for gloo, which would take the address of the host's own name."""
    (hosts[0].folder / "on_host.py").write_text(ON_HOST)
    words = [hosts[0].folder / "on_host.py", *program]
    names = " ".join(host.name for host in hosts)
    job = ThreadPoolExecutor(1).submit(
        ranks.run, 2, words, expect=None, nodes=2, HOSTS=names, MASTER_ADDR=hosts[0].address, **BUILDS
    )

    def wait() -> tuple[set[int], str]:
        printed = job.result()
        return {int(printed["status"])}, printed["stdout"] + printed["stderr"]

    return Job(job.done, wait)


def by_slurm(hosts: Pair, ranks: Ranks, *program: str | Path) -> Job:
    """With the variables that srun sets; the hosts are named by their addresses."""
    network = hosts[0].address.rpartition(".")[0]
    job = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NODELIST": f"{network}.[1-2]"}
    job |= {"MASTER_PORT": str(free_port())} | BUILDS
    words = ["bash", REPOSITORY / "scripts" / "sft.sh", *program]
    started = [host.start(words, **job, SLURM_NODEID=str(rank)) for rank, host in enumerate(hosts)]

    def wait() -> tuple[set[int], str]:
        return {one.process.wait() for one in started}, "".join(one.output() for one in started)

    return Job(lambda: any(one.process.poll() is not None for one in started), wait)


@pytest.mark.parametrize("start", [as_torchrun_does, pytest.param(by_slurm, marks=pytest.mark.extra)])
def test_a_cut_link_ends_in_one_message_on_each_host_and_the_same_command_resumes(
    start: Callable[..., Job], hosts: Pair, recipe: Path, ranks: Ranks
) -> None:
    run, alone = (Run(recipe.parent / "outputs" / recipe.stem / name) for name in (start.__name__, "alone"))
    if not alone.path.exists():
        ranks.run(1, ["sft.train", recipe, "tracking.run_name=alone"])
    program = [recipe, f"tracking.run_name={run.path.name}", "train.deepspeed=zero2"]
    job = start(hosts, ranks, *program)
    try:
        until(lambda: lines_of(run) >= 7 or job.ended(), seconds=240)
        assert lines_of(run) >= 7, job.wait()
        hosts[0].pull_cable()
        statuses, printed = job.wait()
        assert statuses == {1}, printed[-6000:]
        for said in ("lost the other ranks while step", "The same command resumes from checkpoint-"):
            assert printed.count(said) == 2, printed[-6000:]
        assert f"train.ddp_timeout={TIMEOUT}" in printed
        assert "Traceback" not in printed
        until(lambda: not [pid for host in hosts for pid in host.processes()])
    finally:
        hosts[0].plug_cable()
        hosts[1].plug_cable()
    assert run.record["status"] == "failed"
    assert "lost the other ranks" in run.record["error"]
    assert run.record["running"]["timeout"] == f"{TIMEOUT} s"
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(checkpoint.name[11:])
    statuses, printed = start(hosts, ranks, *program).wait()
    assert statuses == {0}, printed[-6000:]
    assert f"resumes from {checkpoint.name}" in printed
    assert (run.record["ranks"], run.record["running"]["engine"]) == (2, "ZeRO-2")
    assert run.record["status"] == "finished"
    assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
    assert_same_weights(run, alone, 1e-4)
    size = sum(file.stat().st_size for file in run.last_checkpoint().rglob("*") if file.is_file())  # type: ignore[union-attr]
    assert size == pytest.approx(PARAMETERS * BYTES, rel=0.06), "the plan reckons with as many"


@pytest.mark.extra  # test_out_of_memory.py has two ranks of one machine
@pytest.mark.parametrize("waits", ["over gloo", "in C, as over NCCL"])
def test_a_gpu_without_memory_on_one_host_ends_the_job_on_both_without_restarts(
    waits: str, hosts: Pair, recipe: Path
) -> None:
    name, port = plain(f"memory {waits}"), free_port()
    fault = {"AT": "step 3, micro-batch 1", "ON": "1", "DO": "out of memory"}
    fault |= {"OTHERS": "wait in C"} if waits != "over gloo" else {}
    program = (
        "import sys; from sft.launch.topology import Topology; from sft.launch.torchrun import start; start(Topology("
    )
    started = [
        host.start(
            [
                sys.executable,
                "-c",
                f"{program}1, 2, {rank}, {hosts[0].address!r}, {port}), sys.argv[1:], restarts=3, lost_after={TIMEOUT})",
                REPOSITORY / "tests" / "slow" / "faults.py",
                *(recipe, f"tracking.run_name={name}", "train.ddp_timeout=600"),
            ],
            **fault,
        )
        for rank, host in enumerate(hosts)
    ]
    until(lambda: all(one.process.poll() is not None for one in started), seconds=120)
    for printed in finished(started, expect=2):
        assert printed.count("Rank 1 ran out of GPU memory while step 3 was trained (") == 1, printed
        assert not re.search("Restarting all processes|Traceback|lost the other ranks|did not meet", printed), printed
    run = Run(recipe.parent / "outputs" / recipe.stem / name)
    assert (run.record["status"], "ran out of GPU memory" in run.record["error"]) == ("failed", True)
