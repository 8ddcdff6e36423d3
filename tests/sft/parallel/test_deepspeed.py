from pathlib import Path

import pytest

from sft.errors import PlanError
from sft.parallel.deepspeed import FOLDER, operations, own_folder, prepare_builds
from sft.plan.deepspeed import load_deepspeed


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a killed build has left in this environment's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER, str(own_folder()))
    lock = own_folder() / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_lock_that_no_process_holds_is_removed_with_a_line(lock: Path) -> None:
    (line,) = prepare_builds([])
    assert "cpu_adam" in line
    assert not lock.exists()
    assert prepare_builds([]) == []


def test_a_lock_of_a_running_build_stays(lock: Path) -> None:
    """torch holds it open while it builds."""
    from torch.utils.file_baton import FileBaton

    lock.unlink()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert prepare_builds([]) == [f"Waiting for a build of cpu_adam. If nothing is building it: rm {lock}"]
    assert lock.exists()
    baton.release()
    assert not lock.exists()


@pytest.mark.parametrize(
    ("name", "uses_gpu", "expected"),
    [
        ("zero2", False, ["deepspeed_shm_comm"]),
        ("zero2_offload", True, ["cpu_adam"]),
        ("zero3_offload", False, ["deepspeed_shm_comm", "cpu_adam"]),
        ("zero3_nvme", True, ["cpu_adam", "pin_memory", "async_io"]),
    ],
)
def test_an_offloaded_optimizer_is_built_beside_a_gpu_too(name: str, uses_gpu: bool, expected: list[str]) -> None:
    assert operations(load_deepspeed(name), uses_gpu) == expected


def test_a_build_is_announced_where_one_is_needed_and_refused_without_its_tools(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.unlink()
    (line,) = prepare_builds(["cpu_adam"])
    assert "about a minute" in line
    monkeypatch.setenv("PATH", str(lock.parent))
    monkeypatch.setenv("CXX", "g++-none -O2")
    with pytest.raises(PlanError, match=r"cpu_adam.*no ninja on PATH and no g\+\+-none on PATH\..*no train.deepspeed"):
        prepare_builds(["cpu_adam"])
    (lock.parent / "cpu_adam.so").touch()
    assert prepare_builds(["cpu_adam"]) == []
