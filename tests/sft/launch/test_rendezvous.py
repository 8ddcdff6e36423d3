"""Launchers as threads, over real sockets."""

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sft.errors import PreflightError
from sft.launch.host_facts import HostFacts
from sft.launch.rendezvous import Machine, meet, unreachable
from sft.parallel.network import address_towards, interface_with
from sft.parallel.process_group import free_port

FACTS = HostFacts(
    0, "host0", {"torch": "2"}, {"a.py": "1"}, {"train.seed": "0"}, {"engine": "DDP"}, "d", "none", "none", {}
)


@pytest.fixture(autouse=True)
def _no_interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "what the user has set stays"


def machine(rank: int, nodes: int = 2, **facts: object) -> Machine:
    changed = replace(FACTS, rank=rank, host=f"host{rank}", **facts)  # type: ignore[arg-type]
    return Machine(rank, nodes, 1, changed, time.time())


def verdicts(*machines: Machine, folders: list[Path], timeout: float = 5.0, port: int = 0) -> list[str]:
    """What each launcher says: the error's message, or nothing."""
    port = port or free_port()

    def launcher(one: Machine, folder: Path) -> str:
        try:
            meet(one, "127.0.0.1", port, folder, timeout)
        except PreflightError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(launcher, machines, folders))


def test_machines_that_fit_together_go_on_and_the_port_is_free_again(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):  # at once, as torchrun takes it
        three = [machine(rank, 3) for rank in range(3)]
        assert verdicts(*three, folders=[tmp_path] * 3, port=port) == ["", "", ""]
    socket.create_server(("", port)).close()
    assert not list(tmp_path.iterdir()), "the file that was looked for is gone"


def test_a_missing_machine_is_named_to_those_that_came(tmp_path: Path) -> None:
    said = verdicts(machine(0, 3), machine(2, 3), folders=[tmp_path] * 2, timeout=0.5)
    assert said[0] == said[1]
    assert "NODE_RANK=1 did not come within 0 s" in said[0] or "NODE_RANK=1 did not come within 1 s" in said[0]
    assert "host0 (NODE_RANK=0), host2 (NODE_RANK=2)" in said[0]


def test_two_machines_with_one_number_are_told_both(tmp_path: Path) -> None:
    twice = replace(machine(1, 3), facts=replace(FACTS, host="host2"))
    said = verdicts(machine(0, 3), machine(1, 3), twice, folders=[tmp_path] * 3)
    assert len(set(said)) == 1
    assert "NODE_RANK=1 on host" in said[0]
    assert "host1" in said[0]
    assert "host2" in said[0]


def test_machines_that_expect_different_numbers_are_told(tmp_path: Path) -> None:
    said = verdicts(machine(0, 2), machine(1, 4), folders=[tmp_path] * 2)
    assert all("NNODES=2 on host0" in one and "NNODES=4 on host1" in one for one in said)
    several = replace(machine(1), per_node=8)
    said = verdicts(machine(0), several, folders=[tmp_path] * 2)
    assert all("8 on host1" in one and "NPROC" in one for one in said)


def test_another_recipe_is_told_on_both_machines(tmp_path: Path) -> None:
    said = verdicts(machine(0), machine(1, recipe={"train.seed": "7"}), folders=[tmp_path] * 2)
    assert all("train.seed is 0 on host0" in one and "7 on host1" in one for one in said)


def test_a_folder_that_the_other_machine_does_not_see_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sft.launch.rendezvous

    # The second machine's disk: another one, under the same name.
    monkeypatch.setattr(sft.launch.rendezvous, "write_token", lambda folder: "elsewhere")
    said = verdicts(machine(0), machine(1), folders=[tmp_path] * 2)
    assert all("host1 (NODE_RANK=1) does not see" in one and "shared" not in one.split(":")[0] for one in said)


def test_what_is_no_launcher_does_not_disturb(tmp_path: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, machine(0), "127.0.0.1", port, tmp_path, 5.0)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", json.dumps({"greeting": "other"}).encode() + b"\n"):
            for _ in range(100):
                try:
                    with socket.create_connection(("127.0.0.1", port)) as stranger:
                        stranger.sendall(words)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
        pool.submit(meet, machine(1), "127.0.0.1", port, tmp_path, 5.0).result()
        first.result()


def test_another_program_on_the_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        waiting = pool.submit(meet, machine(1), "127.0.0.1", port, Path(), 5.0)
        accepted, _ = server.accept()
        accepted.sendall(b"SSH-2.0-OpenSSH\n")
        with pytest.raises(PreflightError, match="what answers there is not this program"):
            waiting.result()
        accepted.close()


def test_a_busy_port_is_told() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"MASTER_PORT={port} cannot be listened on.*another MASTER_PORT"):
            meet(machine(0), "127.0.0.1", port, Path(), 1.0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "no address is known for that name"),
        (ConnectionRefusedError(111, "Connection refused"), "nothing listens on that port"),
        (TimeoutError("timed out"), "it does not answer"),
        (OSError(113, "No route to host"), "no route to host"),
    ],
)
def test_each_way_of_not_reaching_the_first_machine_is_told_apart(error: OSError, words: str) -> None:
    said = unreachable(machine(1), "host0", 29500, error)
    assert words in said
    assert all(part in said for part in ("host1 (NODE_RANK=1)", "MASTER_ADDR=host0", "MASTER_PORT=29500"))


def test_a_first_machine_that_is_not_started_is_told_in_time() -> None:
    with pytest.raises(PreflightError, match=r"nothing listens.*Tried for"):
        meet(machine(1), "127.0.0.1", free_port(), Path(), 0.3)


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_with("127.0.0.1") is None, "others do not reach a loopback"
    assert interface_with("203.0.113.9") is None
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None
