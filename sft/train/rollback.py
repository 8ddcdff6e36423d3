"""Going back to the last checkpoint: every rank becomes the same command once more.

A start that resumes is the one way back that is exact under every engine, and tested as such: weights, optimizer, schedule, random
numbers and the place in the data come from the checkpoint, nothing from the process that met the fault. The launcher goes on waiting
for the same processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import psutil

from sft import signals as interruption
from sft import terminal as rank_logs
from sft.errors import Interrupted
from sft.parallel import process_group as distributed
from sft.recipe.schema import Tracking
from sft.run.directory import Run
from sft.run.trust import OWN_RUN
from sft.train.tracking import finish_trackers


def become_again(argv: Sequence[str], run: Run, tracking: Tracking, why: str) -> NoReturn:
    """Replace this process by one that goes on from the last checkpoint.

    Args:
        argv: The command line of sft.train.
        run: Its run.
        tracking: Its trackers, which write what they still hold.
        why: What is said first.

    Raises:
        Interrupted: A rank was asked to stop meanwhile.
    """
    if distributed.is_first_rank():
        print(why, flush=True)
    _stop_where_asked()
    if distributed.is_first_rank():
        print("Going back to the last checkpoint.", flush=True)
        finish_trackers(tracking)
    environment = os.environ | {OWN_RUN: str(run.path)}
    if "WORLD_SIZE" in os.environ:
        # The ranks meet anew, at a place of their own: at the launcher's, the first meeting is still written down.
        environment |= {"MASTER_PORT": str(_agreed_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    distributed.leave_group()
    rank_logs.give_back()
    # Whatever the recipe says of resuming was answered when the run was opened.
    words = [word for word in argv if not word.startswith(("train.resume=", "--local_rank"))] + ["train.resume=auto"]
    sys.stdout.flush()
    sys.stderr.flush()
    # They would never learn that their parent, whose process id stays, has become another program.
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with interruption.held_back():
        interruption.close()
        os.closerange(3, 65536)  # what libraries hold open would stay so
        os.execve(sys.executable, [sys.executable, "-m", "sft.train", *words], environment)


def _stop_where_asked() -> None:
    """All ranks stop where one was asked to: the program that this one becomes would not know.

    Raises:
        Interrupted: One was.
    """
    import torch

    asked = interruption.asked()
    found: list[int | None] = [asked]
    if torch.distributed.is_initialized():
        found = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, asked)
    for number in filter(None, found):
        interruption.ignore()
        name = signal.Signals(number).name
        raise Interrupted(name, interruption.exit_status(number), agreed=True)


def _agreed_port() -> int:
    """A free port of the first rank's machine."""
    import torch

    port: list[int | None] = [distributed.free_port() if distributed.is_first_rank() else None]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(port, src=0)
    assert port[0] is not None
    return port[0]
