"""The processes of a job: reads what the launcher says, joins them into a group, bounds every wait, and reports a lost peer in one message.

python -m sft.train                      one process
torchrun, accelerate launch, deepspeed   one process per GPU; each sets RANK, WORLD_SIZE, LOCAL_RANK
"""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from threading import Event, Thread
from typing import Any, TypeVar

import psutil

from sft.errors import LostRank, PlanError, UserError, is_lost
from sft.plan.hardware import Hardware, detect_hardware, whole_number
from sft.recipe.schema import Recipe
from sft.run.directory import Run

Value = TypeVar("Value")

_HEARTBEAT = 5.0
"""Seconds between two heartbeats, at most."""


def job_hardware() -> Hardware:
    """The hardware, with the number of processes that the launcher started; one without a launcher."""
    ranks = whole_number("WORLD_SIZE", 1, 1)
    return detect_hardware(ranks, whole_number("LOCAL_WORLD_SIZE", ranks, 1))


def rank() -> int:
    """The number of this process among all of the job."""
    return int(os.environ.get("RANK", "0"))


def is_rank_0() -> bool:
    """Whether this process is rank 0, which writes and prints."""
    return rank() == 0


def join_group(deepspeed: bool, uses_gpu: bool, timeout: int, offloads: bool = False) -> None:
    """Form the process group, if the job has one.

    Args:
        deepspeed: DeepSpeed forms it.
        uses_gpu: Over NCCL, else gloo.
        timeout: Seconds after which a rank stops waiting for the others, in this group and in all made from it.
        offloads: FSDP2 keeps its shards in the machine's memory, where their norm is computed.

    Raises:
        PlanError: The environment makes NCCL wait for ever.
    """
    import torch

    if "WORLD_SIZE" not in os.environ or (not deepspeed and os.environ["WORLD_SIZE"] == "1"):
        return
    _limit_waiting(timeout)
    _use_reachable_interface()
    if uses_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if not uses_gpu else "cpu:gloo,cuda:nccl" if offloads else "nccl"
    limit = timedelta(seconds=timeout)
    if deepspeed:
        import deepspeed as engine

        # transformers would do this too late: ZeRO-3 asks for the number of ranks while the model loads.
        engine.init_distributed(dist_backend=backend, timeout=limit, verbose=False)
    else:
        # With its device, NCCL connects now, and a rank whose GPU cannot fails here and not in step 1.
        device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else None
        torch.distributed.init_process_group(backend, timeout=limit, device_id=device)


def _use_reachable_interface() -> None:
    """Have gloo use the interface that leads to rank 0's node, where there are several nodes and nothing else was said.

    It would otherwise use the address that this node's own name stands for, which in /etc/hosts is often 127.0.1.1: nobody else
    reaches that.
    """
    ranks, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    master = os.environ.get("MASTER_ADDR")
    if "GLOO_SOCKET_IFNAME" in os.environ or master is None or here is None or here == ranks:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((master, 9))
        except OSError:
            return
        own = str(probe.getsockname()[0])
    names = [name for name, found in psutil.net_if_addrs().items() if any(one.address == own for one in found)]
    if names and not ipaddress.ip_address(own).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _limit_waiting(seconds: int) -> None:
    """Give every group of this process the recipe's timeout.

    Raises:
        PlanError: The environment makes NCCL wait for ever.
    """
    from torch.distributed import distributed_c10d

    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "0":
            raise PlanError(
                f"{name}=0: NCCL would wait for a lost rank for ever, whatever train.ddp_timeout. Unset it."
            )
    # Groups made without a timeout take these, not the default group's: DeepSpeed's and the device mesh's.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(distributed_c10d, name) is not None:  # None: a build without NCCL
            setattr(distributed_c10d, name, timedelta(seconds=seconds))


def group_timeouts() -> set[int]:
    """The timeouts of all groups that this process is part of, in seconds."""
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_map
    devices = [(group, device) for group in groups for device in group._device_types]
    return {int(group._get_backend(device).options._timeout.total_seconds()) for group, device in devices}


def leave_group() -> None:
    """Dissolve the process group, and free the GPU's memory."""
    import torch

    gc.collect()  # engines hold themselves in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.distributed.is_initialized():
        quiet_group.cache_clear()
        torch.distributed.destroy_process_group()


# Waiting for a rank that works alone for hours, without waiting for one that is gone.


@cache
def quiet_group() -> Any:
    """All ranks over gloo, in a group of their own, for what they exchange outside of training."""
    import torch

    return torch.distributed.new_group(backend="gloo")


def _is_alone() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


@contextmanager
def barrier_at_end() -> Iterator[None]:
    """Put a barrier at the end of a block: every rank leaves when all have finished it, however long one of them works in it.

    Meanwhile a thread of each rank adds up, again and again, how many have finished. Each sum must arrive within the group's timeout, so a
    rank that was killed and a link that was cut are noticed as in training.

    Raises:
        RuntimeError: gloo's: a rank or the link to it is gone. A rank that works learns it at the end of its block.
    """
    if _is_alone():
        yield
        return
    import torch
    from torch.distributed import distributed_c10d

    group, ranks = quiet_group(), torch.distributed.get_world_size()
    interval = min(_HEARTBEAT, distributed_c10d.default_pg_timeout.total_seconds() / 4)
    finished, abandoned, failed = Event(), Event(), list[Exception]()

    def heartbeat() -> None:
        try:
            count = 0
            while count < ranks and not abandoned.is_set():
                # A rank that has finished waits in the sum for those that have not, which join it once per interval.
                total = torch.tensor([int(finished.wait(interval))])
                torch.distributed.all_reduce(total, group=group)
                count = int(total.item())
        except Exception as error:
            failed.append(error)

    thread = Thread(target=heartbeat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        abandoned.set()
        finished.set()
        raise
    finished.set()
    thread.join()
    if failed:
        raise failed[0]


def from_rank_0(work: Callable[[], Value]) -> Value:
    """Run work on rank 0 alone, and return its result on every rank, however long it takes.

    Raises:
        UserError: Rank 0's, on every rank: each machine reports what is wrong.
        RuntimeError: A rank is gone.
    """
    import torch

    if _is_alone():
        return work()
    box: list[Any] = [None, None]
    with barrier_at_end():
        if is_rank_0():
            try:
                box[0] = work()
            except UserError as error:
                box[1] = error
    torch.distributed.broadcast_object_list(box, src=0, group=quiet_group())
    if box[1] is not None:
        raise box[1]
    result: Value = box[0]
    return result


def gather(value: Value) -> list[Value]:
    """The value of each rank, by rank, on every rank."""
    import torch

    if _is_alone():
        return [value]
    box: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(box, value, group=quiet_group())
    return box


@contextmanager
def reporting_lost_ranks(
    recipe: Recipe, doing: str | Callable[[], str], run: Run | None = None, late: Callable[[], str] = str
) -> Iterator[None]:
    """Turn the error of a collective that did not return into one message, where torch and gloo print a traceback on every rank.

    Args:
        recipe: States the timeout.
        doing: What the ranks do meanwhile, as a phrase after "while".
        run: The run's folder, once there is one.
        late: What is known of the ranks that this one has waited for; empty where nothing is.

    Raises:
        LostRank: Another rank is gone or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        phrase = doing if isinstance(doing, str) else doing()
        reason = str(error).strip().splitlines()[0].rsplit("] ", maxsplit=1)[-1]
        known = late()
        lost = f"lost the other ranks while {phrase}: {reason}. {lost_ranks_remedy(recipe.train.ddp_timeout, run)}"
        message = f"Rank {rank()} on {socket.gethostname()} {lost}"
        raise LostRank(f"{message}\n{known}" if known else message, bool(known)) from error


def lost_ranks_remedy(timeout: int | None, run: Run | None) -> str:
    """What may have happened to the other ranks, and what to do, in sentences; `timeout` is in seconds, None where it is not known."""
    remedy = run.next_start if run else "The same command starts it again"
    waits = f"train.ddp_timeout={timeout} s" if timeout is not None else "as long as train.ddp_timeout says"
    return (
        f"A process or a machine has ended, hangs, or cannot be reached; a rank waits {waits}. Check the output of the other machines and "
        f"the network between them. {remedy}."
    )
