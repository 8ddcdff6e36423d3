"""The machines of a job meet before any of them starts processes: who is there, who is not, and whether they fit together.

One launcher a machine. The first listens on MASTER_PORT, the others connect, each says what it is, and all hear the same verdict.
The port is free again when torchrun takes it. Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft.errors import PreflightError
from sft.launch.host_comparison import Check, check_clocks, compare
from sft.launch.host_facts import HostFacts, read_facts
from sft.launch.preflight import shared, write_token
from sft.parallel.network import interface_with

_GREETING = "sft-recipes handshake"
_LONGEST_MESSAGE = 2**20
_PATIENCE = 3.0
"""Seconds after which a launcher says that it waits."""


@dataclass(frozen=True)
class Machine:
    """What a launcher was told by its environment, and what it found."""

    node_rank: int
    nodes: int
    per_node: int
    facts: HostFacts
    clock: float

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.facts.host} (NODE_RANK={self.node_rank})"


class Connection:
    """Messages of one JSON line each."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.settimeout(timeout)
        self.socket, self.lines = connected, connected.makefile("rb")

    def send(self, **message: object) -> None:
        """Send one message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            OSError: The other side is gone or does not answer.
            ValueError: It does not speak this language.
        """
        line = self.lines.readline(_LONGEST_MESSAGE)
        if not line:
            raise ConnectionResetError("the other side has closed the connection")
        message: dict[str, Any] = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message of this program")
        return message

    def close(self) -> None:
        """Give the socket back."""
        self.lines.close()
        self.socket.close()


def meet(machine: Machine, address: str, port: int, folder: Path, timeout: float, local: Sequence[Check] = ()) -> None:
    """Return when all machines are there and fit together, and tell gloo which interface they met on.

    Args:
        machine: This one.
        address: MASTER_ADDR.
        port: MASTER_PORT.
        folder: output_dir, which all must share.
        timeout: Seconds to wait for the others.
        local: What was checked on the first machine alone.

    Raises:
        PreflightError: One is missing, cannot be reached, or does not fit; the same message on every machine that came.
    """
    if machine.node_rank == 0:
        own = _receive_others(machine, address, port, folder, timeout, local)
    else:
        own = _join_first(machine, address, port, timeout)
    interface = interface_with(own)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").split("%")[0]


def _greeting(machine: Machine) -> dict[str, Any]:
    return {"greeting": _GREETING} | asdict(machine) | {"clock": time.time()}


def _receive_others(
    machine: Machine, address: str, port: int, folder: Path, timeout: float, local: Sequence[Check]
) -> str:
    """The first machine's part; returns the address at which the others reached it."""
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        with _listen(port) as server:
            machines, connections, offsets = _collect(server, machine, deadline, stack)
        problems = absent(machines, address, timeout)
        if not problems:
            token = folder / write_token(folder)
            try:
                seen = [_ask(connection, see=str(token)).get("seen", False) for connection in connections]
            finally:
                token.unlink(missing_ok=True)
            blind = [other.where for other, sees in zip(machines[1:], seen, strict=True) if not sees]
            checks = [*compare([other.facts for other in machines]), shared(folder, machine.where, blind), *local]
            checks.append(check_clocks([other.facts.host for other in machines], offsets))
            problems = [f"{check.name}: {check.problem}" for check in checks if check.problem]
            for check in checks:
                if check.remark:
                    print(f"{check.name}: {check.remark}", flush=True)
        own = _plain(connections[0].socket.getsockname()[0]) if connections else "127.0.0.1"
        for connection in connections:
            # The other side closes first, so that no socket of this one keeps the port.
            _ask(connection, problems=problems)
    _refuse(problems)
    return own


def _ask(connection: Connection, **message: object) -> dict[str, Any]:
    try:
        connection.send(**message)
        return connection.receive()
    except (OSError, ValueError):
        return {}


def _listen(port: int) -> socket.socket:
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise PreflightError(
            f"MASTER_PORT={port} cannot be listened on here ({error.strerror}): another job may use it. Set another MASTER_PORT on every "
            "machine."
        ) from None


def _collect(
    server: socket.socket, machine: Machine, deadline: float, stack: ExitStack
) -> tuple[list[Machine], list[Connection], list[float]]:
    """Who has come, by arrival, this machine first; and how far each clock is ahead of this one's."""
    machines, connections, offsets = [machine], list[Connection](), [0.0]
    speak_at = time.monotonic() + _PATIENCE
    while len(machines) < machine.nodes and time.monotonic() < deadline:
        if time.monotonic() > speak_at:
            left = deadline - time.monotonic()
            print(
                f"{len(machines)} of {machine.nodes} machines are here; waiting {left:.0f} s for the others.",
                flush=True,
            )
            speak_at = deadline
        server.settimeout(max(0.01, min(1.0, deadline - time.monotonic())))
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            continue
        connection = Connection(accepted, 10.0)
        stack.callback(connection.close)
        try:
            said = connection.receive()
            if said.pop("greeting", None) != _GREETING:
                continue
            other = Machine(**said | {"facts": read_facts(said["facts"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue  # a port scanner, or another program
        machines.append(other)
        connections.append(connection)
        offsets.append(other.clock - time.time())
    return machines, connections, offsets


def absent(machines: Sequence[Machine], address: str, timeout: float) -> list[str]:
    """What is wrong with who has come.

    Args:
        machines: By arrival, the first machine first.
        address: MASTER_ADDR.
        timeout: Seconds that were waited.
    """
    first = machines[0]
    problems = [
        f"NNODES={first.nodes} on {first.where} and NNODES={other.nodes} on {other.where}. Set the same number on every machine."
        for other in machines
        if other.nodes != first.nodes
    ]
    problems += [
        f"{first.per_node} processes on {first.where} and {other.per_node} on {other.where}. Set NPROC to the same number on every machine."
        for other in machines
        if other.per_node != first.per_node
    ]
    by_rank: dict[int, list[Machine]] = {}
    for machine in machines:
        by_rank.setdefault(machine.node_rank, []).append(machine)
    problems += [
        f"NODE_RANK={rank} on {' and on '.join(machine.facts.host for machine in several)}. Give each machine a number of its own, from 0 "
        f"to {first.nodes - 1}."
        for rank, several in by_rank.items()
        if len(several) > 1
    ]
    missing = [rank for rank in range(first.nodes) if rank not in by_rank]
    if missing and not problems:
        here = ", ".join(machine.where for machine in machines)
        names = ", ".join(f"NODE_RANK={rank}" for rank in missing)
        problems.append(
            f"{names} did not come within {timeout:.0f} s; here: {here}. Start the same command there, with "
            f"MASTER_ADDR={address} as seen from there{_foreign(address)}. START_TIMEOUT=600 waits for machines that start minutes apart."
        )
    return problems


def _foreign(address: str) -> str:
    """Whether MASTER_ADDR belongs to this machine, which is the first; empty where it does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.bind((address, 0))
    except OSError:
        return f" ({address} is no address of {socket.gethostname()}, which is the first machine)"
    return ""


def _join_first(machine: Machine, address: str, port: int, timeout: float) -> str:
    """Another machine's part; returns its own address on the way to the first."""
    connection = Connection(_connect(machine, address, port, timeout), timeout + 20.0)
    own = _plain(connection.socket.getsockname()[0])
    try:
        connection.send(**_greeting(machine))
        message = connection.receive()
        if "see" in message:
            connection.send(seen=Path(message["see"]).exists())
            message = connection.receive()
        problems = list(message["problems"])
    except (OSError, ValueError, KeyError) as error:
        raise PreflightError(
            f"{machine.where} reached {address}:{port} (MASTER_ADDR:MASTER_PORT), and what answers there is not this program, or it ended "
            f"({error}). Look at what the first machine says; if it waits, set another MASTER_PORT on every machine."
        ) from None
    finally:
        connection.close()
    _refuse(problems)
    return own


def _connect(machine: Machine, address: str, port: int, timeout: float) -> socket.socket:
    deadline, speak_at = time.monotonic() + timeout, time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            problem = unreachable(machine, address, port, error)
        if time.monotonic() >= deadline:
            raise PreflightError(f"{problem} Tried for {timeout:.0f} s.")
        if time.monotonic() > speak_at:
            left = deadline - time.monotonic()
            print(f"{machine.where} waits for {address}:{port}, for {left:.0f} s more.", flush=True)
            speak_at = deadline
        time.sleep(0.2)


def unreachable(machine: Machine, address: str, port: int, error: OSError) -> str:
    """Why the first machine cannot be reached: its name, the network, or nobody there.

    Args:
        machine: This one.
        address: MASTER_ADDR.
        port: MASTER_PORT.
        error: Of the attempt to connect.
    """
    start = f"{machine.where} cannot reach the first machine at MASTER_ADDR={address}, MASTER_PORT={port}:"
    if isinstance(error, socket.gaierror):
        return f"{start} no address is known for that name. Set MASTER_ADDR to the first machine's address."
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{start} a machine is there, and nothing listens on that port. Start the command on the first machine (NODE_RANK=0), with the "
            "same MASTER_PORT; or MASTER_ADDR is another machine's."
        )
    reason = "it does not answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
    return f"{start} {reason}. MASTER_ADDR is wrong, or a firewall or a network that is down is in between."


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise PreflightError(
            "\n".join(["The machines of this job do not fit together:", *(f"  {line}" for line in problems)])
        )
