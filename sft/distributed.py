"""The processes of a job: found in the environment that a launcher made, joined into a group, and kept quiet.

python -m sft.train              one process
torchrun, accelerate launch, deepspeed   one process a GPU; each sets RANK, WORLD_SIZE, LOCAL_RANK
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import warnings
from datetime import timedelta
from typing import Any

from sft.errors import PlanError
from sft.hardware import Hardware, detect_hardware


def set_debug_environment(ddp: bool, uses_gpu: bool) -> None:
    """Have the libraries log and compare more; before torch is imported. What the user has set stays.

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


def settle_environment(deepspeed: bool, uses_gpu: bool) -> None:
    """Make the environment say what the plan says; before torch, accelerate or deepspeed is imported.

    Args:
        deepspeed: The recipe names a DeepSpeed file.
        uses_gpu: The job runs on GPUs.

    Raises:
        PlanError: `accelerate launch` was asked for an engine that the recipe does not name.
    """
    engines = {"FSDP": False, "DEEPSPEED": deepspeed, "MEGATRON_LM": False}
    for engine, in_recipe in engines.items():
        if os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() in ("true", "1") and not in_recipe:
            raise PlanError(
                f"accelerate launch was asked for {engine} (its options, or a configuration left by `accelerate config`), and the "
                "recipe is not. The recipe names the engine: train.deepspeed, or DDP without it."
            )
    # accelerate would follow these over the recipe: ACCELERATE_USE_CPU, for one, turns DeepSpeed into DDP in silence.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not uses_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "WORLD_SIZE" in os.environ:
        return
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
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return detect_hardware(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


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


def join_group(deepspeed: bool, uses_gpu: bool) -> None:
    """Form the process group, where there is one to form."""
    import torch

    if "WORLD_SIZE" not in os.environ or (not deepspeed and os.environ["WORLD_SIZE"] == "1"):
        return
    if uses_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if uses_gpu else "gloo"
    if deepspeed:
        import deepspeed as engine

        # transformers would do this too late: ZeRO-3 asks for the number of ranks while the model loads.
        engine.init_distributed(dist_backend=backend, verbose=False)
    else:
        torch.distributed.init_process_group(backend)


def _patient_group() -> Any:
    """All ranks in a group of their own, in which a rank may wait for another that works for hours.

    The first rank prepares the data and merges adapters alone. The group of the training keeps its short timeout, so that a
    hang there is noticed.
    """
    import torch

    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))


def from_first_rank(value: Any) -> Any:
    """The first rank's value, on every rank, however long it takes."""
    import torch

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, group=_patient_group())
    return box[0]


def check_same_plan(decisions: dict[str, Any]) -> None:
    """Compare this rank's plan with the first one's: machines that differ may resolve `auto` differently.

    Args:
        decisions: What the plan decided for this rank, by name.

    Raises:
        PlanError: They differ, and the ranks would wait for each other for ever or train each in its own way.
    """
    first = from_first_rank(decisions)
    wrong = [
        f"  {name}: {first[name]} there, {value} here" for name, value in decisions.items() if value != first[name]
    ]
    if wrong:
        rank = os.environ.get("RANK", "0")
        remedy = (
            "Its machine is another one: write these into the recipe instead of auto, or use machines that are alike."
        )
        raise PlanError("\n".join([f"Rank {rank} does not plan what the first rank plans:", *wrong, remedy]))


def wait_for_all() -> None:
    """Return when every rank has come here, however long it takes."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier(group=_patient_group())


def leave_group() -> None:
    """Dissolve the process group, and give the GPU's memory to whoever comes next."""
    import torch

    gc.collect()  # engines hold themselves in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
