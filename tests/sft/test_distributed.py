import os
import socket

import pytest

from sft.distributed import free_port, is_first_rank, job_hardware, settle_environment
from sft.errors import PlanError


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_an_engine_that_only_accelerate_was_asked_for_is_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(PlanError, match=f"asked for {engine}.*train.deepspeed"):
        settle_environment(deepspeed=False, uses_gpu=False)


def test_what_accelerate_leaves_in_the_environment_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.setenv(name, "true")
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    settle_environment(deepspeed=False, uses_gpu=False)
    assert not [name for name in os.environ if name.startswith("ACCELERATE_")]
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_one_process_started_by_hand_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (job_hardware().ranks, is_first_rank()) == (1, True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "3")
    assert (job_hardware().ranks, job_hardware().ranks_per_node, is_first_rank()) == (4, 2, False)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
