"""The processes of a job: found in the environment that a launcher made, joined into a group, and kept quiet.

python -m sft.train              one process
torchrun, accelerate launch, deepspeed   one process a GPU; each sets RANK, WORLD_SIZE, LOCAL_RANK
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from sft.errors import PlanError, UserError
from sft.parallel.built_operations import settle_operations
from sft.parallel.network import use_reachable_interface
from sft.parallel.patience import patience
from sft.plan.hardware import Hardware, detect_hardware
from sft.plan.topology import whole_number

Value = TypeVar("Value")

_OF_A_GROUP = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What a launcher sets for processes that meet. What it says of restarts (TORCHELASTIC_RESTART_COUNT) is not among it."""


LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells a rank, and a process by itself must not hear."""


def set_debug_environment(ddp: bool, uses_gpu: bool) -> None:
    """Have the libraries log and compare more. What the user has set stays.

    Args:
        ddp: The engine is DDP.
        uses_gpu: The job runs on GPUs.
    """
    values = {
        # Each collective is compared between the ranks before it starts, and one that differs is named with its rank. On CPU ranks
        # torch's DDP crashes then (SIGSEGV: it takes the group that compares for gloo's own).
        "TORCH_DISTRIBUTED_DEBUG": "INFO" if ddp and not uses_gpu else "DETAIL",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "NCCL_DEBUG": "INFO",
        # The flight recorder: the last collectives of each rank, written where one takes longer than the group's timeout.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    for name, value in values.items():
        os.environ.setdefault(name, value)
    if "torch" in sys.modules:  # it reads the level when it is imported, and the plan may have done that
        distributed: Any = sys.modules["torch"].distributed
        distributed.set_debug_level_from_env()


def settle_environment(deepspeed: bool, uses_gpu: bool, precision: str) -> None:
    """Make the environment say what the plan says; before torch, accelerate or deepspeed is imported.

    Args:
        deepspeed: The recipe names a DeepSpeed file.
        uses_gpu: The job runs on GPUs.
        precision: As planned: `bf16`, `fp16` or `fp32`.

    Raises:
        PlanError: `accelerate launch` was asked for an engine or a precision that the recipe does not name.
    """
    engines = {"FSDP": False, "DEEPSPEED": deepspeed, "MEGATRON_LM": False}
    for engine, in_recipe in engines.items():
        if os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() in ("true", "1") and not in_recipe:
            raise PlanError(
                f"accelerate launch was asked for {engine} (its options, or a configuration left by `accelerate config`), and the "
                "recipe alone names the engine: train.deepspeed or train.fsdp, or DDP without them. Start it without."
            )
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in ("no", precision):
        raise PlanError(
            f"accelerate launch was asked for mixed precision {asked} (its options, or a configuration left by `accelerate config`), and "
            f"the recipe alone decides: train.precision gives {precision}. Start it without, or set train.precision={asked}."
        )
    # accelerate would follow these over the recipe: ACCELERATE_USE_CPU, for one, turns DeepSpeed into DDP in silence.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not uses_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if deepspeed:
        # On CPU ranks it reduces by an operation of its own.
        lines = settle_operations(builds=not uses_gpu)
        if lines and os.environ.get("LOCAL_RANK", "0") == "0":
            print(*lines, sep="\n", flush=True)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    # A launcher's, of one process: accelerate would make a group of it, with DDP and a timeout of its own.
    for name in _OF_A_GROUP:
        os.environ.pop(name, None)
    if uses_gpu:  # one process uses one GPU; with several visible, transformers would wrap the model in DataParallel
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
    """The machine, with the number of processes that the launcher started: one where it was none."""
    ranks = whole_number("WORLD_SIZE", 1, 1)
    return detect_hardware(ranks, whole_number("LOCAL_WORLD_SIZE", ranks, 1))


def rank() -> int:
    """The number of this process among all of the job."""
    return int(os.environ.get("RANK", "0"))


def is_first_rank() -> bool:
    """Whether this process is the one that writes and speaks."""
    return rank() == 0


def quiet_frameworks() -> None:
    """Keep the frameworks' notes off the terminal: deprecations, hints, and one line a rank of everything. Errors stay."""
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
    """Compare what nvidia-smi told the plan with what torch can use.

    Raises:
        PlanError: They disagree.
    """
    import torch

    if (hardware.gpu is not None) == torch.cuda.is_available():
        return
    if hardware.gpu is None:
        raise PlanError(
            "torch sees a GPU that nvidia-smi does not list, so the plan is one for a CPU. Put nvidia-smi on PATH, or hide the GPU: "
            "CUDA_VISIBLE_DEVICES=''."
        )
    raise PlanError(
        f"nvidia-smi lists {hardware.gpu.name}, and torch {torch.__version__} cannot use it: a build without CUDA, or a driver too old for "
        "it. Install a build of torch for this driver, or train on the CPU: CUDA_VISIBLE_DEVICES=''."
    )


def join_group(deepspeed: bool, uses_gpu: bool, timeout: int, offloads: bool = False) -> None:
    """Form the process group, where there is one to form.

    Args:
        deepspeed: DeepSpeed forms it.
        uses_gpu: Over NCCL, else gloo.
        timeout: Seconds after which a rank stops waiting for the others, in this group and in all made from it.
        offloads: FSDP2 keeps its shares in the machine's memory, and their norm is taken there.

    Raises:
        PlanError: The environment tells NCCL to wait for ever.
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
    """Give every group of this process the timeout that the recipe states.

    Raises:
        PlanError: The environment tells NCCL to wait for ever.
    """
    from torch.distributed import distributed_c10d

    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "0":
            raise PlanError(
                f"{name}=0: NCCL would wait for a lost rank for ever, whatever train.ddp_timeout. Unset it."
            )
    # A group that is made without a timeout takes these, not the default group's: DeepSpeed's and the device mesh's.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(distributed_c10d, name) is not None:  # None: a build without NCCL
            setattr(distributed_c10d, name, timedelta(seconds=seconds))


def group_timeouts() -> set[int]:
    """The timeouts of all groups that this process is part of, in seconds."""
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_map
    devices = [(group, device) for group in groups for device in group._device_types]
    return {int(group._get_backend(device).options._timeout.total_seconds()) for group, device in devices}


@cache
def quiet_group() -> Any:
    """All ranks over gloo, in a group of their own, for what is said between them outside the training."""
    import torch

    return torch.distributed.new_group(backend="gloo")


def _is_alone() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def from_first_rank(work: Callable[[], Value]) -> Value:
    """What the first rank's work gives, on every rank, however long it takes.

    Args:
        work: Called on the first rank alone.

    Raises:
        UserError: The first rank's, on every rank: each machine says what is wrong.
        RuntimeError: A rank is gone.
    """
    import torch

    if _is_alone():
        return work()
    box: list[Any] = [None, None]
    with _patience():
        if is_first_rank():
            try:
                box[0] = work()
            except UserError as error:
                box[1] = error
    torch.distributed.broadcast_object_list(box, src=0, group=quiet_group())
    if box[1] is not None:
        raise box[1]
    result: Value = box[0]
    return result


def _patience() -> AbstractContextManager[None]:
    from torch.distributed import distributed_c10d

    return patience(quiet_group(), distributed_c10d.default_pg_timeout.total_seconds())


@contextmanager
def met_at_the_end() -> Iterator[None]:
    """A stretch that every rank leaves when all have come to its end, however long one of them works in it.

    Raises:
        RuntimeError: A rank is gone.
    """
    if _is_alone():
        yield
        return
    with _patience():
        yield


def gather(value: Value) -> list[Value]:
    """The value of each rank, by rank, on every rank."""
    import torch

    if _is_alone():
        return [value]
    box: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(box, value, group=quiet_group())
    return box


def leave_group() -> None:
    """Dissolve the process group, and give the GPU's memory to whoever comes next."""
    import torch

    gc.collect()  # engines hold themselves in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    if torch.distributed.is_initialized():
        quiet_group.cache_clear()
        torch.distributed.destroy_process_group()
