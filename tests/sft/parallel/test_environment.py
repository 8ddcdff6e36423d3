import os
import subprocess
import sys

import pytest

from sft.errors import PlanError
from sft.parallel import environment
from sft.parallel.environment import check_devices, settle_environment
from sft.plan.hardware import detect_hardware
from tests.fake_nvml import Device, FakeNvml


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("USE_DEEPSPEED", "true", r"requests DEEPSPEED.*train.deepspeed"),
        ("MIXED_PRECISION", "bf16", r"mixed precision bf16.*train.precision gives fp32.*train.precision=bf16"),
    ],
)
def test_what_only_accelerate_launch_requests_is_refused(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(PlanError, match=words):
        settle_environment(deepspeed=None, uses_gpu=False, precision="fp32")


def test_what_accelerate_leaves_in_the_environment_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"USE_CPU": "true", "MIXED_PRECISION": "no", "DYNAMO_BACKEND": "inductor"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    settle_environment(deepspeed=None, uses_gpu=False, precision="fp32")
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
    assert not {*of_group, "WORLD_SIZE"} & set(environment.environment_without_launcher())
    settle_environment(deepspeed=None, uses_gpu=False, precision="fp32")
    assert not {*of_group, "WORLD_SIZE"} & set(os.environ)
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "2"
    for name, value in {**of_group, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    settle_environment(deepspeed=None, uses_gpu=False, precision="fp32")
    assert {*of_group, "WORLD_SIZE"} <= set(os.environ)


def test_torchs_allocator_has_expandable_segments_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # put back at the end
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")  # the older name
    environment.settle_allocator()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    environment.settle_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_launcher_and_the_ranks_settle_it_before_torch_is_imported() -> None:
    program = "import sys, sft.launch.rank, sft.launch.main, sft.launch.auto_tune; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_gpu_that_torch_cannot_use_is_named_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([Device("GPU-aaaa")], driver="550.54.15").install(monkeypatch)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(PlanError, match=r"driver 550.54.15.*CUDA: 13.0.*README.md"):
        check_devices(detect_hardware(1, 1))
