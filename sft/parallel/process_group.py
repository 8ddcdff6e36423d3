"""The processes of a job: reads what the launcher says, joins them into a group, bounds every wait, and reports a lost peer in one message.

python -m sft.train                      one process
torchrun, accelerate launch, deepspeed   one process per GPU; each sets RANK, WORLD_SIZE, LOCAL_RANK
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from threading import Event, Thread
from typing import Any, TypeVar

from sft.errors import LostRank, PlanError, UserError
from sft.parallel.deepspeed import prepare_builds
from sft.parallel.network import use_reachable_interface
from sft.plan.hardware import Hardware, detect_hardware, whole_number
from sft.recipe.schema import Recipe
from sft.run.directory import Run

Value = TypeVar("Value")

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for a rank. A process by itself must not see it."""

_OF_A_GROUP = (*LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE")

_HEARTBEAT = 5.0
"""Seconds between two heartbeats, at most."""

_LOST = (
    "timed out",
    "timeout",
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "no route to host",
    "network is unreachable",
    "pair closure",
)
"""What gloo's errors say when a peer is gone."""


def set_debug_environment(ddp: bool, uses_gpu: bool) -> None:
    """Make the libraries log and compare more. Keeps what the user has set.

    Args:
        ddp: The engine is DDP.
        uses_gpu: The job runs on GPUs.
    """
    values = {
        # torch compares each collective between the ranks before it starts, and names the rank of one that differs. On CPU ranks its DDP
        # crashes then (SIGSEGV: it takes the comparing group for gloo's own).
        "TORCH_DISTRIBUTED_DEBUG": "INFO" if ddp and not uses_gpu else "DETAIL",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "NCCL_DEBUG": "INFO",
        # The flight recorder: the last collectives of each rank, written when one takes longer than the group's timeout.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    for name, value in values.items():
        os.environ.setdefault(name, value)
    if "torch" in sys.modules:  # it reads the level when it is imported, and the plan may have done that
        distributed: Any = sys.modules["torch"].distributed
        distributed.set_debug_level_from_env()


def settle_environment(deepspeed: bool, uses_gpu: bool, precision: str) -> None:
    """Make the environment agree with the plan; before torch, accelerate or deepspeed is imported.

    Args:
        deepspeed: The recipe names a DeepSpeed file.
        uses_gpu: The job runs on GPUs.
        precision: As planned: `bf16`, `fp16` or `fp32`.

    Raises:
        PlanError: `accelerate launch` requests an engine or a precision that the recipe does not name.
    """
    for engine, in_recipe in {"FSDP": False, "DEEPSPEED": deepspeed, "MEGATRON_LM": False}.items():
        if os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() in ("true", "1") and not in_recipe:
            raise PlanError(
                f"accelerate launch requests {engine} (its options, or a configuration left by `accelerate config`), but only the recipe "
                "names the engine: train.deepspeed or train.fsdp, or DDP without them. Start it without."
            )
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if requested not in ("no", precision):
        raise PlanError(
            f"accelerate launch requests mixed precision {requested} (its options, or a configuration left by `accelerate config`), but "
            f"only the recipe decides: train.precision gives {precision}. Start it without, or set train.precision={requested}."
        )
    # accelerate would follow these over the recipe: ACCELERATE_USE_CPU, for one, silently turns DeepSpeed into DDP.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not uses_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if deepspeed:
        lines = prepare_builds(needed=not uses_gpu)  # on CPU ranks it reduces by an operation of its own
        if lines and os.environ.get("LOCAL_RANK", "0") == "0":
            print(*lines, sep="\n", flush=True)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    # From one launched process accelerate would make a group, with DDP and a timeout of its own.
    for name in _OF_A_GROUP:
        os.environ.pop(name, None)
    if uses_gpu:  # with several visible GPUs transformers would wrap the model in DataParallel
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if deepspeed:  # which would otherwise ask MPI
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def quiet_frameworks() -> None:
    """Keep deprecations, hints and per-rank notes of the frameworks off the terminal. Errors stay."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name in ("accelerate", "trl", "peft", "torch.distributed", "DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check_devices(hardware: Hardware) -> None:
    """Compare what nvidia-smi reported to the plan with what torch can use.

    Raises:
        PlanError: They disagree.
    """
    import torch

    if (hardware.gpu is not None) == torch.cuda.is_available():
        return
    if hardware.gpu is None:
        raise PlanError(
            "torch sees a GPU that nvidia-smi does not list, so the plan is for a CPU. Put nvidia-smi on PATH, or hide the GPU: "
            "CUDA_VISIBLE_DEVICES=''."
        )
    raise PlanError(
        f"nvidia-smi lists {hardware.gpu.name}, but torch {torch.__version__} cannot use it: a build without CUDA, or a driver too old "
        "for it. Install a build of torch for this driver, or train on the CPU: CUDA_VISIBLE_DEVICES=''."
    )


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
    use_reachable_interface()
    if uses_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if not uses_gpu else "cpu:gloo,cuda:nccl" if offloads else "nccl"
    limit = timedelta(seconds=timeout)
    if deepspeed:
        import deepspeed as engine

        # transformers would do this too late: ZeRO-3 asks for the number of ranks while the model loads.
        engine.init_distributed(dist_backend=backend, timeout=limit, verbose=False)
    else:
        torch.distributed.init_process_group(backend, timeout=limit)


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


class _Heartbeat(Thread):
    """Adds up, again and again, how many ranks have reached the barrier, until all have.

    Each sum must arrive within the group's timeout, so a rank that was killed and a link that was cut are noticed as in training.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        import torch

        super().__init__(name="heartbeat", daemon=True)
        self.group, self.ranks = group, torch.distributed.get_world_size(group)
        self.interval = min(_HEARTBEAT, timeout / 4)
        self.arrived, self.abandoned = Event(), Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Until all have arrived, or one is gone."""
        try:
            while not self.abandoned.is_set() and self._arrivals() < self.ranks:
                pass
        except Exception as error:
            self.error = error

    def _arrivals(self) -> int:
        import torch

        # A rank that has arrived waits in the sum for those that have not, which join it once per interval.
        count = torch.tensor([int(self.arrived.wait(self.interval))])
        torch.distributed.all_reduce(count, group=self.group)
        return int(count.item())


@contextmanager
def barrier_at_end() -> Iterator[None]:
    """Put a barrier at the end of a block: every rank leaves when all have finished it, however long one of them works in it.

    Raises:
        RuntimeError: gloo's: a rank or the link to it is gone. The rank that works learns it at the end of its block.
    """
    if _is_alone():
        yield
        return
    from torch.distributed import distributed_c10d

    heartbeat = _Heartbeat(quiet_group(), distributed_c10d.default_pg_timeout.total_seconds())
    heartbeat.start()
    try:
        yield
    except BaseException:
        heartbeat.abandoned.set()
        heartbeat.arrived.set()
        raise
    heartbeat.arrived.set()
    heartbeat.join()
    if heartbeat.error is not None:
        raise heartbeat.error


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


# A lost peer, in one message.


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch or gloo says that another rank is gone or does not answer."""
    import torch

    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and "gloo" in text and any(sign in text for sign in _LOST)


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
        remedy = run.next_start if run else "The same command starts it again"
        reason = str(error).strip().splitlines()[0].rsplit("] ", maxsplit=1)[-1]
        known = late()
        known = known and f"\n{known}"
        raise LostRank(
            f"Rank {rank()} on {socket.gethostname()} lost the other ranks while {phrase}: {reason}. A process or a machine has ended, "
            f"hangs, or cannot be reached; a rank waits train.ddp_timeout={recipe.train.ddp_timeout} s. Check the output of the other "
            f"machines and the network between them. {remedy}.{known}",
            bool(known),
        ) from error
