"""A private Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd of its own, in one folder.

    apt-get install slurm-wlm munge
    python -m tests.slurm_cluster /tmp/cluster     # starts it, prints SLURM_CONF, and ends it with Ctrl-C

Nothing of the machine's own Slurm is read or changed. Needs root. Processes are tracked by /proc: cgroups are not needed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY

JOB_SECONDS = 300
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("node1", "node2")

CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.socket,cred_expire=10  # seconds; a requeued job waits so long, too: by default 120
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
PropagateResourceLimits=NONE
WaitTime=2  # as strict as a cluster may be: a step ends so many seconds after its first task
KillOnBadExit=1
SlurmdTimeout=20
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cores} RealMemory={memory}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory={memory}
PartitionName=all Nodes=node[1-2] Default=YES
"""


def why_not() -> str | None:
    """Why no cluster can start on this machine; None where one can."""
    missing = [name for name in DAEMONS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "only root starts a private Slurm cluster"


@dataclass
class Cluster:
    """A running cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a user's commands need to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/bin"}

    def start(self, name: str) -> None:
        """Start one daemon: munged, slurmctld, or a node's slurmd."""
        config = ["-D", "-f", str(self.folder / "slurm.conf")]
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        words = {
            "munged": [
                "munged",
                "--foreground",
                "--force",
                *(f"--{file}={self.folder}/munge.{file.removesuffix('-file')}" for file in files),
            ],
            "slurmctld": ["slurmctld", *config],
        }.get(name, ["slurmd", "-N", name, *config])
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *words],  # they end with this process
                env=os.environ | self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def run(self, *words: str | Path, **environment: str) -> str:
        """What a command of Slurm's prints; fails with it where the command fails."""
        done = subprocess.run(
            list(map(str, words)),
            env=os.environ | self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, script: Path, *words: str | Path, options: Sequence[str] = (), **environment: str) -> str:
        """Submit a script of the repository's as it is, but for the GPUs and cores that this machine lacks; returns the job's number."""
        ours = ["--gpus-per-node=0", "--cpus-per-task=1", f"--output={self.folder}/job-%A.out", "--mem=0", *options]
        return self.run("sbatch", "--parsable", f"--chdir={REPOSITORY}", *ours, script, *words, **environment).strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED and others."""
        shown = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        return shown[1] if shown else ""

    def end_of(self, job: str) -> str:
        """The state of a job once it has ended."""
        self.wait(lambda: self.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))
        return self.state(job)

    def printed(self, job: str) -> str:
        """What a job or an array has printed so far."""
        file = self.folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def wait(self, holds: Callable[[], bool], seconds: float = JOB_SECONDS) -> None:
        """Wait for the cluster; fails with the controller's log where it takes longer."""
        deadline = time.monotonic() + seconds
        while not holds():
            log = self.folder / "slurmctld.log"
            assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "slurmctld wrote no log"
            time.sleep(0.2)

    def is_idle(self) -> bool:
        """Whether all nodes are there and have nothing to do."""
        words = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(words, env=os.environ | self.environment, capture_output=True, text=True, check=False)
        return done.stdout.split() == ["idle" for _ in NODES]

    def close(self) -> None:
        """Cancel all jobs and end the daemons."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self.wait(self.is_idle, 60)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster in an empty folder, and end it afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", *NODES):
        (folder / name).mkdir(exist_ok=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            folder=folder,
            host=socket.gethostname(),
            port=free_port(),
            ports=[free_port() for _ in NODES],
            cores=os.cpu_count(),
            memory=1000,
        )
    )
    cluster = Cluster(folder)
    try:
        cluster.start("munged")
        cluster.wait((folder / "munge.socket").exists, 20)
        for name in ("slurmctld", *NODES):
            cluster.start(name)
        cluster.wait(cluster.is_idle, 60)
        yield cluster
    finally:
        cluster.close()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    with slurm_cluster(Path(sys.argv[1])) as started:
        print(f"export SLURM_CONF={started.environment['SLURM_CONF']}", flush=True)
        signal.pause()
