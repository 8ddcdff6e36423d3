import os
import subprocess
import sys

import pytest
from torch.distributed import DistStoreError

from sft.errors import GateFailed, LostRank, RecipeError, WrongSave, is_lost
from sft.program import exit_on_error


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (RecipeError("train.seed is wrong"), 2, "train.seed is wrong"),
        (WrongSave("not the model"), 1, "not the model"),
        (LostRank("rank 1 is gone"), 1, "rank 1 is gone"),
        (GateFailed(["arc: worse by 0.3", "gsm8k: too low"]), 3, "The gate has failed:\n  arc: worse by 0.3\n  gsm8k: too low"),
        (RuntimeError("[Errno 28] No space left on device"), 2, "The disk is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 638 bytes"), 2, "ulimit -v"),
        (MemoryError(), 2, "ulimit -v"),
    ],
)  # fmt: skip
def test_a_known_error_is_one_message_with_its_status(
    error: Exception, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise error
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (status, "")
    assert shown in printed.err
    assert "Traceback" not in printed.err


def test_our_own_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_on_error():
        _ = 1 / 0


def test_a_rank_ends_at_once_though_a_thread_of_a_tracker_is_still_at_work() -> None:
    program = (
        "import threading, time\n"
        "from sft.errors import RecipeError\nfrom sft.program import exit_on_error\n"
        "threading.Thread(target=time.sleep, args=[600]).start()\n"
        "with exit_on_error():\n"
        "    raise RecipeError('train.seed is wrong')\n"
    )
    environment = os.environ | {"WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr.strip()) == (2, "train.seed is wrong")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for send operation"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:443"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (DistStoreError("Timed out after 21 seconds waiting for clients. 1/2 clients joined."), True),
        (LostRank("rank 0 lost the others"), True),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (ValueError("gloo: timed out"), False),
    ],
)  # fmt: skip
def test_only_a_collectives_error_about_another_rank_is_a_lost_rank(error: Exception, lost: bool) -> None:
    assert is_lost(error) == lost
