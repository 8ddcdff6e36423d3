"""Two hosts on one machine: network namespaces with addresses of their own and a cable between them that can be pulled.

Needs root and iproute2 (`apt-get install iproute2`); what they leave behind is removed at the end.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY

BIN = Path(sys.executable).parent


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=20)


@dataclass(frozen=True)
class Done:
    """How a command on a host ended."""

    status: int
    output: str


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
        # The name is told, too: gloo would ask for the address that it stands for.
        command = [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {self.name}; exec "$@"',
            "sh",
        ]
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

    def wait(self, seconds: float) -> Done:
        """Wait for its end, and fail with its output where that does not come."""
        try:
            status = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {seconds} s:\n{self.output()[-4000:]}") from None
        return Done(status, self.output())


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
