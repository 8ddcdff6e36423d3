"""What newcomers do wrong when they launch: one message each, with the value and the remedy, before anything heavy is imported."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from sft import cli
from sft.errors import EXIT_USER_ERROR, PlanError
from sft.launch.checks import check_installed, check_rank_variables
from sft.launch.rank import main as train
from sft.program import exit_on_error
from tests.fake_nvml import Device, FakeNvml

Tell = Callable[..., str]


def start(words: list[str]) -> None:
    cli.run(["train", *words])


@pytest.fixture
def tell(recipe_file: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Launch with an environment, and get the one message."""

    def stop(status: int) -> None:
        raise SystemExit(status)

    # A rank of several ends so.
    monkeypatch.setattr(os, "_exit", stop)

    def told(environment: str, *words: str, program: Callable[[list[str]], None] = start) -> str:
        for word in environment.split():
            name, _, value = word.partition("=")
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended, exit_on_error():
            program([str(recipe_file), f"output_dir={outputs}", *words])
        assert ended.value.code == EXIT_USER_ERROR
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert printed.out == ""
        return printed.err

    return told


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([Device("GPU-aaaa"), Device("GPU-bbbb")]).install(monkeypatch)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("environment", "value", "remedy"),
    [
        ("NPROC=0", "NPROC=0", "at least 1"),
        ("NNODES=2 NODE_RANK=2 MASTER_ADDR=localhost", "NODE_RANK=2 with NNODES=2", "numbered from 0 to 1"),
        ("NNODES=2", "NNODES=2, and NODE_RANK is not set", "Set it to 0 on the first machine"),
        ("NNODES=2 NODE_RANK=1", "MASTER_ADDR is not set", "on every machine"),
        (
            "NNODES=2 NODE_RANK=1 MASTER_ADDR=no-such-host.invalid",
            "MASTER_ADDR=no-such-host.invalid: no address",
            "Set it to the first machine's name",
        ),
        ("LOCAL_RANK=1 RANK=1", "LOCAL_RANK=1 is set", "Run bash scripts/sft.sh by itself"),
        ("TORCHELASTIC_RUN_ID=7 LOCAL_RANK=0", "torchrun or accelerate launch has started this", "by itself"),
        (
            "SLURM_NNODES=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=8",
            "8 tasks on 1 machine,",
            "srun --ntasks=1 --ntasks-per-node=1",
        ),
        ("SLURM_NNODES=2 SLURM_NTASKS=2", "SLURM_NODEID is not set. srun sets it", "srun --ntasks-per-node=1"),
        (
            "SLURM_NNODES=2 SLURM_NODEID=0 SLURM_JOB_ID=77 SLURM_JOB_NODELIST=gone[1-2].invalid",
            f"SLURM_JOB_NODELIST=gone[1-2].invalid), and this one is {socket.gethostname()}",
            "unset SLURM_NNODES SLURM_STEP_NUM_NODES",
        ),
        ("PET_NNODES=1:4 PET_NODE_RANK=0", "PET_NNODES=1:4", "whole number"),
    ],
)
def test_a_mistake_in_the_environment_is_one_message(environment: str, value: str, remedy: str, tell: Tell) -> None:
    message = tell(environment)
    assert value in message
    assert remedy in message


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("environment", "value", "remedy"),
    [
        ("NPROC=8", "on a machine with 2 visible GPUs", "at most one for each GPU"),
        ("CUDA_VISIBLE_DEVICES=0,0", "CUDA_VISIBLE_DEVICES=0,0: CUDA would not show all", "each once"),
        ("CUDA_VISIBLE_DEVICES=0,1,5", "CUDA_VISIBLE_DEVICES=0,1,5", "this machine has 2, counted from 0"),
        ("CUDA_VISIBLE_DEVICES=GPU-cccc", "CUDA_VISIBLE_DEVICES=GPU-cccc", "this machine has 2, counted from 0"),
    ],
)
def test_a_mistake_about_the_gpus_is_one_message(environment: str, value: str, remedy: str, tell: Tell) -> None:
    message = tell(environment)
    assert value in message
    assert remedy in message


@pytest.mark.parametrize(("version", "refused"), [("4.57.1", True), ("5.17.0a0+nv25", False), ("unknown", False)])
def test_a_package_of_another_environment_that_is_too_old_is_told(
    version: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_installed()
    metadata = tmp_path / f"transformers-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match=rf"transformers {version} .* {tmp_path}") if refused else nullcontext():
        check_installed()


@pytest.mark.parametrize("machines", ["", "NNODES=2 NODE_RANK=0 MASTER_ADDR=localhost "])
def test_a_busy_port_is_told(machines: str, busy_port: int, tell: Tell) -> None:
    message = tell(f"{machines}MASTER_PORT={busy_port} NPROC=2")
    assert f"MASTER_PORT={busy_port} cannot be listened on here (Address already in use)" in message
    assert "Set another MASTER_PORT" in message


@pytest.mark.parametrize(
    ("environment", "told", "remedy"),
    [
        (
            "WORLD_SIZE=2",
            "WORLD_SIZE=2, and not set: RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
            "torchrun",
        ),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=h MASTER_PORT=1", "not set: LOCAL_RANK", "torchrun"),
        ("WORLD_SIZE=1 RANK=1", "RANK=1", "at most 0"),
        ("RANK=1", "RANK=1", "at most 0"),
        ("WORLD_SIZE=2 RANK=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1", "RANK=2", "at most 1"),
    ],
)
def test_a_process_started_by_hand_without_its_variables_is_told(
    environment: str, told: str, remedy: str, tell: Tell
) -> None:
    message = tell(environment, program=train)
    assert told in message
    assert remedy in message


def test_a_network_interface_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = "GLOO_SOCKET_IFNAME=gone0 WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1"
    for word in variables.split():
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(PlanError, match=r"GLOO_SOCKET_IFNAME=gone0: .* has the network interfaces .*lo.*unset it"):
        check_rank_variables()


def test_a_port_that_another_rank_0_has_taken_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], busy_port: int
) -> None:
    from torch.distributed import TCPStore

    monkeypatch.setenv("MASTER_PORT", str(busy_port))
    with pytest.raises(SystemExit) as ended, exit_on_error():
        TCPStore("127.0.0.1", busy_port, 2, is_master=True)
    assert ended.value.code == EXIT_USER_ERROR
    assert f"MASTER_PORT={busy_port} is taken on this machine" in capsys.readouterr().err
