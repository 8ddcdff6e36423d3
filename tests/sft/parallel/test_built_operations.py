import os
import sys
import time
from pathlib import Path

import pytest

from sft.errors import PlanError
from sft.parallel import built_operations
from sft.parallel.built_operations import FOLDER, is_held, own_folder, settle_operations


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a killed build has left."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


def test_a_lock_that_nobody_holds_is_removed_and_told(lock: Path) -> None:
    assert settle_operations(False) == [
        f"A build of cpu_adam was ended before it was done, and its lock is removed: {lock}"
    ]
    assert not lock.exists()
    assert settle_operations(False) == []


def test_a_build_without_its_programs_is_refused(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(lock.parent))
    monkeypatch.setenv("CXX", "g++-none -O2")
    with pytest.raises(PlanError, match=r"no ninja and no g\+\+-none"):
        settle_operations(True)
    (lock.parent / "cpu_adam.so").touch()
    assert settle_operations(True) == []


def test_a_lock_of_a_build_that_goes_on_stays(lock: Path) -> None:
    """torch holds it open while it builds."""
    from torch.utils.file_baton import FileBaton

    lock.unlink()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert is_held(lock)
    assert settle_operations(False) == ["Another process is building cpu_adam: waiting for it."]
    assert lock.exists()
    baton.release()
    assert not lock.exists()


def test_on_a_folder_that_other_machines_write_to_only_an_old_lock_is_removed(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_operations, "_is_shared", lambda path: True)
    (told,) = settle_operations(False)
    assert f"rm {lock}" in told
    assert lock.exists()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    (told,) = settle_operations(False)
    assert told.startswith("A build of cpu_adam was ended")


def test_a_first_build_is_told_where_one_is_needed(lock: Path) -> None:
    lock.unlink()
    assert settle_operations(False) == []
    (told,) = settle_operations(True)
    assert "about a minute" in told
    (lock.parent / "cpu_adam.so").touch()
    assert settle_operations(True) == []


def test_each_environment_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER, "what the test sets is forgotten after it")
    monkeypatch.delenv(FOLDER)
    here = own_folder()
    settle_operations(False)
    assert os.environ[FOLDER] == str(here)
    assert here.is_dir()
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert own_folder() != here
    assert own_folder().parent == here.parent == tmp_path / "torch_extensions"


def test_a_folder_that_the_user_has_named_is_kept(lock: Path) -> None:
    settle_operations(False)
    assert os.environ[FOLDER] == str(lock.parent.parent)


def test_torch_builds_where_the_variable_says_and_waits_for_a_lock_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import inspect

    from torch.utils import cpp_extension

    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert cpp_extension._get_build_directory("cpu_adam", False) == str(tmp_path / "cpu_adam")
    assert "'lock'" in inspect.getsource(cpp_extension._jit_compile)
