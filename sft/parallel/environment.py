"""Settles what the frameworks read from the environment, which GPU they find, and what they print, before they are imported or start."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from sft.errors import PlanError
from sft.parallel.deepspeed import operations, prepare_builds
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Hardware, driver_version

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for a rank. A process by itself must not see it."""

_OF_A_GROUP = (*LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE")


def environment_without_launcher() -> dict[str, str]:
    """This process's environment for a process by itself, without what launchers and accelerate set."""
    prefixes = ("TORCHELASTIC", "ACCELERATE_", "FSDP_")
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED and not name.startswith(prefixes)}


def settle_allocator() -> None:
    """Have torch's allocator map more memory behind a segment instead of adding segments, so that less of a GPU is lost to fragments.

    Call it before torch is imported, since it reads this once. Keeps what the user has set, under the older name too.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def set_debug_environment(ddp: bool, uses_gpu: bool, folder: Path) -> None:
    """Make the libraries log and compare more; `folder` is that of the recipe's runs. Keeps what the user has set."""
    values = {
        # torch compares each collective between the ranks before it starts, and names the rank of one that differs. On CPU ranks its DDP
        # crashes then (SIGSEGV: it takes the comparing group for gloo's own).
        "TORCH_DISTRIBUTED_DEBUG": "INFO" if ddp and not uses_gpu else "DETAIL",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "NCCL_DEBUG": "INFO",
    }
    if uses_gpu:
        folder.mkdir(parents=True, exist_ok=True)
        values["NCCL_DEBUG_FILE"] = str(folder / f"rank-{os.environ.get('RANK', '0')}.nccl.log")
    for name, value in values.items():
        os.environ.setdefault(name, value)
    if "torch" in sys.modules:  # it reads the level when it is imported, and the plan may have done that
        distributed: Any = sys.modules["torch"].distributed
        distributed.set_debug_level_from_env()


def settle_environment(deepspeed: DeepSpeedFile | None, uses_gpu: bool, precision: str) -> None:
    """Make the environment agree with the plan; before accelerate or deepspeed is imported.

    Raises:
        PlanError: `accelerate launch` requests an engine or a precision that the recipe does not name, or DeepSpeed's operations cannot
            be built.
    """
    _refuse_accelerates_choices(deepspeed is not None, precision)
    # accelerate would follow these over the recipe: ACCELERATE_USE_CPU, for one, silently turns DeepSpeed into DDP.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if uses_gpu:
        # The flight recorder: the last collectives of each rank, written when one takes longer than the group's timeout.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if deepspeed is not None:
        lines = prepare_builds(operations(deepspeed, uses_gpu))
        if lines and os.environ.get("LOCAL_RANK", "0") == "0":
            print(*lines, sep="\n", flush=True)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    # From one launched process accelerate would make a group, with DDP and a timeout of its own.
    for name in _OF_A_GROUP:
        os.environ.pop(name, None)
    if uses_gpu:  # with several visible GPUs transformers would wrap the model in DataParallel
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if deepspeed is not None:  # which would otherwise ask MPI
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


_BY = "(its options, or a configuration left by `accelerate config`)"


def _refuse_accelerates_choices(deepspeed: bool, precision: str) -> None:
    for engine, in_recipe in {"FSDP": False, "DEEPSPEED": deepspeed, "MEGATRON_LM": False}.items():
        if os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() in ("true", "1") and not in_recipe:
            raise PlanError(
                f"accelerate launch requests {engine} {_BY}, but only the recipe names the engine: train.deepspeed or train.fsdp, or DDP "
                "without them. Start it without."
            )
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if requested not in ("no", precision):
        raise PlanError(
            f"accelerate launch requests mixed precision {requested} {_BY}, but only the recipe decides: train.precision gives "
            f"{precision}. Start it without, or set train.precision={requested}."
        )


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """Compare the GPUs that the plan found with those that torch can use.

    Raises:
        PlanError: They disagree.
    """
    import torch

    if (hardware.gpu is not None) == torch.cuda.is_available():
        return
    cpu = "train on the CPU: CUDA_VISIBLE_DEVICES=''"
    if hardware.gpu is None:
        raise PlanError(
            f"torch sees a GPU that its driver's library (NVML) does not list, so the plan is for a CPU. To {cpu}."
        )
    raise PlanError(
        f"This machine has {hardware.gpu.name} with driver {driver_version() or 'unknown'}, and torch {torch.__version__} (CUDA: "
        f"{torch.version.cuda}) does not start on it. CUDA 13 needs driver 580 or newer. Install a torch that fits the driver (README.md: "
        f"Install it your way), or {cpu}."
    )
