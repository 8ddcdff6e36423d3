"""Going back to the last checkpoint: every rank becomes the same command once more.

A start that resumes is the one way back that is exact under every engine, and tested as such: weights, optimizer, schedule, random
numbers and the place in the data come from the checkpoint, nothing from the process that met the fault. The launcher goes on waiting
for the same processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from sft import distributed, rank_logs


def become_again(argv: Sequence[str], why: str) -> NoReturn:
    """Replace this process by one that goes on from the last checkpoint.

    Args:
        argv: The command line of sft.train.
        why: What is said first.
    """
    if distributed.is_first_rank():
        print(f"{why}\nGoing back to the last checkpoint.", flush=True)
    environment = dict(os.environ)
    if "WORLD_SIZE" in os.environ:
        # The ranks meet anew, at a place of their own: at the launcher's, the first meeting is still written down.
        environment |= {"MASTER_PORT": str(_agreed_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    distributed.leave_group()
    rank_logs.give_back()
    # Whatever the recipe says of resuming was answered when the run was opened.
    words = [word for word in argv if not word.startswith(("train.resume=", "--local_rank"))] + ["train.resume=auto"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, 65536)  # what libraries hold open would stay so
    os.execve(sys.executable, [sys.executable, "-m", "sft.train", *words], environment)


def _agreed_port() -> int:
    """A free port of the first rank's machine."""
    import torch

    port: list[int | None] = [distributed.free_port() if distributed.is_first_rank() else None]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(port, src=0)
    assert port[0] is not None
    return port[0]
