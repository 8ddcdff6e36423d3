import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from sft.errors import EXIT_LOST_RANK, EXIT_USER_ERROR, DataError, LostRank, PlanError
from sft.parallel import process_group as distributed
from sft.parallel.process_group import check_devices, is_rank_0, job_hardware, reporting_lost_ranks, settle_environment
from sft.plan.hardware import detect_hardware
from sft.recipe.schema import Recipe
from sft.run.directory import Run
from tests.fake_nvml import Device, FakeNvml

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
SEND = GLOO + "Timed out waiting 20000ms for send operation to complete"


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_an_engine_that_only_accelerate_launch_requests_is_refused(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(PlanError, match=f"requests {engine}.*train.deepspeed"):
        settle_environment(deepspeed=False, uses_gpu=False, precision="fp32")


def test_a_precision_that_only_accelerate_launch_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(PlanError, match=r"mixed precision bf16.*train.precision gives fp32.*train.precision=bf16"):
        settle_environment(deepspeed=False, uses_gpu=False, precision="fp32")


def test_what_accelerate_leaves_in_the_environment_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"USE_CPU": "true", "MIXED_PRECISION": "no", "DYNAMO_BACKEND": "inductor"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    settle_environment(deepspeed=False, uses_gpu=False, precision="fp32")
    assert not [name for name in os.environ if name.startswith("ACCELERATE_")]
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_one_process_that_a_launcher_started_is_a_process_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate, which finds a LOCAL_RANK, makes a group."""
    of_group = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    of_group["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for name, value in {**of_group, "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    assert not {*of_group, "WORLD_SIZE"} & set(distributed.environment_without_launcher())
    settle_environment(deepspeed=False, uses_gpu=False, precision="fp32")
    assert not {*of_group, "WORLD_SIZE"} & set(os.environ)
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "2"
    for name, value in {**of_group, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    settle_environment(deepspeed=False, uses_gpu=False, precision="fp32")
    assert {*of_group, "WORLD_SIZE"} <= set(os.environ)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torchs_allocator_has_expandable_segments_unless_the_user_says_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # put back at the end
    for one in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(one, raising=False)
    distributed.settle_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "max_split_size_mb:64")
    distributed.settle_allocator()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == ("max_split_size_mb:64" if name == "PYTORCH_ALLOC_CONF" else None)


def test_the_launcher_and_the_ranks_settle_it_before_torch_is_imported() -> None:
    program = "import sys, sft.launch.rank, sft.launch.main, sft.launch.auto_tune; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_process_started_by_hand_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (job_hardware().ranks, is_rank_0()) == (1, True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "3")
    assert (job_hardware().ranks, job_hardware().ranks_per_node, is_rank_0()) == (4, 2, False)


@pytest.fixture
def _group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        # Put back at the end; a build without NCCL has none.
        monkeypatch.setattr(distributed_c10d, name, timedelta(minutes=10))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed._limit_waiting(33)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.leave_group()


@pytest.mark.usefixtures("_group_of_one")
def test_groups_that_are_made_without_a_timeout_have_the_recipes() -> None:
    """DeepSpeed's are made so, and the device mesh's."""
    torch.distributed.new_group([0])
    assert distributed.group_timeouts() == {33}
    assert distributed_c10d._get_default_timeout("nccl").total_seconds() == 33


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_an_environment_in_which_nccl_waits_for_ever_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(PlanError, match=f"{name}=0.*Unset it"):
        distributed._limit_waiting(33)


def test_a_single_process_does_the_work_of_rank_0_itself() -> None:
    assert distributed.from_rank_0(lambda: 7) == 7
    assert distributed.gather("here") == ["here"]
    with pytest.raises(DataError, match="no rows"):
        distributed.from_rank_0(_no_rows)


def _no_rows() -> int:
    raise DataError("no rows")


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    return make_recipe("train.ddp_timeout=20")


@pytest.mark.parametrize("late", ["", "Rank 1 (node-1, pid 7) says nothing."])
def test_a_lost_rank_is_one_message_with_rank_step_timeout_reason_and_remedy(
    late: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    run = Run(tmp_path / "run")
    (run.checkpoints / "checkpoint-10").mkdir(parents=True)
    run.update(status="running")
    with (
        pytest.raises(LostRank) as caught,
        reporting_lost_ranks(recipe, lambda: "step 12 was trained", run, lambda: late),
    ):
        raise RuntimeError(SEND)
    words = ("Rank 3 on ", "step 12", ": Timed out waiting 20000ms", "train.ddp_timeout=20", "checkpoint-10", late)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "unbound_buffer" not in str(caught.value)
    assert caught.value.named == bool(late)
    assert EXIT_LOST_RANK not in (0, EXIT_USER_ERROR)


def test_a_bug_stays_a_bug(recipe: Recipe) -> None:
    with pytest.raises(RuntimeError, match="shape"), reporting_lost_ranks(recipe, "it ran"):
        raise RuntimeError("shape mismatch")


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        (None, "580.65.06", "a build without CUDA"),
        ("13.0", "550.54.15", "driver 550.54.15.* CUDA 13.0, which needs driver 580 or newer"),
        ("12.6", "550.54.15", "CUDA 12.6, and does not start"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named_with_its_driver(
    cuda: str | None, driver: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNvml([Device("GPU-aaaa")], driver=driver).install(monkeypatch)
    monkeypatch.setattr("torch.version.cuda", cuda)
    hardware = detect_hardware(1, 1)
    with pytest.raises(PlanError, match=f"{words}.*README.md"):
        check_devices(hardware)
